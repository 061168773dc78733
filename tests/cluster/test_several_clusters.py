"""Several clusters in one process: which one a cell runs on, and how a cell in the background is told in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp_lab import ClusterError, current_cluster
from ddp_lab.notebook import commands, completion
from ddp_lab.protocol.messages import CellText, Complete
from tests.cluster.conftest import Lab
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Lab, Lab]]:
    """Two clusters; the second is the current one."""
    with Lab(2, name="first") as first, Lab(1, name="second") as second:
        yield first, second


def run(code: str, name: str, cluster: str | None = None, wait: bool = True) -> None:
    """What `%%distributed` does with a line."""
    commands.run_cell(
        CellText(code, name=name),
        cluster_name=cluster,
        ranks=None,
        label=name,
        timeout=None,
        dashboard=False,
        wait=wait,
        quiet=False,
        view=None,
    )


def test_a_cell_runs_where_it_is_told(both: tuple[Lab, Lab], capsys: pytest.CaptureFixture[str]) -> None:
    """On the current cluster, which `use` changes, or on the one of `--cluster`; an unknown name is told."""
    first, second = both
    assert repr(Lab(1, name="third")) == "<Cluster 'third': not started>"
    run("print(world_size)", "here")
    assert capsys.readouterr().out == "[rank 0] 1\n"
    run("print(world_size)", "there", "first")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]  # in the order of arrival
    assert ("there" in first.results, "there" in second.results) == (True, False)
    commands.use("first")
    assert capsys.readouterr().out == "current: <Cluster 'first': ranks 0–1, cpu, idle>\n"
    assert current_cluster() is first
    commands.use("second")
    with pytest.raises(ClusterError, match=r"no cluster 'third' is running in .*: there are second and first"):
        run("1", "nowhere", "third")


def test_a_name_is_given_once(both: tuple[Lab, Lab]) -> None:
    """A second cluster of a running one's name is refused before it starts; automatic names skip taken ones."""
    with pytest.raises(ClusterError, match=r"a cluster 'first' is already running in .*: choose another name, or"):
        Lab(1, name="first").start()
    automatic = Lab(1).name
    assert automatic is not None
    following = f"cluster-{int(automatic.partition('-')[2]) + 1}"
    both[1].name = following  # as if it had been started so
    try:
        assert Lab(1).name == f"cluster-{int(automatic.partition('-')[2]) + 2}"
    finally:
        both[1].name = "second"


def test_all_are_listed(both: tuple[Lab, Lab], capsys: pytest.CaptureFixture[str]) -> None:
    """The current one first, with an arrow."""
    commands.list_clusters()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0] == ["→", "second", "rank", "0,", "cpu,", "idle", "this", "notebook"]
    assert rows[1] == ["first", "ranks", "0–1,", "cpu,", "idle", "this", "notebook"]


def test_names_are_completed_from_the_cluster_that_is_named(both: tuple[Lab, Lab]) -> None:
    """Tab asks the cluster of `--cluster`, else the current one."""
    first, second = both
    for lab, name in ((first, "only_first"), (second, "only_second")):
        lab.run(f"{name} = 1")
    for options, found in (
        ("", "only_second"),
        (" --cluster first", "only_first"),
        (" --cluster=second", "only_second"),
    ):
        answer = completion.ask(options, Complete("only_"), 30)
        assert answer is not None
        assert [name for name, _ in answer.matches] == [found]


def test_a_cell_in_the_background_is_told_in_a_terminal(
    both: tuple[Lab, Lab], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines say that it runs, and how it ended; of a failure the report follows."""
    said = ""

    def ended(words: str) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return words in said

    run("if rank == 1: raise ValueError('end of data')\ndist.barrier()", "fails", "first", wait=False)
    wait_until(lambda: ended("rank 0 waited for rank 1"), "the report")
    assert said.startswith("fails is running …\n")
    assert "fails: ✗ rank 1 failed after " in said
    assert "ValueError: end of data" in said
    assert both[0].sum_of_ones() == {0: 2.0, 1: 2.0}
