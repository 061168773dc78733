"""The history of a run: every step since its start, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.step_metrics import Breakdown
from ddp_lab.timeline.history import COLUMNS, StepHistory
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training


def _steps(first: int, number: int) -> tuple[Breakdown, np.ndarray]:
    """Steps whose time is their number, a quarter of it exposed."""
    step = np.arange(first, first + number)
    none, whole = np.zeros(number), np.ones(number, bool)
    return Breakdown(step, 0.75 * step, none, none, none, 0.25 * step, whole), step * 10**9


def test_a_long_run_keeps_its_extremes() -> None:
    """However many steps come, there are few rows: all steps in order, with the exact smallest and largest times."""
    history = StepHistory(most_rows=64)
    for first in range(0, 10_000, 40):
        history.extend(*_steps(first, 40))
    rows = dict(zip(COLUMNS, history.blocks(50).T, strict=True))
    assert history.last == 9_999
    assert 10 < len(rows["first"]) <= 50
    assert rows["first"][0] == 0
    assert rows["first"][1:].tolist() == (rows["last"][:-1] + 1).tolist()
    assert rows["low"].tolist() == rows["first"].tolist()
    assert rows["high"].tolist() == rows["last"].tolist()
    assert (rows["low"] <= rows["median"]).all()
    assert (rows["median"] <= rows["high"]).all()
    assert rows["exposed"] == pytest.approx(0.25 * rows["median"])
    assert np.ptp(rows["last"][:-1] - rows["first"][:-1]) <= 256  # old steps are shown as finely as new ones
    assert rows["began"].tolist() == rows["first"].tolist()


def test_a_short_run_is_a_row_for_each_step() -> None:
    """Few steps are not joined, and none is there twice."""
    history = StepHistory()
    history.extend(*_steps(0, 0))
    assert history.last == -1
    history.extend(*_steps(0, 7))
    assert history.blocks(300)[:, COLUMNS.index("first")].tolist() == list(range(7))
    assert len(history.blocks(3)) <= 3


def test_the_timeline_remembers_steps_that_its_tables_forget() -> None:
    """A run of five times the steps that the tables keep is in the history without a gap, though nobody has looked."""
    made, training = Timeline(max_steps=40), Training(2, 3, forward_ms=1.0)
    for step in range(200):
        training.feed(made, step, 10**12 + step * 10**7)
    rows = made.history(0).blocks(300)
    assert rows[:, COLUMNS.index("last")].tolist() == list(range(200))
    assert rows[1:, COLUMNS.index("median")] == pytest.approx(10.0, abs=1.5)
    assert np.median(rows[:, COLUMNS.index("exposed")]) > 0


def test_a_step_is_judged_within_the_chosen_ones() -> None:
    """Facts of chosen steps have only these; of none there are no facts."""
    made, training = Timeline(), Training(2, 3, forward_ms=1.0)
    for step in range(60):
        training.feed(made, step, 10**12 + step * 10**7)
    facts = made.judgement(between=(20, 29))
    assert facts is not None
    assert set(facts.steps.step.tolist()) <= set(range(20, 30))
    assert made.judgement(between=(100, 110)) is None
