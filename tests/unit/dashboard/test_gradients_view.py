"""Watched gradients and comparisons of replicas, from descriptions to what a reader sees."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

from ddp_lab.dashboard.controls.control import WatchControl
from ddp_lab.dashboard.live import ViewFacts
from ddp_lab.dashboard.paint.scene_json import scene_json
from ddp_lab.dashboard.paint.scene_svg import framed
from ddp_lab.dashboard.views.gradients import gradient_facts, gradients_scene
from ddp_lab.errors import ClusterError
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training


def watched(step: int, before: list[list[float | None]], after: list[float | None], **more: Any) -> dict[str, Any]:
    """A description as rank 0 publishes it."""
    ranks = list(range(len(before)))
    about = {"type": "gradients", "reducer": 0, "step": step, "generation": 0, "ranks": ranks, "session": 1}
    return {**about, "before": before, "after": after, "nonfinite": None, "seconds": 0.002, **more}


def compared(step: int, ok: bool = True, **more: Any) -> dict[str, Any]:
    """The same of a comparison."""
    about = {"type": "drift", "reducer": 0, "step": step, "ok": ok, "first": None, "groups": [], "session": 1}
    return {**about, "differing": 0, "tensors": 4, "bytes": 1000, "seconds": 0.001, **more}


@pytest.fixture
def timeline() -> Timeline:
    """Thirty watched steps of two ranks and two buckets; step 20 has a NaN; the replicas differ in the end."""
    made, training = Timeline(), Training(2, 2)
    training.feed(made, 0, 10**12)
    for step in range(30):
        made.describe(0, watched(step, [[3.0, 4.0], [6.0, 8.0]], [3.0, 4.0]))
    bad = {"kind": "NaN", "parameter": "layers.1.weight", "rank": 1}
    made.describe(0, watched(20, [[3.0, 4.0], [6.0, None]], [3.0, None], nonfinite=bad))
    made.describe(0, compared(10))
    apart = {"ok": False, "first": "layers.0.bias", "groups": [[0], [1]], "differing": 2}
    made.describe(0, compared(25, **apart))
    return made


def test_norms_by_step_and_bucket(timeline: Timeline) -> None:
    """A step's norm is that of all its buckets together; unknown where one is not finite; noise follows from them. The
    buckets are those of one step: the newest, or the last one before a chosen one."""
    found = gradient_facts(timeline, 0)
    first = found["steps"][0]
    assert first["before"] == [5.0, 10.0]
    assert first["after"] == 5.0
    # |G|² = (2 · 25 - 62.5) / 1 < 0: the noise hides the gradient
    assert first["noise"] is None
    assert found["steps"][20]["before"] == [5.0, None]
    assert found["steps"][20]["bad"]["parameter"] == "layers.1.weight"
    newest = found["buckets"]
    assert newest["step"] == 29
    assert (newest["before"].tolist(), newest["after"].tolist()) == ([[3.0, 4.0], [6.0, 8.0]], [3.0, 4.0])
    assert newest["mean"].tolist() == [4.5, 6.0]
    np.testing.assert_allclose(newest["off"], 100 / 3, atol=1e-3)  # percent from the mean, of each rank and bucket
    assert newest["spread"] == "The norm of the average is 66.7 % of a bucket's mean norm."
    made = Timeline()
    for step in range(0, 50, 10):
        made.describe(0, watched(step, [[1.0]], [1.0]))
    assert [gradient_facts(made, 0, step)["buckets"]["step"] for step in (40, 39, 10, 99)] == [40, 30, 10, 40]
    for step in range(50, 2100, 10):
        made.describe(0, watched(step, [[1.0]], [1.0]))
    assert gradient_facts(made, 0)["steps"][0]["step"] == 100
    assert gradient_facts(made, 0, 15)["buckets"]["step"] == 10, "also of a step that is older than those shown"


def test_the_noise_scale_of_equal_ranks_is_zero() -> None:
    """Ranks with the same gradient have no noise; ranks with orthogonal ones of equal norm have nothing else."""
    for after, wanted in ((5.0, 0.0), (5.0 / 2**0.5 * 1.2, 25 * (1 - 0.72) * 2 / (25 * (2 * 0.72 - 1)))):
        made = Timeline()
        made.describe(0, watched(0, [[5.0], [5.0]], [after]))
        assert gradient_facts(made, 0)["steps"][0]["noise"] == pytest.approx(wanted, abs=1e-4)


def test_comparisons_are_a_table(timeline: Timeline, tmp_path: Any) -> None:
    """`Timeline.drift` has a row for each comparison, with what differs, where, and what it cost. Norms and comparisons
    are there after `save` and `load`."""
    table = timeline.drift()
    assert table.step.tolist() == [10, 25]
    assert table.ok.tolist() == [True, False]
    assert table["first"].tolist() == ["", "layers.0.bias"]
    assert table.groups.tolist() == [(), ((0,), (1,))]
    assert table.cost_ms.tolist() == [1.0, 1.0]
    assert timeline.drift(model=7).empty
    assert timeline.inspection_count(0) == 2
    loaded = Timeline.load(timeline.save(tmp_path / "run.npz"))
    assert loaded.drift().equals(timeline.drift())
    assert str(gradient_facts(loaded, 0)) == str(gradient_facts(timeline, 0))


def test_pictures(timeline: Timeline) -> None:
    """Picture and figure show each rank's norm, the average and the NaN; empty, they say what to call."""
    words = "".join(ElementTree.fromstring(framed(gradients_scene(gradient_facts(timeline, 0)))).itertext())
    assert "NaN in step 20: first in layers.1.weight on rank 1." in words
    assert "Replicas before step 25: differ, first in layers.0.bias." in words
    names = [trace.name for trace in timeline.figure("gradients").data]
    assert names == ["smallest to largest rank", "rank 0, before", "rank 1, before", "average", "noise scale"]
    assert "watch_gradients" in framed(gradients_scene(gradient_facts(Timeline(), 0)))
    with pytest.raises(ValueError, match="watch_gradients"):
        timeline.figure("gradients", model=3)


def test_a_wide_range_has_a_logarithmic_scale(timeline: Timeline) -> None:
    """Norms from 0.05 to 10 lie between powers of ten, whose numbers a page gets with the scene; an unknown norm is no
    number."""
    timeline.describe(0, watched(30, [[0.03, 0.04], [6.0, None]], [0.03, 0.04]))
    (panel, _) = scene_json(gradients_scene(gradient_facts(timeline, 0)))["panels"]
    assert panel["y"]["ticks"] == [(0.01, "0.01"), (0.1, "0.1"), (1.0, "1"), (10.0, "10")]
    assert panel["y"]["log"]
    band, own, *_ = panel["marks"]
    assert (band["kind"], band["low"][0], band["high"][0], band["high"][-1]) == ("band", 5.0, 10.0, 0.05)
    assert own["x"][:3] == [0, 1, 2]
    assert panel["marks"][2]["y"][-1] is None


def test_nothing_is_computed_for_nobody(timeline: Timeline) -> None:
    """The kernel looks at gradients only while a page shows them."""
    slow = ViewFacts(timeline)
    assert slow.update(force=True) == {}
    slow.look("page", ["gradients"], None)
    blocks = slow.update(force=True)["gradients"]["blocks"]
    assert blocks[-1]["table"]["rows"][0][1] == "differ: layers.0.bias and 1 more"
    assert blocks[-1]["table"]["warned"] == [0]
    assert "ranks with equal values: rank 0 | rank 1." in blocks[0]["notice"].lower()


class _Ranks:
    """What a control needs of a cluster: here one that remembers and has differing replicas."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.every = timeline, {"gradients": 0, "drift": 0}

    def watch_gradients(self, every: int, reducer: int | None) -> None:
        if every > 1000:
            raise ClusterError("rank 1 does not answer")
        self.every["gradients"] = every

    def watch_drift(self, every: int, reducer: int | None) -> None:
        self.every["drift"] = every

    def check_drift(self, reducer: int | None, timeout: float) -> Any:
        return self.timeline.drift_records(0)[-1]

    def monitoring(self, reducer: int | None) -> dict[str, int]:
        return {**self.every, "pending": 0}


def test_the_control_says_what_it_did(timeline: Timeline) -> None:
    """Requests become calls; what is watched now, and what was said, go to the browser."""
    control = WatchControl(_Ranks(timeline))  # type: ignore[arg-type]
    control.obey({"do": "gradients", "every": 5, "reducer": 0})
    assert control.shown["gradients"] == 5
    assert "monitored every 5 steps" in control.shown["said"]
    control.obey({"do": "drift", "every": 0, "reducer": 0})
    assert "no longer compared" in control.shown["said"]
    control.obey({"do": "check", "reducer": 0})
    assert control.shown["said"] == ""  # the view tells
    with pytest.raises(ClusterError):
        control.obey({"do": "gradients", "every": 2000})
