"""Timeline: batches in, spans, steps, sync, words and files out."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddp_lab.dashboard.views.step_frames import StepFrames
from ddp_lab.protocol.events import Kind
from ddp_lab.timeline import history
from ddp_lab.timeline.tables.span_columns import SPAN_COLUMNS, STEP_COLUMNS, SYNC_COLUMNS
from ddp_lab.timeline.timeline import Timeline
from tests.unit.backwards import MS, Bucket, Recorder, assignment

# Rank 1's gradients of bucket 1 come 4 ms late; both ranks' computation ends at 6 and 10 ms.
EARLY = [Bucket((1.0, 2.0), 2.0, 4.0, (2, 3), 2_000_000), Bucket((5.0, 6.0), 6.0, 12.0, (0, 1))]
LATE = [Bucket((1.0, 2.0), 2.0, 4.0, (2, 3), 2_000_000), Bucket((9.0, 10.0), 10.0, 12.0, (0, 1))]


TINY = [Bucket((1.0,), 1.0, 2.0)]


def _described_ranks(timeline: Timeline) -> None:
    for rank in (0, 1):
        timeline.describe(rank, assignment([[2, 3], [0, 1]]) | {"session": 1})


def _record(recorders: list[Recorder], step: int) -> None:
    for recorder, (buckets, finalize) in zip(recorders, [(EARLY, 6.0), (LATE, 10.0)], strict=True):
        recorder.backward(step, (step + 1) * 20 * MS, buckets, finalize)


def _two_ranks(steps: int = 10, timeline: Timeline | None = None, *, each: int = 10**9) -> Timeline:
    """So many steps of both ranks, of which each batch has at most `each`."""
    made, recorders = timeline or Timeline(), [Recorder(0), Recorder(1)]
    _described_ranks(made)
    for step in range(steps):
        _record(recorders, step)
        if (step + 1) % each == 0 or step == steps - 1:
            for recorder in recorders:
                made.extend(recorder.batch())
    return made


def _send(timeline: Timeline, recorder: Recorder, step: int, buckets: list[Bucket] = TINY, **fields: int) -> None:
    """A backward that begins 20 ms after the one before, and its batch."""
    recorder.backward(step, (step + 1) * 20 * MS, buckets, buckets[-1].gradients[-1], **fields)
    timeline.extend(recorder.batch())


def test_tables_by_hand() -> None:
    """Each span holds the times that its events state; a step is split at its computation's end; over the ranks: who
    launched last, how long the others waited, and how fast the collective then was."""
    timeline = _two_ranks()
    spans = timeline.spans()
    assert tuple(spans.columns) == SPAN_COLUMNS
    assert (np.diff(spans["rank"] * 10**6 + spans.step * 10**3 + spans.bucket) > 0).all()
    assert len(spans) == 2 * 10 * 2
    one = spans[(spans["rank"] == 0) & (spans.step == 3) & (spans.bucket == 1)].iloc[0]
    assert one.backward_begin_ns == 80 * MS
    assert (one.first_ready_ms, one.ready_ms, one.launched_ms, one.reduced_ms) == (5.0, 6.0, 6.0, 12.0)
    assert (one.fill_ms, one.all_reduce_ms, one.hidden_ms, one.exposed_ms) == (1.0, 6.0, 0.0, 6.0)
    assert (one.bytes, one.n_parameters, one.generation, one.process_group) == (1_000_000, 2, 0, 0)
    assert (one.clock, one.complete) == ("host", True)
    first = spans[(spans["rank"] == 0) & (spans.step == 3) & (spans.bucket == 0)].iloc[0]
    assert (first.hidden_ms, first.exposed_ms) == (2.0, 0.0)
    assert (spans.hidden_ms + spans.exposed_ms == spans.all_reduce_ms).all()
    steps = timeline.steps()
    assert tuple(steps.columns) == STEP_COLUMNS
    of_rank = steps[steps["rank"] == 1]
    one = of_rank.iloc[4]
    assert (one.forward_ms, one.compute_ms, one.backward_ms, one.step_ms) == (1.0, 10.0, 12.0, 20.0)
    assert (one.communication_ms, one.hidden_ms, one.exposed_ms) == (4.0, 2.0, 2.0)
    assert (one.state, one.buckets, one.bytes) == ("complete", 2, 3_000_000)
    assert np.isnan(of_rank.iloc[0].step_ms)
    assert timeline.steps(last_steps=3).step_ms.tolist() == [20.0] * 6, "the step before is known, if not shown"
    sync = timeline.all_reduces()
    assert tuple(sync.columns) == SYNC_COLUMNS
    one = sync[(sync.step == 2) & (sync.bucket == 1)].iloc[0]
    assert (one.last_rank, one.late_ms, one.wait_ms) == (1, 4.0, {0: 4.0, 1: 0.0})
    assert (one.all_reduce_ms, one.bandwidth_gb_s) == (2.0, 0.5)
    assert (one.hidden_ms, one.exposed_ms) == (0.0, (6.0 + 2.0) / 2)
    assert (one.ranks, one.n_parameters) == (2, 2)
    assert len(sync) == 20


def test_sync_waits_for_all_ranks() -> None:
    """A bucket that one rank has not reduced is not in the gradient sync, and its span has no times yet."""
    timeline = _two_ranks()
    _send(timeline, Recorder(0, next=timeline.ranks()[0].events), 14, EARLY)
    running = Recorder(1, next=timeline.ranks()[1].events)
    running.record(Kind.BACKWARD_BEGIN, 300 * MS, reducer=0, step=14)
    running.record(Kind.GRAD_READY, 301 * MS, reducer=0, step=14, bucket=0, parameter=3)
    timeline.extend(running.batch())
    assert timeline.all_reduces().step.max() == 9
    last = timeline.spans(last_steps=1)
    assert last.step.unique().tolist() == [14]
    (open_span,) = [row for row in last.itertuples() if row.rank == 1]
    assert open_span.first_ready_ms == 1.0
    assert np.isnan([open_span.ready_ms, open_span.all_reduce_ms, open_span.exposed_ms]).all()
    assert not open_span.complete
    assert timeline.steps().query("step == 14").state.tolist() == ["complete", "running"]


def test_models_generations_and_groups_stay_apart() -> None:
    """Two models in one program, and buckets before and after they were assigned anew, are told apart. Two groups of
    ranks that each build a model numbered 0 are two models."""
    timeline, recorder = Timeline(), Recorder(0)
    timeline.describe(0, assignment([[0, 1, 2, 3]], ranks=[0]))
    timeline.describe(0, assignment([[2, 3], [0, 1]], ranks=[0], generation=1))
    timeline.describe(0, assignment([[0]], ranks=[0], reducer=1))
    whole = [Bucket((1.0, 2.0, 3.0, 4.0), 4.0, 5.0)]
    recorder.backward(0, 20 * MS, whole, 4.0)
    recorder.backward(1, 40 * MS, EARLY, 6.0, generation=1)
    recorder.backward(0, 60 * MS, TINY, 1.0, reducer=1)
    timeline.extend(recorder.batch())
    spans = timeline.spans()
    found = spans[["reducer", "step", "generation", "bucket", "n_parameters"]].to_numpy().tolist()
    assert found == [[0, 0, 0, 0, 4], [0, 1, 1, 0, 2], [0, 1, 1, 1, 2], [1, 0, 0, 0, 1]]
    assert [one.reducer for one in timeline.reducers()] == [0, 1]
    assert timeline.reducers()[0].generations == (0, 1)
    assert len(timeline.assignment(0)["buckets"]) == 2
    assert len(timeline.assignment(0, 0)["buckets"]) == 1
    with pytest.raises(ValueError, match="no bucket layout of model 7"):
        timeline.assignment(7)
    timeline = Timeline()
    for rank, group in [(0, (0, 1)), (2, (2, 3)), (1, (0, 1)), (3, (2, 3))]:
        timeline.describe(rank, assignment([[0]], ranks=group))
        _send(timeline, Recorder(rank), 0)
    assert {one.reducer: one.ranks for one in timeline.reducers()} == {0: (0, 1), 1: (2, 3)}
    assert timeline.all_reduces().reducer.tolist() == [0, 1]


def test_a_restarted_cluster_brings_new_models() -> None:
    """After a restart the ranks count their models from 0 again; on the timeline these are other models."""
    timeline = _two_ranks()
    for rank in (0, 1):
        timeline.describe(rank, assignment([[0]]) | {"session": 2})
        _send(timeline, Recorder(rank, session=2), 44)
    assert [one.reducer for one in timeline.reducers()] == [0, 1]
    assert timeline.spans(model=1).step.tolist() == [44, 44]
    assert len(timeline.spans(model=0)) == 40
    assert [rank.session for rank in timeline.ranks()] == [2, 2]
    assert timeline.own_numbers(1) == {0: 0, 1: 0}, "what to ask these ranks about"
    assert timeline.own_numbers(0) == {}, "no rank has it any more"


def _described(timeline: Timeline, rank: int, session: int, reducer: int, generation: int = 0) -> None:
    described = assignment([[0]], ranks=(0, 1), reducer=reducer, generation=generation)
    timeline.describe(rank, described | {"session": session})


def test_models_that_are_gone_do_not_live() -> None:
    """A model lives until one of its ranks says that it is gone, or has a new process; its steps stay."""
    timeline = Timeline()
    for reducer in (0, 1):
        for rank in (0, 1):
            _described(timeline, rank, 10 + rank, reducer)
    assert [one.reducer for one in timeline.living()] == [0, 1]
    timeline.describe(0, {"type": "gone", "reducer": 1, "session": 10})
    assert [one.reducer for one in timeline.living()] == [0]
    timeline.set_status(1, {"session": 21})
    assert timeline.living() == []
    assert [one.reducer for one in timeline.reducers()] == [0, 1]


def test_a_short_lived_model_is_one() -> None:
    """A rank may say that it has gone before another one names it, or before anybody looked: later models still have
    the ranks' own numbers."""
    timeline = Timeline()
    timeline.describe(0, {"type": "gone", "reducer": 4, "session": 10})
    _described(timeline, 0, 10, 5)
    timeline.describe(0, {"type": "gone", "reducer": 5, "session": 10})
    _described(timeline, 1, 20, 5)
    for rank in (0, 1):
        _described(timeline, rank, 10 * (rank + 1), 6)
    assert [one.reducer for one in timeline.reducers()] == [5, 6]
    assert [one.reducer for one in timeline.living()] == [6]
    assert timeline.own_numbers(6) == {0: 6, 1: 6}


def test_models_of_ranks_that_were_replaced() -> None:
    """Ranks that began at different times have one model together, not two. The copy that a replaced rank got of
    another rank's model is that model, and it lives again."""
    timeline = Timeline()
    for rank, session, reducer in [(0, 10, 0), (1, 20, 0), (0, 10, 1), (1, 21, 1)]:
        _described(timeline, rank, session, reducer)
    assert [one.reducer for one in timeline.reducers()] == [0, 1]
    assert timeline.own_numbers(1) == {0: 1, 1: 1}
    assert [one.reducer for one in timeline.living()] == [1]
    timeline = Timeline()
    _described(timeline, 0, 10, 3)
    _described(timeline, 1, 20, 3)
    timeline.set_status(1, {"session": 21})
    assert timeline.living() == []
    _described(timeline, 1, 21, 3, generation=1)
    _described(timeline, 0, 10, 3, generation=1)
    assert [one.reducer for one in timeline.living()] == [3]
    assert timeline.own_numbers(3) == {0: 3, 1: 3}
    assert [one.reducer for one in timeline.reducers()] == [3]


def test_messages_of_a_former_process_are_ignored() -> None:
    """What a rank's former process had still in flight does not end the life of the one that replaced it. A rank's
    record tells what its statuses and events said last."""
    timeline = _two_ranks()
    timeline.set_status(0, {"session": 2, "state": "idle"})
    _send(timeline, Recorder(0, session=1, next=500), 99, EARLY)
    timeline.set_status(0, {"session": 1, "state": "leaving"})
    one = timeline.ranks()[0]
    assert (one.session, one.state, one.events) == (2, "idle", 0)
    assert timeline.spans().step.max() == 9
    timeline = _two_ranks()
    timeline.set_status(1, {"session": 1, "pid": 77, "state": "running", "cell": "c5"})
    timeline.set_status(1, {"session": 1, "state": "idle", "cell": None})
    one = timeline.ranks()[1]
    assert (one.pid, one.state, one.cell, one.step, one.dropped) == (77, "idle", None, 9, 0)
    assert timeline.ranks()[0].state == "unknown"


def test_drops_and_repeats_are_counted() -> None:
    """A gap counts as dropped once, whoever caused it; a batch that is sent again counts for nothing."""
    timeline, recorder = Timeline(), Recorder(0)
    recorder.backward(0, 20 * MS, EARLY, 6.0)
    first = recorder.batch()
    timeline.extend(first)
    recorder.next += 100  # overwritten in the ring
    recorder.backward(1, 40 * MS, EARLY, 6.0)
    second = recorder.batch(dropped=100)
    timeline.extend(second)
    timeline.extend(first)
    timeline.extend(second)
    (rank,) = timeline.ranks()
    assert (rank.events, rank.dropped) == (len(first.events) + len(second.events), 100)
    assert sum(len(events) for _, events in timeline.since(0)[0]) == rank.events
    assert "100 events were dropped" in timeline.summary()


def test_cursor_reads_say_what_is_gone() -> None:
    """`since` returns each event once, and counts those that were forgotten before they were read."""
    timeline = _two_ranks(20, Timeline(max_events=50), each=1)
    read, end, gone = timeline.since(0)
    assert gone + sum(len(events) for _, events in read) == end == sum(rank.events for rank in timeline.ranks())
    assert gone > 0
    assert timeline.since(end)[0] == []
    assert timeline.spans().step.nunique() == 20, "the tables reach further back than the raw events"


def test_a_long_run_is_saved_thinned(tmp_path: Path) -> None:
    """A file holds the newest events and evenly spaced old steps of all ranks; words say so, loaded or not."""
    timeline = _two_ranks(400, Timeline(max_steps=40, max_events=1_000), each=1)
    kept = timeline.kept(0)
    assert (kept.first, kept.last, kept.whole_from, kept.steps) == (0, 399, 360, 40 + kept.thinned)
    assert 4 <= kept.thinned <= 10
    assert str(kept) in timeline.summary()
    loaded = Timeline.load(timeline.save(tmp_path / "run.npz"))
    assert 4 <= loaded.kept(0).thinned <= 40
    assert loaded.kept(0).whole_from < 400 - 20
    assert str(loaded.kept(0)) in loaded.summary()
    sync = loaded.all_reduces()
    assert sync.step.nunique() == loaded.kept(0).steps, "all ranks keep the same steps"
    assert sync.bandwidth_gb_s.notna().all()
    assert _two_ranks().kept(0).thinned == 0
    assert "down-sampled" not in _two_ranks().summary()


READERS: dict[str, Callable[[Timeline], object]] = {
    "events": lambda timeline: timeline.events().chunks,
    "ranks": Timeline.ranks,
    "reducers": Timeline.reducers,
    "kept": lambda timeline: timeline.kept(0),
    "since": lambda timeline: timeline.since(0),
    "layouts": lambda timeline: timeline.layouts(0),
    "views": lambda timeline: timeline.views(0),
    "held_steps": lambda timeline: timeline.held_steps(0),
    "history": lambda timeline: timeline.history(0).blocks(10),
    "changed_steps": lambda timeline: timeline.changed_steps({}),
    "step_columns": lambda timeline: timeline.step_columns(0),
}


@pytest.mark.parametrize("reader", READERS)
def test_batches_that_wait_are_there_for_everyone(reader: str) -> None:
    """Whatever is read first after batches have arrived has their events."""
    waiting, taken = _two_ranks(4), _two_ranks(4, Timeline(max_events=200))  # of so few none waits
    assert repr(READERS[reader](waiting)) == repr(READERS[reader](taken)) != repr(READERS[reader](_two_ranks(0)))


def test_columns_are_the_same_whenever_one_asks() -> None:
    """Asked after every batch or once at the end, a timeline says the same; a description that comes late counts."""
    asked, once = Timeline(max_steps=70), Timeline(max_steps=70)
    recorders = [Recorder(rank) for rank in (0, 1)]
    for step in range(150):
        _record(recorders, step)
        for batch in [recorder.batch() for recorder in recorders]:
            for timeline in (asked, once):
                timeline.extend(batch)
            if step % 7 == 0:
                asked.spans(), asked.steps(last_steps=5), asked.all_reduces()
    for timeline in (asked, once):
        _described_ranks(timeline)
    for last_steps in (None, 1, 40, 69):
        for table in ("spans", "steps", "all_reduces"):
            pd.testing.assert_frame_equal(
                getattr(asked, table)(last_steps=last_steps), getattr(once, table)(last_steps=last_steps)
            )
    assert once.spans().n_parameters.eq(2).all()
    assert once.all_reduces(last_steps=40).step.unique().tolist() == list(range(110, 150))


def test_a_live_view_of_a_long_run_holds_what_is_kept() -> None:
    """Asked for the newest steps again and again, a timeline's memory grows only by its history when its tables are
    full: a row for each step, up to a limit."""
    timeline = Timeline(max_steps=64, max_events=2_000)
    recorders = [Recorder(rank) for rank in (0, 1)]

    def trained(first: int, steps: int) -> int:
        for step in range(first, first + steps):
            _record(recorders, step)
            for recorder in recorders:
                timeline.extend(recorder.batch())
            if step % 16 == 0:
                timeline.columns(last_steps=20), timeline.step_columns(last_steps=20), timeline.sync_columns(0, 20)
        return tracemalloc.get_traced_memory()[0]

    trained(0, 10)
    tracemalloc.start()
    try:
        early, late = trained(10, 200), trained(210, 400)
    finally:
        tracemalloc.stop()
    rows = 400 * 8 * len(history.COLUMNS)
    assert late < early + rows + 100_000, "what was asked for is not kept"


def test_abandoned_backwards() -> None:
    """A backward that did not finish is shown as abandoned, without hidden and exposed times. A backward under way when
    a rank gets a new process never goes on: steps and dashboards say so, a rank that has kept its process tells by
    itself, and steps that had ended stay as they were."""
    timeline, recorder = Timeline(), Recorder(0)
    recorder.record(Kind.BACKWARD_BEGIN, 10 * MS, reducer=0, step=0)
    recorder.record(Kind.BUCKET_LAUNCHED, 11 * MS, reducer=0, step=0, bucket=0, bytes=5)
    recorder.record(Kind.ABANDONED, 12 * MS, reducer=0, step=0)
    timeline.extend(recorder.batch())
    (step,) = timeline.steps().itertuples()
    assert (step.state, np.isnan(step.exposed_ms)) == ("abandoned", True)
    timeline = _two_ranks(3)
    for rank in range(2):
        recorder = Recorder(rank, next=500)
        recorder.record(Kind.BACKWARD_BEGIN, 900 * MS, reducer=0, step=3, process_group=0)
        timeline.extend(recorder.batch())
    timeline.set_status(1, {"session": 2})
    steps = timeline.steps().set_index(["rank", "step"]).state
    assert steps[1].tolist() == ["complete"] * 3 + ["abandoned"]
    assert steps[0].tolist() == ["complete"] * 3 + ["running"]
    assert [frame.abandoned for frame in StepFrames(timeline).frames(0, 10)] == [False] * 3 + [True]
    assert timeline.ranks()[1].events == 0


def test_device_times_are_kept_apart() -> None:
    """With device spans hidden and exposed parts are those on the device, and say so; host times stay. Where devices
    compute, the host's times of readiness say nothing: the bucket is named by device times."""
    timeline, recorder = Timeline(), Recorder(0)
    recorder.backward(0, 20 * MS, EARLY, 6.0)
    for bucket, (begin, end) in enumerate([(25, 31), (30, 33)]):
        recorder.record(
            *(Kind.DEVICE_SPAN, 50 * MS), reducer=0, step=0, bucket=bucket,
            device_begin_ns=begin * MS, device_end_ns=end * MS,
        )  # fmt: skip
    timeline.extend(recorder.batch())
    spans, steps = timeline.spans(), timeline.steps()
    # The last bucket begins at 30 ms: there the device's own computation is over.
    assert spans.hidden_ms.tolist() == [5.0, 0.0]
    assert spans.exposed_ms.tolist() == [1.0, 3.0]
    assert spans.device_ms.tolist() == [6.0, 3.0]
    assert spans.all_reduce_ms.tolist() == [2.0, 6.0]
    assert steps[["hidden_ms", "exposed_ms", "communication_ms"]].to_numpy().tolist() == [[5.0, 3.0, 8.0]]
    assert spans.clock.tolist() == ["device", "device"]
    timeline = Timeline()
    for rank in (0, 1):
        timeline.describe(rank, assignment([[2, 3], [0, 1]]))
        recorder = Recorder(rank)
        for step in range(20):
            begin = (step + 1) * 50 * MS
            recorder.backward(step, begin, EARLY, 6.0)
            for bucket, (at, end) in enumerate([(3, 6), (8 + 20 * rank, 30)]):
                times = {"device_begin_ns": begin + at * MS, "device_end_ns": begin + end * MS}
                recorder.record(Kind.DEVICE_SPAN, begin, reducer=0, step=step, bucket=bucket, **times)
        timeline.extend(recorder.batch())
    (late,) = timeline.stragglers()
    assert (late.rank, late.bucket, late.parameter, late.delay_ms) == (1, 1, None, 20.0)
    assert "Rank 1 falls behind in bucket 1 (layer0, layer1), by 20.0 ms" in timeline.summary()


def test_inspections() -> None:
    """Gradients are equal where all ranks' checksums are, and who has not answered is named."""
    timeline = _two_ranks()

    def answer(rank: int, checksum: str) -> None:
        buckets = [{"bucket": 0, "norm": 1.5, "checksum": "aa"}, {"bucket": 1, "norm": 2.0, "checksum": checksum}]
        timeline.describe(rank, {"type": "inspection", "reducer": 0, "step": 9, "buckets": buckets})

    answer(0, "bb")
    (one,) = timeline.inspections(0)
    assert one.missing == (1,)
    answer(1, "cc")
    (one,) = timeline.inspections(0)
    assert (one.step, one.missing, one.equal, one.norms[0]) == (9, (), {0: True, 1: False}, {0: 1.5, 1: 1.5})


def test_what_is_said_of_little() -> None:
    """One rank has nobody to talk to; a single bucket can't overlap; an unfinished first step is said to be one.
    Without events every table is empty with all its columns, and the summary says what to do."""
    timeline, recorder = Timeline(), Recorder(0)
    recorder.record(Kind.BACKWARD_BEGIN, 10 * MS, reducer=0, step=0)
    timeline.extend(recorder.batch())
    assert timeline.summary().startswith("No step of ? is complete yet.")
    _send(timeline, recorder, 0)
    assert "a single rank has no communication" in timeline.summary()
    timeline.clear()
    for rank in (0, 1):
        _send(timeline, Recorder(rank), 0)
    assert "a single bucket" in timeline.summary()
    timeline = Timeline()
    tables = (timeline.spans(), timeline.steps(), timeline.all_reduces())
    assert [tuple(table.columns) for table in tables] == [SPAN_COLUMNS, STEP_COLUMNS, SYNC_COLUMNS]
    assert [len(table) for table in tables] == [0, 0, 0]
    assert "Wrap the model" in timeline.summary()
    assert timeline.stragglers() == []


def test_what_is_cleared_is_not_dropped() -> None:
    """After a clear, the next event of the same process is no loss; a gap after it, or before a new process's, is."""
    timeline, recorder = Timeline(), Recorder(0)
    _send(timeline, recorder, 0)
    timeline.clear()
    timeline.clear()  # what the first one has deleted stays deleted
    _send(timeline, recorder, 1)
    assert timeline.ranks()[0].dropped == 0
    assert timeline.spans()["step"].tolist() == [1]
    recorder.next += 7
    _send(timeline, recorder, 2)
    assert timeline.ranks()[0].dropped == 7
    timeline.clear()
    recorder.next += 5
    _send(timeline, recorder, 3)
    assert timeline.ranks()[0].dropped == 5  # since the clear
    timeline.clear()
    _send(timeline, Recorder(0, session=2, next=3), 4)
    assert timeline.ranks()[0].dropped == 3


def test_save_and_load(tmp_path: Path) -> None:
    """A loaded timeline shows what the saved one did: spans, names, marks, losses, words; after a restart too."""
    timeline = _two_ranks()
    timeline.describe(0, {"type": "mark", "index": 0, "name": "epoch", "session": 2})
    timeline.describe(0, assignment([[0]]) | {"session": 2})
    recorder = Recorder(0, session=2)
    recorder.record(Kind.MARK, 890 * MS, parameter=0)
    recorder.next += 7
    _send(timeline, recorder, 44)
    timeline.set_status(0, {"session": 2, "state": "idle"})
    loaded = Timeline.load(timeline.save(tmp_path / "run.npz"))
    pd.testing.assert_frame_equal(loaded.spans(), timeline.spans())
    pd.testing.assert_frame_equal(loaded.steps(), timeline.steps())
    assert loaded.reducers() == timeline.reducers()
    assert loaded.marks() == timeline.marks() == [(0, 890 * MS, "epoch")]
    assert loaded.summary() == timeline.summary()
    assert [rank.dropped for rank in loaded.ranks()] == [rank.dropped for rank in timeline.ranks()]


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    """A file that is no timeline, or none at all, is refused with its name, and what writes a timeline is said."""
    (tmp_path / "lesson.ipynb").write_text("{}")
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").touch()
    np.savez(tmp_path / "weights.npz", weight=np.zeros(3))
    for name in ("lesson.ipynb", "text.npz", "empty.npz", "weights.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not a saved timeline: .*timeline.save\(path\)` writes one"):
            Timeline.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Timeline.load(tmp_path / "missing.npz")


def test_readers_and_the_receiver_thread() -> None:
    """A reader beside the appending thread always sees whole batches: no torn step, no error."""
    timeline = Timeline(max_steps=50)
    timeline.describe(0, assignment([[2, 3], [0, 1]], ranks=[0]))
    errors: list[BaseException] = []

    def append() -> None:
        recorder = Recorder(0)
        try:
            for step in range(400):
                _send(timeline, recorder, step, EARLY)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=append)
    thread.start()
    cursor = events = 0
    while thread.is_alive():
        spans = timeline.spans()
        assert spans.complete.all()
        assert len(spans) == 2 * spans.step.nunique()
        chunks, cursor, gone = timeline.since(cursor)
        events += gone + sum(len(chunk) for _, chunk in chunks)
    thread.join()
    events += sum(len(chunk) for _, chunk in timeline.since(cursor)[0])
    assert errors == []
    assert events == timeline.ranks()[0].events
