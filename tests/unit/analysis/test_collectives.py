"""What is shown of a collective that ran step by step: words, tables, pictures; of steps made up by its schedule."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ElementTree

import pytest

from ddp_lab.analysis.collectives import ALGORITHMS, CollectiveStep, Holds, schedule
from ddp_lab.control.collectives import ShownCollective, choices
from ddp_lab.dashboard.controls.collectives import CollectiveStage
from ddp_lab.dashboard.paint.figure import to_plotly
from ddp_lab.dashboard.views.collectives import collective_scene, collective_svg
from ddp_lab.errors import ClusterError
from tests.waiting import DEADLINE_S, wait_until

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]


def shown_of(collective: str, algorithm: str, ranks: int = 4) -> ShownCollective:
    """A run in which every transfer arrived; parts of 1 KiB."""

    def begins(rank: int, part: int) -> tuple[int, ...]:
        there = {"all_gather": part == rank, "broadcast": rank == 0}.get(collective, True)
        return (rank,) if there else ()

    holds: Holds = tuple(tuple(begins(rank, part) for part in range(ranks)) for rank in range(ranks))
    begin, steps = holds, []
    for step in schedule(collective, algorithm, ranks):
        after = [list(parts) for parts in holds]
        for one in step:
            for part, place in zip(one.parts, one.places, strict=True):
                arrived = set(holds[one.source][part]) | (set(holds[one.target][place]) if one.reduces else set())
                after[one.target][place] = tuple(sorted(arrived))
        holds = tuple(map(tuple, after))
        steps.append(CollectiveStep(tuple(step), tuple(1024 * len(one.parts) for one in step), holds, 0.5))
    return ShownCollective(collective, algorithm, ranks, 1024 * ranks, begin, tuple(steps))


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_pictures_of_every_algorithm(collective: str, algorithm: str) -> None:
    """The saved picture is valid XML with a small picture for each step, and tells what the last one left."""
    made = shown_of(collective, algorithm, 8)
    root = ElementTree.fromstring(collective_svg(made))
    words = list(root.itertext())
    assert "start" in words
    assert [one for one in words if one.endswith("0.50 ms") and one[0].isdigit()].__len__() == len(made.steps)
    if collective == "all_reduce":
        assert "rank 7, part 7: contributions of 0, 1, 2, 3, 4, 5, 6, 7" in words
    if collective == "all_to_all":
        assert "rank 7, part 5: contributions of 5" in words
        assert "part 5 came from rank 5" in words
    figure = to_plotly(collective_scene(made), 460)
    assert sum(sum(trace.y) for trace in figure.data if trace.yaxis == "y2") * 1024 == sum(map(made.sent, range(8)))


def test_what_is_said_without_a_run() -> None:
    """Before the first run picture and figure name the call that makes one; algorithms for powers of two are offered
    with the reason why three ranks can't run them."""
    assert "animate_collective()" in collective_svg(None)
    with pytest.raises(ValueError, match="animate_collective"):
        to_plotly(collective_scene(None), 460)
    assert choices(4)["all_reduce"] == {"ring": "", "tree": "", "halving": ""}
    assert "power of two" in choices(3)["all_reduce"]["halving"]


def test_the_table_has_a_row_for_each_part() -> None:
    """Step, rank, part, contributions, bytes sent in the step: also of the state before the first step."""
    made = shown_of("all_gather", "ring", 3)
    table = made.table()
    assert len(table) == 3 * 3 * 3
    assert table[(table.step == 0) & (table["rank"] == 1)].contributions.tolist() == [(), (1,), ()]
    assert table[table.step == 2].contributions.tolist() == [(0,), (1,), (2,)] * 3
    assert table[(table.step == 1) & (table.part == 0)].sent_bytes.tolist() == [1024] * 3


def test_the_newest_question_is_answered() -> None:
    """Questions that come while one is run are left out but the last, whose end alone is shown; a failure in words."""
    asked, go = [], threading.Event()

    def run(collective: str, algorithm: str, size: int) -> ShownCollective:
        asked.append(algorithm)
        assert go.wait(DEADLINE_S)
        if algorithm == "tree":
            raise ClusterError("rank 1 is dead")
        return shown_of(collective, algorithm)

    stage = CollectiveStage(run, lambda: choices(4))
    go.set()
    stage.ask({"collective": "all_reduce", "algorithm": "ring", "bytes": 1024})
    wait_until(lambda: not stage.running, "the end of the question")
    go.clear()
    for algorithm in ("halving", "ring", "tree"):
        stage.ask({"collective": "all_reduce", "algorithm": algorithm, "bytes": 1024})
        wait_until(lambda: len(asked) > 1, "the next question")
    assert stage.told()["state"] == "running"
    go.set()
    wait_until(lambda: not stage.running, "the end of the question")
    assert asked == ["ring", "halving", "tree"]
    assert stage.told()["number"] == 1
    assert stage.told()["state"] == "failed"
    assert stage.told()["text"] == "rank 1 is dead"
    assert stage.told()["shown"]["algorithm"] == "ring"
