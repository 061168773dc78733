"""What is said of a cell whose ranks wait, and when, of made-up ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from ddp_lab.diagnosis.rules import Diagnosis
from ddp_lab.diagnosis.snapshot import Place, RankSnapshot
from ddp_lab.diagnosis.sources.cells import Watch
from tests.unit.diagnosis.test_hangs import waiting
from tests.waiting import wait_until

IMPORT = Place("<frozen importlib._bootstrap>", 7, "_load", "", users=False)
DONE, CAUSE = RankSnapshot(1, "idle", runs="cell"), Diagnosis("ended", "rank 1 has finished the cell at line 4.")


class Cell:
    """Its ranks, and what is said of it."""

    def __init__(self, cause: Diagnosis | None) -> None:
        self.ranks: Sequence[RankSnapshot] = [waiting(0), RankSnapshot(1, "running", stack=(IMPORT,))]
        self.cause, self.waits = cause, list[int]()
        self.watch = Watch(self, self._why, 0.02)

    def snapshots(self) -> list[RankSnapshot]:
        return list(self.ranks)

    def _why(self, ranks: Collection[int]) -> Diagnosis | None:
        self.waits = list(ranks)
        return self.cause

    def next_word(self) -> str:
        return str(wait_until(lambda: self.watch.look(None), "a word"))


@pytest.mark.parametrize("cause", [CAUSE, None])
def test_a_wait_after_an_import(cause: Diagnosis | None) -> None:
    """That a rank imports is said once, and does not keep from saying that it then has finished without entering what
    the other one waits in: from what both have recorded, if they have."""
    cell = Cell(cause)
    assert "rank 1 is importing a module" in cell.next_word()
    cell.ranks = [waiting(0), DONE]
    text = cell.next_word()
    assert ("at line 4" if cause else "rank 1 has finished the cell; rank 0 still waits in") in text
    assert cell.waits == [0]


def test_who_is_ahead_does_not_wait() -> None:
    """A rank that has launched what another one did not enter, and does something else, is not said to wait for it."""
    cell = Cell(CAUSE)
    ahead = Diagnosis("ahead", "rank 0 launched all_reduce #3 and continued")
    computes = replace(cell.ranks[1], rank=0)
    assert cell.watch._of_an_end(ahead, [computes, DONE]) is ahead
    backward = replace(computes, stack=(Place("torch/autograd/graph.py", 9, "_engine_run_backward", "", users=False),))
    assert cell.watch._of_an_end(ahead, [backward, DONE]) is CAUSE
