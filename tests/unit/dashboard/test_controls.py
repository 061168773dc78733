"""The dashboard's controls without ranks: words for what stands where, changes taken back, comparisons, requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddp_lab import faults
from ddp_lab.control.records import BucketStage, StepState
from ddp_lab.dashboard.controls import Controls
from ddp_lab.dashboard.controls.buckets import BucketControl, change_back, compared, described
from ddp_lab.dashboard.controls.control import FaultControl, fault_rows
from ddp_lab.dashboard.controls.stepping import StepControl, machine, standings
from ddp_lab.dashboard.dashboard import Dashboard
from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.changes import last_change
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training
from tests.unit.backwards import assignment
from tests.unit.step_model import History, StepModel


def state(rank: int, *buckets: str, step: int = 4, **fields: Any) -> StepState:
    """A rank in the middle of a backward."""
    stages = tuple(BucketStage(one, 0 if one == "pending" else 2, 2, ()) for one in buckets)
    values = {"generation": 1, "point": None, "parameter": None, "bucket": None, "since_ns": 0, "in_flight": True}
    values |= {"finalizing": False, "armed": True, "ended": ""} | fields
    return StepState(rank=rank, step=step, buckets=stages, **values)


def test_a_rank_waits_for_the_one_that_pauses() -> None:
    """A rank that has launched everything waits, in bucket order, for the ranks that have not launched that bucket.
    What a rank launched in an earlier step does not count; one that is a step ahead has launched everything."""
    found = standings(
        {
            0: state(0, "reduced", "launched", "launched", finalizing=True),
            1: state(1, "launched", "ready", "pending", point="bucket_ready", bucket=1),
            2: state(2, "launched", "pending", "pending"),
        }
    )
    assert (found[0].kind, found[0].bucket, found[0].waits_for) == ("waiting", 1, (1, 2))
    assert found[0].text == "waits for ranks 1 and 2, which have not launched bucket 1"
    assert found[1].text == "pauses: bucket 1 is ready, not yet launched"
    assert found[2].text == "computes gradients; 1 of 3 buckets are launched"
    behind = state(1, "reduced", "reduced", step=3, in_flight=False)
    found = standings({0: state(0, "launched", "launched", finalizing=True), 1: behind})
    assert found[0].waits_for == (1,)
    ahead = state(1, "pending", "pending", step=5, in_flight=False)
    found = standings({0: state(0, "launched", "launched", point="reduced", bucket=0), 1: ahead})
    assert found[1].text == "has finished step 4; the backward of step 5 is next"
    found = standings({0: state(0, "launched", "launched", finalizing=True), 1: ahead})
    assert (found[0].kind, found[0].waits_for) == ("finishing", ())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"point": "gradient_ready", "parameter": "0.bias"}, "the gradient of '0.bias' is ready, not yet in its"),
        ({"point": "bucket_ready", "bucket": 1}, "not yet launched (bucket 0 must be launched first)"),
        ({"point": "launched", "bucket": 1}, "the collective of bucket 1 has been started"),
        ({"point": "reduced", "bucket": 1}, "the average of bucket 1 is computed, not yet written back"),
    ],
)
def test_pauses_in_words(fields: dict[str, Any], words: str) -> None:
    """Each point at which a backward can pause says what has happened and what has not."""
    assert words in standings({0: state(0, "pending", "ready", **fields)})[0].text


def test_what_the_machine_shows() -> None:
    """The browser gets armed and paused ranks, why breakpoints ended, and each bucket with its missing gradients. A
    rank's faults come with their number, whether they have begun, and the words of their mark."""
    missing = tuple(f"{index}.weight" for index in range(9))
    stage = BucketStage("pending", 1, 10, missing)
    states = {
        0: state(0),
        1: state(1, point="launched", bucket=0, since_ns=5),
        2: state(2, armed=False, ended="it fell"),
    }
    states[0] = StepState(**{**states[0].__dict__, "buckets": (stage,)})
    shown = machine(states, standings(states), lambda one: 7.0)
    assert (shown["armed"], shown["paused"], shown["ended"]) == ([0, 1], [1], "it fell")
    assert shown["ranks"][0]["buckets"] == [["pending", 1, 10, list(missing[:6]), 3]]
    assert [one["since"] for one in shown["ranks"]] == [None, 7.0, None]
    fault = faults.SlowLayer(1, "0.weight", 0.05)
    (row,) = fault_rows({1: [{**faults.to_dict(fault), "number": 3, "begun": False}]})
    assert row == {"rank": 1, "number": 3, "begun": False, "kind": "SlowLayer", "text": fault.text()}


def test_marks_of_faults() -> None:
    """A lasting fault's first mark begins it, its last one ends it; one that is over at once has one mark; the
    program's own marks are neither."""
    for lasts in (faults.SlowRank(0, 0.1), faults.SlowLayer(0, "a", 0.1), faults.SlowLink(0, 0.1, 5.0)):
        assert faults.mark_kind(lasts.text()) == "begin"
        assert faults.mark_kind(f"end of {lasts.text()}") == "end"
    for once in (faults.DroppedGradient(0, "a"), faults.DeadRank(0)):
        assert faults.mark_kind(once.text()) == "once"
    assert [faults.mark_kind(text) for text in ("end of epoch", "optimizer")] == [None, None]


def test_a_change_is_taken_back() -> None:
    """Caps, order and hook of the assignment before the last change are asked for again, the hook by its name."""
    before, after = (
        assignment(groups, generation=generation, sizes=[16] * 4)
        | {"first_step": step, "options": {"bucket_cap_mb_list": caps, "comm_hook": hook}}
        for groups, generation, step, caps, hook in (
            ([[3, 2], [1, 0]], 1, 1, [1.0, 25.0, 25.0], None),
            ([[0], [1], [2], [3]], 2, 40, [0.01], "fp16_compress_hook"),
        )
    )
    back = change_back(before, after)
    order = ["layer3", "layer2", "layer1", "layer0"]
    assert back == {"order": order, "bucket_cap_mb_list": [1.0, 25.0], "comm_hook": "none"}
    assert change_back(after, before)["comm_hook"] == "fp16"
    assert "comm_hook" not in change_back(before, before)
    assert described(after) == {"buckets": 4, "caps": "0.01 MiB", "hook": "fp16_compress_hook"}


def _trained(first: int, changed: int, steps: int, **fields: object) -> Timeline:
    """Steps of 20 ms, from `changed` on of 10 ms and under the assignment after `first`, with these fields."""
    timeline, training = Timeline(), Training(2, 3)
    begin = 10**12
    for step in range(steps):
        if step == changed:
            for rank in range(2):
                described = training.assignment() | {"generation": first + 1, "first_step": changed, "session": 1}
                timeline.describe(rank, described | fields)
        begin += (10 if step >= changed else 20) * 10**6
        for rank, events in enumerate(training.step(step, begin)):
            events["generation"] = first + (step >= changed)
            if step == 0:
                timeline.describe(rank, training.assignment() | {"generation": first, "session": 1})
            timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))
    return timeline


FP16 = {"rebuilt": True, "options": {"comm_hook": "fp16_compress_hook"}}


def test_before_and_after_a_change() -> None:
    """Steps of both assignments are compared, if there are ten on each side; not around a rebuild, nor where buckets
    and hook stay the same."""
    found = compared(_trained(1, 30, 60, **FP16), 0)
    assert found["verdict"] == "faster"
    assert found["percent"] == pytest.approx(-50, abs=3)
    assert [len(side["ms"]) for side in found["sides"]] == [27, 27]
    assert [side["step"] for side in found["sides"]] == [3, 33]
    early = compared(_trained(1, 30, 36, **FP16), 0)
    assert "verdict" not in early
    assert early["text"].startswith("3 steps after the change are too few")
    timeline = Training(2, 3).trained(20, ms=20)
    assert compared(timeline, 0) == {"reducer": 0, "text": "", "sides": []}
    assert compared(_trained(0, 1, 40, rebuilt=True), 0)["sides"] == []
    found = compared(_trained(1, 30, 60, rebuilt=True, options={"bucket_cap_mb_list": [1.0, 25.0]}), 0)
    assert found["text"].startswith("Buckets and hook are the same before and after the change")
    assert "verdict" not in found
    assert [side["buckets"] for side in found["sides"]] == [3, 3]


def test_a_fault_ends_what_is_compared() -> None:
    """Steps before a fault began are no "before", and those after it has ended no "after"."""
    plain = StepModel(gradients=[1.0] * 4, sizes=[1_000_000] * 4, buckets=[[0, 1], [2, 3]])
    slow = replace(plain, late=lambda rank, step: {0: 40.0} if rank == 1 else {})
    fine = replace(slow, buckets=[[0], [1], [2], [3]], options={"bucket_cap_mb_list": [1.0]})
    history = History()
    history.assign(plain, 1)
    history.train(plain, 1, 40)
    history.mark("slow layer: 40 ms before the gradient of 'layer0.weight'")
    history.train(slow, 1, 20)
    history.assign(fine, 2)
    history.train(fine, 2, 20)
    history.mark("end of slow layer: 40 ms before the gradient of 'layer0.weight'")
    history.train(replace(fine, late=plain.late), 2, 30)
    change = last_change(history.timeline, 0)
    assert [steps.tolist() for steps in change.steps] == [list(range(43, 60)), list(range(63, 80))]
    assert min(ms.min() for ms in change.times) > 40


def test_what_was_typed_is_checked_before_ranks_are_asked() -> None:
    """Caps, buckets and times that are no numbers are refused in words, without a question to any rank. A saved
    timeline's controls say that they need a running cluster, and take requests without asking anybody."""
    nobody: Any = None
    with pytest.raises(ValueError, match="bucket size limits must be numbers in MiB"):
        BucketControl(nobody, Timeline(), lambda: None).obey({"change": {"bucket_cap_mb_list": [1.0, None]}})
    with pytest.raises(ValueError, match="buckets must be numbers"):
        StepControl(nobody).obey({"do": "pause", "points": ["reduced"], "buckets": [0, None]})
    with pytest.raises(ValueError, match="at least one point"):
        StepControl(nobody).obey({"do": "pause", "points": []})
    with pytest.raises(ValueError, match="enter the delay in milliseconds"):
        FaultControl(nobody).obey({"do": "inject", "fault": {"kind": "SlowRank", "rank": 0, "seconds": None}})
    controls = Controls(Timeline(), None, lambda: None)
    controls.ask({"type": "step", "id": "x", "do": "continue"})
    control = controls.state()
    assert control["live"] is False
    assert "Controls need a running cluster" in control["why"]
    assert control["heard"] == ["x"]
    controls.stop()


@pytest.mark.parametrize("view", ["step", "fault_injection"])
def test_a_control_alone_keeps_a_picture(view: str) -> None:
    """A control's own widget has a self-contained picture before anything happened, and says how to begin."""
    dashboard = Dashboard(Timeline(), views=[view])
    try:
        assert dashboard.svg().startswith("<svg")
        assert np.all([word in dashboard.svg() for word in ("xmlns", "</svg>")])
    finally:
        dashboard.close()
        if dashboard.layout is not None:
            dashboard.layout.close()
