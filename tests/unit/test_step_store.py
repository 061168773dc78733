"""The dashboard's model: steps as arrays, and gradient sync computed from them."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.analysis.step_metrics import PHASES
from ddp_lab.protocol.events import DTYPE, Kind
from ddp_lab.timeline.timeline import Timeline
from ddp_lab.views import view_data
from ddp_lab.views.step_store import BEGIN, END, FIRST_READY, LAUNCHED, READY, REDUCED, StepFrame, StepStore
from tests.training_events import Training


def store_of(timeline: Timeline, **bounds: int) -> StepStore:
    """A store that holds everything the timeline has."""
    store = StepStore(lambda reducer, generation: timeline.assignment(reducer, generation), **bounds)
    store.extend(timeline.since(0)[0])
    return store


def newest(timeline: Timeline) -> StepFrame:
    """The newest complete step."""
    frame = store_of(timeline).latest()
    assert frame is not None
    return frame


@pytest.fixture
def timeline() -> Timeline:
    """Four steps of two ranks and three buckets; rank 1 is late in bucket 1."""
    made, training = Timeline(), Training(2, 3, delays={(1, 1): 2.0})
    for step in range(4):
        training.feed(made, step, 10**12 + step * 10**8)
    return made


def test_holds_the_times_that_spans_reports(timeline: Timeline) -> None:
    """Every time of every bucket equals that in `Timeline.spans()`."""
    store = store_of(timeline)
    spans = timeline.spans()
    assert len(spans) == 4 * 2 * 3
    columns = {"first_ready_ns": FIRST_READY, "ready_ns": READY, "launched_ns": LAUNCHED, "reduced_ns": REDUCED}
    for _, row in spans.iterrows():
        frame = store.frame(0, row["step"])
        assert frame is not None
        assert frame.complete
        assert frame.bounds_ns[row["rank"], BEGIN] == row["backward_begin_ns"]
        for name, column in columns.items():
            assert frame.times_ns[row["rank"], row["bucket"], column] == row[name]


def test_gradient_sync_equals_the_timelines(timeline: Timeline) -> None:
    """Gradient sync of a step has the numbers of `Timeline.sync()`."""
    store = store_of(timeline)
    for _, row in timeline.sync().iterrows():
        frame = store.frame(0, row["step"])
        assert frame is not None
        sync, overlap, bucket = frame.sync(), frame.overlap(), row["bucket"]
        assert sync.all_reduce_ms[bucket] == pytest.approx(row["all_reduce_ms"])
        assert sync.bandwidth_gb_s[bucket] == pytest.approx(row["bandwidth_gb_s"])
        assert frame.last_rank(sync)[bucket] == row["last_rank"]
        assert sync.late_ms[bucket] == pytest.approx(row["late_ms"])
        assert sync.alone_ms[bucket] == pytest.approx(row["alone_ms"])
        assert dict(enumerate(sync.wait_ms[:, bucket])) == pytest.approx(row["wait_ms"])
        assert overlap.hidden_ms[:, bucket].mean() == pytest.approx(row["hidden_ms"])
        assert overlap.exposed_ms[:, bucket].mean() == pytest.approx(row["exposed_ms"])


def test_hidden_share_equals_the_timelines(timeline: Timeline) -> None:
    """The hidden share of a step is that of `Timeline.steps()`, over all ranks."""
    store = store_of(timeline)
    for step, rows in timeline.steps().groupby("step"):
        frame = store.frame(0, int(step))
        assert frame is not None
        share = rows["hidden_ms"].sum() / rows["communication_ms"].sum()
        assert frame.overlap().hidden_share == pytest.approx(share)


def test_a_step_consists_of_what_the_timeline_says(timeline: Timeline) -> None:
    """The phases of a step that are sent to the browser are those of the saved picture."""
    store, found = store_of(timeline), view_data.breakdown(timeline)
    for index, step in enumerate(found.step):
        frame = store.frame(0, int(step))
        assert frame is not None
        own = frame.breakdown(frame.overlap())
        for name in PHASES:
            assert getattr(own, name)[0] == pytest.approx(getattr(found, name)[index])
        assert own.whole[0] == found.whole[index] == (index > 0)


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


def test_the_late_rank_is_named(timeline: Timeline) -> None:
    """Rank 0 waits for rank 1 in bucket 1, by about the delay that was put there."""
    sync = newest(timeline).sync()
    assert sync.last[1] == 1
    assert sync.wait_ms[0, 1] == pytest.approx(2.0, abs=1.2)
    assert sync.wait_ms[1, 1] == 0


def test_events_in_pieces_make_the_same_step() -> None:
    """However a step's events are cut into batches, the frame is the same."""
    training = Training(2, 3)
    whole, pieces = StepStore(lambda *_: None), StepStore(lambda *_: None)
    events = training.step(0, 10**12)
    whole.extend(enumerate(events))
    for start in range(0, max(map(len, events)), 5):
        pieces.extend((rank, one[start : start + 5]) for rank, one in enumerate(events))
    one, other = whole.frame(0, 0), pieces.frame(0, 0)
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.times_ns, other.times_ns)
    np.testing.assert_array_equal(one.bounds_ns, other.bounds_ns)
    assert one.ranks == other.ranks == [0, 1]


def test_what_has_not_arrived_is_nan() -> None:
    """A bucket that no rank has reduced has no all-reduce time, no bandwidth and no hidden part."""
    timeline, training = Timeline(), Training(2, 2)
    training.feed(timeline, 0, 10**12)
    chunks = [(rank, events[events["kind"] != Kind.BUCKET_REDUCED]) for rank, events in timeline.since(0)[0]]
    store = StepStore(lambda *_: None)
    store.extend(chunks)
    frame = store.frame(0, 0)
    assert frame is not None
    sync, overlap = frame.sync(), frame.overlap()
    for values in (sync.all_reduce_ms, sync.bandwidth_gb_s, overlap.hidden_ms, overlap.exposed_ms):
        assert np.isnan(values).all()
    assert np.isnan(overlap.hidden_share)
    assert not np.isnan(sync.wait_ms).any()


def test_device_spans_replace_host_times_when_all_are_there() -> None:
    """Hidden and exposed are computed on the device's clock as soon as it timed every bucket."""
    training = Training(1, 2)
    store = StepStore(lambda *_: None)
    store.extend(enumerate(training.step(0, 10**12)))
    spans = np.zeros(2, DTYPE)
    spans["kind"], spans["bucket"], spans["reducer"], spans["step"] = Kind.DEVICE_SPAN, [0, 1], 0, 0
    spans["device_begin_ns"], spans["device_end_ns"] = [10**12, 10**12 + 10**6], [10**12 + 10**6, 10**12 + 3 * 10**6]
    store.extend([(0, spans)])
    frame = store.frame(0, 0)
    assert frame is not None
    overlap = frame.overlap()
    assert overlap.hidden_ms.tolist() == [[1.0, 0.0]]
    assert overlap.exposed_ms.tolist() == [[0.0, 2.0]]


def test_forgets_the_oldest_steps() -> None:
    """Both bounds hold: the number of steps, and the bytes of all arrays (the newest step always stays)."""
    timeline, training = Timeline(), Training(2, 3)
    for step in range(30):
        training.feed(timeline, step, 10**12 + step * 10**8)
    assert store_of(timeline, max_steps=10).steps(0) == list(range(20, 30))
    assert store_of(timeline, max_bytes=1).steps(0) == [29]


def test_an_old_step_does_not_come_back() -> None:
    """A late event of a step older than all that are held is left out."""
    training = Training(1, 1)
    store = StepStore(lambda *_: None, max_steps=2)
    steps = [training.step(number, 10**12 + number * 10**8)[0] for number in range(4)]
    store.extend([(0, events) for events in steps])
    store.extend([(0, steps[0][-1:])])
    assert store.steps(0) == [2, 3]


def test_changed_steps_are_named_once(timeline: Timeline) -> None:
    """Each changed step is handed out once, until it changes again."""
    store = store_of(timeline)
    assert [frame.step for frame in store.take_dirty()] == [0, 1, 2, 3]
    assert store.take_dirty() == []
    store.extend([(0, timeline.since(0)[0][0][1][:1])])
    assert [frame.step for frame in store.take_dirty()] == [0]


def test_latest_is_the_newest_complete_step(timeline: Timeline) -> None:
    """A step that a rank has not ended, or gave up, is passed over."""
    store = store_of(timeline)
    training = Training(2, 3, seed=1)
    unfinished = training.step(4, 10**13)[0]
    store.extend([(0, unfinished[:-1])])
    latest = store.latest()
    assert latest is not None
    assert latest.step == 3
    assert (latest.bounds_ns[:, END] > 0).all()
