"""What is judged after a rejoin, a rebuild or a change: the last layout of the buckets that has steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab.dashboard.controls.buckets import compared
from ddp_lab.dashboard.controls.what_if import WhatIfStage
from ddp_lab.dashboard.live import ViewFacts
from ddp_lab.dashboard.report.data import gather
from ddp_lab.timeline.model_registry import layouts, newest
from ddp_lab.timeline.timeline import Timeline
from tests.unit.step_model import History, StepModel

MB = 1_000_000
MODEL = StepModel(
    gradients=[1.0] * 8,
    sizes=[MB] * 8,
    buckets=[[0, 1], [2, 3], [4, 5], [6, 7]],
    late=lambda rank, step: {4: 4.0} if rank == 1 else {},
    per_mb=0.9,
    options={"bucket_cap_mb_list": [2.0]},
)
FIRST = replace(MODEL, buckets=[list(range(8))])


def trained(steps: int = 60) -> History:
    """A step with the first assignment, then the others with the rebuilt one."""
    made = History()
    made.assign(FIRST, 0, rebuilt=False)
    made.train(FIRST, 0, 1)
    made.assign(MODEL, 1)
    made.train(MODEL, 1, steps)
    return made


def rejoin(history: History, generation: int) -> None:
    """A backward is given up, and the first assignment is back under the next number."""
    history.abandon(generation)
    history.assign(FIRST, generation + 1, rebuilt=False)


def views(timeline: Timeline) -> dict[str, dict[str, Any]]:
    """What the browser gets of findings and stragglers."""
    facts = ViewFacts(timeline)
    facts.look("page", ["findings", "stragglers"], None)
    return facts.update(force=True)


def test_a_rejoin_changes_no_analysis(tmp_path: Path) -> None:
    """After a rejoin findings, late ranks, summary, sliders and report are those of before, also in a saved file."""
    whole, broken = trained(), trained()
    rejoin(broken, 1)
    before, after = whole.timeline, broken.timeline
    assert before.findings()[0].kind == "straggler"
    loaded = Timeline.load(after.save(tmp_path / "run.npz"))
    for timeline in (after, loaded):
        assert timeline.findings() == before.findings()
        assert timeline.stragglers() == before.stragglers()
        assert timeline.summary() == before.summary()
        assert views(timeline) == views(before)
        assert timeline.simulate(bucket_cap_mb=1).step_ms == before.simulate(bucket_cap_mb=1).step_ms
        asked, wanted = (WhatIfStage(one).snapshot() for one in (timeline, before))
        assert [asked[name] for name in ("recorded", "same", "about")] == [
            wanted[name] for name in ("recorded", "same", "about")
        ]
        one, other = gather(timeline, None, 400), gather(before, None, 400)
        assert (one.findings, one.tables, one.analysed) == (
            other.findings, other.tables, other.analysed,
        )  # fmt: skip


def test_which_steps_were_judged_is_said() -> None:
    """Findings, stragglers and sliders name their steps, and no sentence has an internal word. Without a complete step
    nothing is called good; a model without a finding is, with the number of steps."""
    broken = trained()
    rejoin(broken, 1)
    found = views(broken.timeline)
    told = [
        found["findings"]["blocks"][0]["text"],
        found["stragglers"]["blocks"][0]["text"],
        WhatIfStage(broken.timeline).snapshot()["about"],
    ]
    assert told[0] == "3 findings in 57 steps (steps 4–60)."
    assert "Analysed: 57 steps (steps 4–60)" in str(told[1])
    assert "steps 4–60" in str(told[2])
    assert broken.timeline.findings()[0].steps == (4, 60)
    assert not [text for text in map(str, told) if "generation" in text or "reducer" in text]
    history = History()
    history.assign(FIRST, 0, rebuilt=False)
    history.abandon(0)
    assert views(history.timeline)["findings"]["blocks"][0]["text"] == "No step is complete on every rank yet."
    good = replace(MODEL, gradients=[2.0] * 8, buckets=[[i] for i in range(8)], per_mb=0.4, late=lambda rank, step: {},
                   options={"gradient_as_bucket_view": True})  # fmt: skip
    text = str(views(good.record(20))["findings"]["blocks"][0]["text"])
    assert text.startswith("No change would save half a percent of the step. Analysed: buckets")
    assert text.endswith("in 17 steps (steps 3–19).")


def test_few_steps_with_another_layout_are_not_judged() -> None:
    """Up to four steps after a change the steps before it are judged, and it is said that there are newer ones.
    Findings of a layout are not disturbed by buckets that only an earlier one had."""
    history, other = trained(), replace(MODEL, buckets=[[0, 1, 2, 3], [4, 5, 6, 7]])
    before = history.timeline.findings()
    history.assign(other, 2)
    history.train(other, 2, 4)
    assert history.timeline.findings() == before
    assert "4 newer steps with another bucket layout are not enough" in str(
        views(history.timeline)["findings"]["blocks"][0]["text"]
    )
    history.train(other, 2, 16)
    assert history.timeline.findings()[0].steps == (64, 80)
    history, other = trained(), replace(MODEL, buckets=[[0, 1, 2], [3, 4, 5, 6, 7]])
    history.assign(other, 2)
    history.train(other, 2, 30)
    alone = History()
    alone.assign(other, 2)
    alone.step = 61
    alone.train(other, 2, 30)
    found, wanted = history.timeline.findings(), alone.timeline.findings()
    assert [(one.kind, one.steps) for one in found] == [(one.kind, one.steps) for one in wanted]
    assert [one.gain_percent for one in found] == pytest.approx([one.gain_percent for one in wanted], rel=1e-3)


def test_steps_before_and_after_a_rejoin_are_judged_together() -> None:
    """When the same buckets are back after a rejoin, the newest steps with them count, wherever they lie."""
    history = trained()
    rejoin(history, 1)
    history.train(FIRST, 2, 1)
    history.assign(MODEL, 3)
    history.train(MODEL, 3, 10)
    found = history.timeline.analysis_input()
    steps = found.steps.step.tolist()
    assert steps == [*range(4, 61), *range(66, 73)]
    assert "64 of steps 4–72" in str(views(history.timeline)["findings"]["blocks"][0]["text"])
    assert history.timeline.findings()[0].rank == 1


def test_a_rejoin_is_no_change_of_the_user() -> None:
    """Neither the first assignment that comes back nor its rebuild is shown beside a comparison or a way back."""
    history = trained()
    nothing = {"reducer": 0, "text": "", "sides": []}
    assert compared(history.timeline, 0) == nothing
    rejoin(history, 1)
    assert compared(history.timeline, 0) == nothing
    history.train(FIRST, 2, 1)
    history.assign(MODEL, 3)
    history.train(MODEL, 3, 30)
    assert compared(history.timeline, 0) == nothing


def test_layouts_by_hand() -> None:
    """Steps count that all ranks completed under one number; equal assignments are one layout, the newest decides."""
    one, other = {"buckets": [[0]], "generation": 1}, {"buckets": [[0, 1]], "generation": 2}
    steps = np.arange(12)
    generation = np.array([1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 2, 2])
    known = layouts([(steps, generation), (steps[1:], generation[1:])], {1: one, 2: other, 3: one | {"generation": 3}})
    assert [layout.step.tolist() for layout in known] == [[1, 2, 3, 4, 8, 9], [5, 6, 7, 10, 11]]
    assert [layout.description["generation"] for layout in known if layout.description] == [3, 2]
    assert newest(known) is known[1]
    assert newest(layouts([(steps[:10], generation[:10])], {1: one, 2: other, 3: one})).step.tolist()[-1] == 9  # type: ignore[union-attr]
    assert newest(layouts([], {})) is None
    assert known[1].warm(2).tolist() == [7, 10, 11]
    assert known[1].warm(3).tolist() == [5, 6, 7, 10, 11], "three would be too few"
