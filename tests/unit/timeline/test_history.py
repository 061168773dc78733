"""The history of a run: every step since its start, in bounded memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ddp_lab.analysis.step_metrics import PHASES, Breakdown
from ddp_lab.dashboard.views.overview import overview
from ddp_lab.timeline.history import COLUMNS, StepHistory
from ddp_lab.timeline.tables.span_columns import step_columns, typical_step
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training


def _steps(first: int, number: int) -> tuple[Breakdown, np.ndarray]:
    """Steps whose time is their number, a quarter of it exposed."""
    step = np.arange(first, first + number)
    parts = dict.fromkeys(PHASES, np.zeros(number)) | {"other": 0.75 * step, "exposed": 0.25 * step}
    return Breakdown(step, **parts, measured=1.0 * step, overlapped=np.zeros(number)), step * 10**9


def test_a_long_run_keeps_its_extremes() -> None:
    """However many steps come, there are few rows: all steps in order, with the exact smallest and largest times. Few
    steps are not joined, and none is there twice."""
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
    history = StepHistory()
    history.extend(*_steps(0, 0))
    assert history.last == -1
    history.extend(*_steps(0, 7))
    assert history.blocks(300)[:, COLUMNS.index("first")].tolist() == list(range(7))
    assert len(history.blocks(3)) <= 3


def test_the_timeline_remembers_steps_that_its_tables_forget() -> None:
    """A run of five times the steps that the tables keep is in the history without a gap, though nobody has looked.
    Facts of chosen steps have only these; of none there are no facts."""
    made = Training(2, 3, forward_ms=1.0).trained(200, timeline=Timeline(max_steps=40))
    rows = made.history(0).blocks(300)
    assert rows[:, COLUMNS.index("last")].tolist() == list(range(200))
    assert rows[1:, COLUMNS.index("median")] == pytest.approx(10.0, abs=1.5)
    assert np.median(rows[:, COLUMNS.index("exposed")]) > 0
    made = Training(2, 3, forward_ms=1.0).trained(60)
    facts = made.analysis_input(between=(20, 29))
    assert set(facts.steps.step.tolist()) <= set(range(20, 30))
    assert made.analysis_input(between=(100, 110)) is None


def test_logged_numbers_are_kept_and_saved(tmp_path: Path) -> None:
    """What ranks logged is in the timeline, in a file of it, and in the overview, where its steps and its newest value
    are named; a NaN is told, and left out of the line."""
    made, training = Timeline(), Training(2, 3, forward_ms=1.0)
    for step in range(60):
        training.feed(made, step, 10**12 + step * 10**7)
        for rank in range(2):
            value = float("nan") if step == 59 else 100.0 - step + rank
            at = 10**12 + step * 10**7 + 10**6
            made.describe(rank, {"type": "value", "name": "loss", "value": value, "at_ns": at, "session": 1})
    read = Timeline.load(made.save(tmp_path / "run.npz"))
    for one in (made, read):
        assert one.logged()[:2] == [(0, 10**12 + 10**6, "loss", 100.0), (1, 10**12 + 10**6, "loss", 101.0)]
        (loss,) = overview(one, one.analysis_input(), 0)["logged"]
        assert (loss["name"], loss["value"]) == ("loss", "nan")
        assert loss["values"][0] == pytest.approx(100, abs=1)
        assert loss["step"][-1] == 58
        assert loss["values"][-1] == pytest.approx(42, abs=1)


def test_the_overview_compares_with_the_steps_before() -> None:
    """A training that became slower says by how much; its parts, by rank too, add up to the step."""
    made, training = Timeline(), Training(2, 3, forward_ms=1.0)
    at = 10**12
    for step in range(400):
        at += 10**7 if step < 250 else 2 * 10**7
        training.feed(made, step, at)
    found = overview(made, made.analysis_input(), 0)
    assert re.search(r"% longer than in steps \d–2\d\d \(10\.", found["text"])
    assert sum(found["parts"]) == pytest.approx(found["total"], abs=1e-3)
    table = made.steps(last_steps=100)
    for rank, parts in found["ranks"]:
        of_rank = table[table["rank"] == rank]
        assert parts[PHASES.index("forward")] == pytest.approx(of_rank.forward_ms.median(), rel=0.01)
        assert sum(parts) == pytest.approx(of_rank.step_ms.median(), rel=0.01)
    assert overview(made, None, 0) == {"text": "No step is complete on every rank yet."}


def test_a_typical_step_of_two() -> None:
    """Two steps that differ have a typical one between them; a single one is typical itself."""
    made, training = Timeline(), Training(2, 3, forward_ms=1.0)
    at = 10**12
    for step in range(6):
        at += 10**7 * (1 + step % 2)
        training.feed(made, step, at)
    single, both = (typical_step(step_columns(made.views_of(0, np.array(steps)))) for steps in ([5], [4, 5]))
    whole = made.steps(0).groupby("step").step_ms.mean()
    assert single.total_ms == pytest.approx(whole[5], rel=0.01)
    assert both.total_ms == pytest.approx((whole[4] + whole[5]) / 2, rel=0.01)
    assert np.isfinite(both.by_rank_ms).all()
