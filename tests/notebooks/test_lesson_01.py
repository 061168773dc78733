"""Lesson 1, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

WRONG = {
    "1": {
        "%%distributed\npart = sum(numbers[:100])": "Together they are",
        "%%distributed\npart = sum(numbers) if rank == 0 else 0": "One rank does all the work",
        "%%distributed\npart = torch.tensor(sum(numbers) / world_size)": "is the whole sum, divided",
    },
    "2": {
        "%%distributed\nmean = mine.mean()\ndist.all_reduce(mean)\nmean = mean / 2": "mean of the two means",
        "%%distributed\nmean = 1.0": "should be",
    },
}

CAME_TRUE = {
    1: "5",
    2: "both ranks",
    3: "its cell ends with an error",
}


def test_errors_cost_nothing(lesson: running.Notebook) -> None:
    """After one rank's error, and after a time-out, the ranks still have their variables and work together."""
    failed = running.text(running.cell(lesson, "one-rank-fails"))
    assert "rank 1 trips over its shoelaces" in failed
    assert "rank 0 waited for rank 1 in all_reduce #" in failed
    works = running.text(running.cell(lesson, "works-again"))
    assert "rank 0 still has part = 250000" in works
    assert "ranks 0–1 → 500500" in works
    assert "did not end within 2 s" in running.text(running.cell(lesson, "timeout"))
    assert re.search(r"\{0: \d+, 1: \d+\}", running.text(running.cell(lesson, "after-timeout")))
