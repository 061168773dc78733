"""What is tested of every lesson: its module imports these tests, and has `WRONG` and mostly `CAME_TRUE`."""

from __future__ import annotations

import pytest

from . import running
from .judging import judge


def test_checks(lesson: running.Notebook, request: pytest.FixtureRequest) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    judge(lesson, request.module.WRONG)


def test_predictions(lesson: running.Notebook, request: pytest.FixtureRequest) -> None:
    """What the folded answers say has come true, where it depends neither on the machine nor on PyTorch's version."""
    for number, outcome in request.module.CAME_TRUE.items():
        assert f"What happened: {outcome}. " in running.text(running.tagged(lesson, f"compare-{number}"))
