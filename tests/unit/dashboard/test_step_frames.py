"""The dashboard's model: steps as arrays, and gradient sync computed from them."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.step_metrics import PHASES
from ddp_lab.dashboard.views.overlap import breakdown
from ddp_lab.dashboard.views.step_frames import BEGIN, END, FIRST_READY, LAUNCHED, READY, REDUCED, StepFrame, StepFrames
from ddp_lab.protocol.events import DTYPE, Kind
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training, append


def newest(timeline: Timeline) -> StepFrame:
    """The newest complete step."""
    return StepFrames(timeline).latest()


@pytest.fixture
def timeline() -> Timeline:
    """Four steps of two ranks and three buckets; rank 1 is late in bucket 1."""
    return Training(2, 3, delays={(1, 1): 2.0}).trained(4, ms=100)


def test_holds_the_times_that_spans_reports(timeline: Timeline) -> None:
    """Every time of every bucket equals that in `Timeline.spans()`."""
    frames = StepFrames(timeline)
    spans = timeline.spans()
    assert len(spans) == 4 * 2 * 3
    columns = {"first_ready_ns": FIRST_READY, "ready_ns": READY, "launched_ns": LAUNCHED, "reduced_ns": REDUCED}
    for _, row in spans.iterrows():
        frame = frames.frame(0, row["step"])
        assert frame.complete
        assert frame.bounds_ns[row["rank"], BEGIN] == row["backward_begin_ns"]
        for name, column in columns.items():
            assert frame.times_ns[row["rank"], row["bucket"], column] == row[name]


def test_gradient_sync_equals_the_timelines(timeline: Timeline) -> None:
    """Gradient sync of a step has the numbers of `Timeline.all_reduces()`. The hidden share of a step is that of
    `Timeline.steps()`, over all ranks."""
    frames = StepFrames(timeline)
    for _, row in timeline.all_reduces().iterrows():
        frame = frames.frame(0, row["step"])
        sync, overlap, bucket = frame.sync(), frame.overlap(), row["bucket"]
        assert sync.all_reduce_ms[bucket] == pytest.approx(row["all_reduce_ms"])
        assert sync.bandwidth_gb_s[bucket] == pytest.approx(row["bandwidth_gb_s"])
        assert frame.last_rank(sync)[bucket] == row["last_rank"]
        assert sync.late_ms[bucket] == pytest.approx(row["late_ms"])
        assert sync.alone_ms[bucket] == pytest.approx(row["alone_ms"])
        assert dict(enumerate(sync.wait_ms[:, bucket])) == pytest.approx(row["wait_ms"])
        assert overlap.hidden_ms[:, bucket].mean() == pytest.approx(row["hidden_ms"])
        assert overlap.exposed_ms[:, bucket].mean() == pytest.approx(row["exposed_ms"])
    for step, rows in timeline.steps().groupby("step"):
        frame = frames.frame(0, int(step))
        share = rows["hidden_ms"].sum() / rows["communication_ms"].sum()
        assert frame.overlap().hidden_share == pytest.approx(share)


def test_a_step_consists_of_what_the_timeline_says(timeline: Timeline) -> None:
    """The phases of a step that are sent to the browser are those of the saved picture."""
    frames, found = StepFrames(timeline), breakdown(timeline)
    for index, step in enumerate(found.step):
        frame = frames.frame(0, int(step))
        own = frame.breakdown(frame.overlap())
        for name in PHASES:
            assert getattr(own, name)[0] == pytest.approx(getattr(found, name)[index])
        assert np.isfinite([own.measured[0], found.measured[index]]).tolist() == [index > 0] * 2


def test_parts_of_a_bucket_meet(timeline: Timeline) -> None:
    """Filling, queued, waiting and reducing lie between edges that ascend; a rank that has not launched has no turn."""
    frame = newest(timeline)
    edges = frame.edges_ns()
    assert (np.diff(edges[..., :5], axis=-1) >= 0).all()
    np.testing.assert_allclose((edges[..., 3] - edges[..., 2]) / 1e6, frame.sync().wait_ms)
    frame.times_ns[1, 2, LAUNCHED] = frame.times_ns[1, 2, REDUCED] = 0
    assert (frame.edges_ns()[1, 2, 3:] == 0).all()
    assert frame.edges_ns()[0, 2, 3] == frame.times_ns[0, 2, REDUCED]
    assert frame.last_rank(frame.sync()).tolist() == [*frame.last_rank(frame.sync())[:2], -1]


def test_events_in_pieces_make_the_same_step() -> None:
    """However a step's events are cut into batches, the frame is the same."""
    training = Training(2, 3)
    events = training.step(0, 10**12)
    pieces = [
        (rank, one[start : start + 5])
        for start in range(0, max(map(len, events)), 5)
        for rank, one in enumerate(events)
    ]
    one, other = newest(training.timeline(*enumerate(events))), newest(training.timeline(*pieces))
    np.testing.assert_array_equal(one.times_ns, other.times_ns)
    np.testing.assert_array_equal(one.bounds_ns, other.bounds_ns)
    assert one.ranks == other.ranks == [0, 1]


def test_what_has_not_arrived_is_nan() -> None:
    """A bucket that no rank has reduced has no all-reduce time, no bandwidth and no hidden part. Hidden and exposed are
    computed on the device's clock as soon as it timed every bucket."""
    training = Training(2, 2)
    chunks = [(rank, one[one["kind"] != Kind.BUCKET_REDUCED]) for rank, one in enumerate(training.step(0, 10**12))]
    frame = newest(training.timeline(*chunks))
    sync, overlap = frame.sync(), frame.overlap()
    for values in (sync.all_reduce_ms, sync.bandwidth_gb_s, overlap.hidden_ms, overlap.exposed_ms):
        assert np.isnan(values).all()
    assert np.isnan(overlap.hidden_share)
    assert not np.isnan(sync.wait_ms).any()
    training = Training(1, 2)
    spans = np.zeros(2, DTYPE)
    spans["kind"], spans["bucket"], spans["reducer"], spans["step"] = Kind.DEVICE_SPAN, [0, 1], 0, 0
    spans["device_begin_ns"], spans["device_end_ns"] = [10**12, 10**12 + 10**6], [10**12 + 10**6, 10**12 + 3 * 10**6]
    overlap = newest(training.timeline(*enumerate(training.step(0, 10**12)), (0, spans))).overlap()
    assert overlap.hidden_ms.tolist() == [[1.0, 0.0]]
    assert overlap.exposed_ms.tolist() == [[0.0, 2.0]]


def test_the_newest_steps_are_bounded() -> None:
    """Both bounds hold: the number of steps, and the bytes of all arrays (the newest step is always there). A step that
    the ring of the table has forgotten, and that was kept as one of the past, can be asked for."""
    timeline = Training(2, 3).trained(30, ms=100)
    assert StepFrames(timeline, max_steps=10).steps(0) == list(range(20, 30))
    assert StepFrames(timeline, max_bytes=1).steps(0) == [29]
    timeline = Training(2, 3).trained(30, ms=100, timeline=Timeline(max_steps=8))
    held, frames = timeline.held_steps(0), StepFrames(timeline)
    assert held[0] < 20
    spans = timeline.spans()
    for step in held.tolist():
        frame = frames.frame(0, step)
        assert set(frame.times_ns[..., READY].ravel()) == set(spans.ready_ns[spans.step == step])
    assert frames.frame(0, 21) is None


def test_changed_steps_are_named_once(timeline: Timeline) -> None:
    """Each changed step is named once, until it changes again. What was frozen stays at its last step, whatever is
    recorded afterwards."""
    frames = StepFrames(timeline)
    assert frames.changed() == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert frames.changed() == []
    append(timeline, (0, timeline.since(0)[0][0][1][:1]))
    assert frames.changed() == [(0, 0)]
    frames.freeze()
    append(timeline, *enumerate(Training(2, 3).step(4, 10**13)))
    assert frames.steps(0) == [0, 1, 2, 3]
    assert newest(timeline).step == 4
    assert frames.latest().step == 3


def test_latest_is_the_newest_complete_step(timeline: Timeline) -> None:
    """A step that a rank has not ended, or gave up, is passed over."""
    append(timeline, (0, Training(2, 3, seed=1).step(4, 10**13)[0][:-1]))
    latest = newest(timeline)
    assert latest.step == 3
    assert (latest.bounds_ns[:, END] > 0).all()
