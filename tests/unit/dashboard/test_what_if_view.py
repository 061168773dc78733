"""The sliders' answers without a browser: from a recording to predictions, frames and pictures."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.dashboard.controls.what_if import NOTHING, WhatIfStage, frame_of, parts_ms
from ddp_lab.dashboard.paint.scene_svg import framed
from ddp_lab.dashboard.views.what_if import what_if_scene
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.simulator import Configuration, simulate
from ddp_lab.simulation.workload import Workload
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training

LINK = CommModel(latency_ns=1e5, ns_per_byte=0.4)


@pytest.fixture
def timeline() -> Timeline:
    """Ten steps of two ranks with three buckets; rank 1 is late in bucket 1."""
    return Training(2, 3, forward_ms=2.5, delays={(1, 1): 4.0}).trained(10, ms=20)


def _stage(timeline: Timeline) -> WhatIfStage:
    made = WhatIfStage(timeline, lambda: LINK)
    made.look("page", ["what_if"], None)
    return made


def test_before_the_first_steps_it_says_what_to_do(timeline: Timeline) -> None:
    """Without steps there is no prediction, but words, in the view and in the picture. A page that does not show the
    sliders gets no answers; when it does, it has one."""
    stage = _stage(Timeline())
    assert stage.shown()["what_if"] == {"state": "empty", "text": NOTHING}
    assert "train some steps" in framed(what_if_scene(stage.snapshot()))
    stage = WhatIfStage(timeline, lambda: LINK)
    stage.look("page", ["overlap"], None)
    assert stage.shown()["what_if"]["state"] == "empty"
    stage.look("page", ["what_if"], None)
    assert stage.shown()["what_if"]["state"] == "ready"


def test_each_slider_changes_the_answer(timeline: Timeline) -> None:
    """More ranks and a slower link take longer, no straggler takes less, and the answer is numbered as asked."""
    stage = _stage(timeline)
    recorded = stage.shown()["what_if"]["predicted"]["step"]

    def asked(**what: object) -> float:
        stage.ask({"number": 7, **what})
        answer = stage.shown()["what_if"]
        assert answer["number"] == 7
        parts = {name: value for name, value in answer["predicted"].items() if name != "step"}
        assert sum(parts.values()) == pytest.approx(answer["predicted"]["step"])
        return float(answer["predicted"]["step"])

    assert asked(world=19) > 2 * recorded
    assert asked(bandwidth=0) > recorded
    assert asked(latency=24) > recorded
    assert asked(without=True) < recorded - 1
    assert asked() == pytest.approx(recorded)


def test_positions_of_another_model(timeline: Timeline) -> None:
    """Sliders that stand where another model's range went on get the last of this one's, and an answer. The picture has
    a bar for the recorded and for the predicted step, and their times as text."""
    stage = _stage(timeline)
    stage.ask({"cap": 10_000, "without": True})
    answer = stage.shown()["what_if"]
    assert answer["state"] == "ready"
    assert answer["cap"] == answer["limits"]["caps"][-1]
    answer = _stage(timeline).snapshot()
    svg = framed(what_if_scene(answer))
    for name in ("recorded", "what if", "exposed communication"):
        assert name in svg
    assert f"{answer['predicted']['step']:.2f} ms" in svg
    assert np.isfinite(answer["gbit"])


def test_a_prediction_is_a_complete_step() -> None:
    """The frame has the prediction's times, on every rank, relative to the first backward's begin."""
    workload = Workload.made_up([1 << 20] * 4, forward_ns=2e7, backward_ns=4e7, other_ns=5e6)
    predicted = simulate(workload, Configuration(1.0, world_size=2), CommModel(0, 15e6 / (1 << 20)))
    frame = frame_of(workload, predicted, [3], 5)
    assert (frame.reducer, frame.ranks, frame.shape, frame.complete) == (5, [3], (1, 4), True)
    times = frame.milliseconds(frame.times_ns)[0]
    assert times[:, 1] == pytest.approx([10, 20, 30, 40])
    assert times[:, 3] == pytest.approx([25, 40, 55, 70])
    assert frame.milliseconds(frame.outside_ns)[0] == pytest.approx([-20, 0, -25])
    parts = parts_ms(predicted)
    assert parts["step"] == pytest.approx(95)
    assert parts["alone"] + parts["hidden"] == pytest.approx(40)
