"""The runner of torch's tests itself: a test that did not pass can't look as if it had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_suite.running import OURS, Listed, Suites


@pytest.fixture(scope="module")
def ours(suites: Suites) -> Iterator[Suites]:
    """With our class, in forked ranks, whatever the environment says."""
    if (suites.cls, suites.start) == (OURS, "fork"):
        yield suites
        return
    own = Suites(OURS)
    yield own
    own.close()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_every_process_constructs_our_class(start: str, ours: Suites) -> None:
    """In forked and in spawned ranks each of torch's names of the class constructs ours, and none torch's."""
    suites = ours if start == "fork" else Suites(OURS, start)
    found = suites.run(Listed("plain", 2, "TwoRanks::test_constructs"))
    if suites is not ours:
        suites.close()
    assert found.outcome == "passed", found.text
    assert len({made.pid for made in found.constructed}) == 2
    assert {(made.cls.split(".")[0], made.by.split(".")[0]) for made in found.constructed} == {("ddp_lab", "ddp_lab")}


@pytest.mark.soak
def test_torchs_own_class_is_the_control() -> None:
    """Asked for torch's own class, the ranks construct that."""
    suites = Suites("stock")
    found = suites.run(Listed("plain", 2, "TwoRanks::test_constructs"))
    suites.close()
    assert found.outcome == "passed", found.text
    assert {(made.cls.split(".")[0], made.by.split(".")[0]) for made in found.constructed} == {("torch", "torch")}


def test_failure_of_a_rank_is_told(ours: Suites) -> None:
    """A test that fails on one rank has failed, with that rank's traceback and the output of all ranks."""
    found = ours.run(Listed("plain", 2, "TwoRanks::test_fails_on_rank_1"))
    assert found.outcome == "failed"
    assert "what rank 1 has to say" in found.text
    assert "rank 0 was here" in found.log


@pytest.mark.soak
def test_hanging_test_is_ended(ours: Suites) -> None:
    """A test that hangs has failed when its time is over, and the output says where each process was."""
    found = ours.run(Listed("plain", 2, "TwoRanks::test_hangs", seconds=10))
    assert found.outcome == "failed"
    assert "not finished after 10 s" in found.text
    assert found.log.count("in test_hangs") == 2
    assert "in _join_processes" in found.log


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("OneProcess::test_is_skipped", "skipped"),
        ("OneProcess::test_dies", "failed"),
        ("OneProcess::test_of_another_release", "missing"),
    ],
)
def test_only_passing_is_passed(test: str, outcome: str, ours: Suites) -> None:
    """A test that was skipped, whose process died, or that does not exist has not passed."""
    assert ours.run(Listed("plain", 2, test)).outcome == outcome
