"""The steps of a timeline, each as one frame over ranks and buckets: slices of the timeline's tables.

`StepFrames` holds no events of its own: it notes which steps have changed, and copies those that are requested.
Pictures and messages are made from its `StepFrame`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...analysis import step_metrics
from ...analysis.step_metrics import BESIDE, Breakdown, Communication, GradientSync, Overlap, together
from ...analysis.step_parts import SPANS
from ...timeline.tables.span_columns import TableView
from ...timeline.tables.step_table import BUCKET_FIELDS, STEP_FIELDS
from ...timeline.timeline import Timeline

__all__ = ["StepFrame", "StepFrames"]

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

# columns of `StepFrame.times_ns`, `bounds_ns` and `outside_ns`
FIRST_READY, READY, LAUNCHED, REDUCED = range(4)
BEGIN, FINALIZE, END = range(3)
FORWARD_BEGIN, FORWARD_END, PREVIOUS_END = range(3)

_BOUNDS = [STEP_FIELDS.index(name) for name in ("backward_begin", "finalize", "backward_end")]
_FORWARD = [STEP_FIELDS.index(name) for name in ("forward_begin", "forward_end")]
_TIMES = [BUCKET_FIELDS.index(name) for name in ("first_ready", "ready", "launched", "reduced")]
_DEVICE = [BUCKET_FIELDS.index(name) for name in ("device_begin", "device_end")]
_ABANDONED, _BYTES = STEP_FIELDS.index("abandoned"), BUCKET_FIELDS.index("bytes")


@dataclass
class StepFrame:
    """One step of one reducer on its ranks; times are host nanoseconds, 0 where the event has not arrived.

    Attributes:
        reducer, step, generation: which step, and which bucket layout its bucket numbers refer to.
        ranks: the rank of each row.
        bucket_bytes: int64 ``[buckets]``, -1 where unknown.
        bounds_ns: int64 ``[ranks, 3]``: backward begin, finalize begin, backward end.
        outside_ns: int64 ``[ranks, 3]``: begin and end of the last forward before the backward, end of the previous
            step.
        spans_ns: int64 ``[ranks, len(SPANS)]``: time of each of `SPANS` since the end of the previous step.
        times_ns: int64 ``[ranks, buckets, 4]``: first gradient ready, ready, launched, reduced.
        device_ns: int64 ``[ranks, buckets, 2]``: begin and end of the collective on the device.
        abandoned: whether a rank abandoned this backward.
        communication: how it shares the step with the computation, a row per rank.
    """

    reducer: int
    step: int
    generation: int
    ranks: list[int]
    bucket_bytes: Int64
    bounds_ns: Int64
    outside_ns: Int64
    spans_ns: Int64
    times_ns: Int64
    device_ns: Int64
    abandoned: bool = False
    communication: Communication = BESIDE

    @property
    def shape(self) -> tuple[int, int]:
        """Number of ranks and of buckets."""
        return self.times_ns.shape[0], self.times_ns.shape[1]

    @property
    def begun(self) -> bool:
        """Whether a rank has begun its backward. If not, only forwards are known, perhaps those of an evaluation."""
        return bool(self.bounds_ns.any() or self.times_ns.any())

    @property
    def complete(self) -> bool:
        """Whether the backward has ended on every rank."""
        return bool(self.bounds_ns.size) and bool((self.bounds_ns[:, END] > 0).all())

    @property
    def origin_ns(self) -> int:
        """The earliest backward begin, or the earliest event if no backward has begun: 0 ms of the common axis."""
        begins = self.bounds_ns[:, BEGIN]
        begins = begins[begins > 0]
        if not begins.size:
            begins = self.times_ns[self.times_ns > 0]
        if not begins.size:
            begins = self.outside_ns[self.outside_ns > 0]
        return int(begins.min()) if begins.size else 0

    def milliseconds(self, values: Int64) -> Float64:
        """Returns host times as milliseconds from `origin_ns`, NaN where the event has not arrived."""
        return np.where(values > 0, (values - self.origin_ns) / 1e6, np.nan)

    def extent_ms(self) -> Float64:
        """Returns the first event of a bucket and the last event of each rank, ``[ranks, 2]``: `milliseconds`."""
        times = self.times_ns.reshape(self.shape[0], -1)
        first = np.where(times > 0, times, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
        last = np.maximum(times.max(axis=1, initial=0), self.bounds_ns.max(axis=1, initial=0))
        return self.milliseconds(np.stack([np.where(times.any(axis=1), first, 0), last], axis=-1))

    def last_rank(self, sync: GradientSync) -> Int64:
        """Returns the rank that launched each bucket last, ``[buckets]``, -1 where a rank's launch is missing."""
        return np.where(sync.last >= 0, np.asarray([*self.ranks, -1])[sync.last], -1)

    def sync(self) -> GradientSync:
        """Returns the gradient sync of the buckets whose events have arrived: columns of `Timeline.all_reduces`."""
        return step_metrics.gradient_sync(self.times_ns[..., LAUNCHED], self.times_ns[..., REDUCED], self.bucket_bytes)

    def overlap(self) -> Overlap:
        """Returns overlapped and exposed communication, a row per rank: columns of `Timeline.spans` and `.steps`."""
        launched, reduced = self.times_ns[..., LAUNCHED], self.times_ns[..., REDUCED]
        begin, end = np.moveaxis(self.device_ns, -1, 0)
        return self.communication.overlap(launched, reduced, begin, end, self.bounds_ns[:, FINALIZE])

    def edges_ns(self) -> Int64:
        """Returns the edges of the parts of each bucket's time: ``[ranks, buckets, 6]``, see `step_metrics.edges`."""
        first, ready, launched, reduced = np.moveaxis(self.times_ns, -1, 0)
        return self.communication.edges(first, ready, launched, reduced, self.bounds_ns[:, FINALIZE])

    def breakdown(self, overlap: Overlap) -> Breakdown:
        """Returns its time breakdown."""
        bounds, outside, of = self.bounds_ns.T, self.outside_ns.T, self.communication
        by_rank = {
            "step_ms": of.step_ms(step_metrics.milliseconds(bounds[END], outside[PREVIOUS_END])),
            "forward_ms": of.net_ms("forward", step_metrics.milliseconds(outside[FORWARD_END], outside[FORWARD_BEGIN])),
            "compute_ms": of.net_ms("compute", step_metrics.milliseconds(bounds[FINALIZE], bounds[BEGIN])),
            "hidden_ms": overlap.rank_hidden_ms,
            "exposed_ms": overlap.rank_exposed_ms,
            **{f"{name}_ms": of.net_ms(name, self.spans_ns[:, column] / 1e6) for column, name in enumerate(SPANS)},
        }
        return step_metrics.breakdown(np.array([self.step]), {name: ms[None] for name, ms in by_rank.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(one.nbytes for one in (self.bounds_ns, self.outside_ns, self.times_ns, self.device_ns))


class StepFrames:
    """The newest steps of every reducer of a timeline, bounded in number and bytes.

    Not thread-safe: only one thread may use it (the dashboard holds a lock). The timeline may grow meanwhile.
    """

    def __init__(self, timeline: Timeline, *, max_steps: int = 500, max_bytes: int = 32 << 20) -> None:
        """`max_bytes` bounds the arrays of each reducer's steps; the newest step is always kept."""
        self._timeline, self._max_steps, self._max_bytes = timeline, max_steps, max_bytes
        self._seen: dict[tuple[int, int], int] = {}
        self._last: dict[int, int] | None = None

    def freeze(self) -> None:
        """Freezes the newest step: later steps are ignored."""
        self._last = {one.reducer: one.last_step for one in self._timeline.reducers()}

    def changed(self) -> list[tuple[int, int]]:
        """Returns the (reducer, step) pairs that have changed since the last call, in the order of steps."""
        found = self._timeline.changed_steps(self._seen)
        return [(reducer, step) for reducer, steps in found.items() for step in steps]

    def reducers(self) -> list[int]:
        """Returns the reducers with a step whose backward has begun."""
        known = [one.reducer for one in self._timeline.reducers() if one.last_step >= 0]
        return sorted(reducer for reducer in known if self.frames(reducer, 2))

    def steps(self, reducer: int) -> list[int]:
        """Returns the newest step numbers of one reducer, within the bounds. The last may be a forward only."""
        held = self._held(reducer)
        (newest,) = self.read(reducer, held[-1:]) or (None,)
        most = 1 if newest is None else max(1, self._max_bytes // newest.nbytes)
        return [int(step) for step in held[-most:]]

    def frame(self, reducer: int, step: int) -> StepFrame | None:
        """Returns one step; None if it is not held (not yet, or no longer) or its backward has not begun."""
        return next(iter(self.read(reducer, [step])), None)

    def frames(self, reducer: int, last: int) -> list[StepFrame]:
        """Returns the newest steps of a reducer whose backward has begun, at most `last`, in order."""
        # The newest may be a forward only.
        return self.read(reducer, self._held(reducer)[-last - 1 :])[-last:]

    def latest(self, reducer: int | None = None) -> StepFrame | None:
        """Returns the newest complete step of one reducer, or the newest if none of the last 50 is complete.

        Without a reducer, uses the reducer whose backward began last.
        """
        frames: list[StepFrame] = []
        for one in self.reducers() if reducer is None else [reducer]:
            for last in (4, 50):  # nearly always one of the last few
                recent = self.frames(one, last)
                done = [frame for frame in recent if frame.complete and not frame.abandoned]
                if done:
                    break
            frames += done or recent
        done = [frame for frame in frames if frame.complete and not frame.abandoned] or frames
        return max(done, key=lambda frame: (frame.origin_ns, frame.step), default=None)

    def _held(self, reducer: int) -> Int64:
        """Returns the newest step numbers."""
        held = self._timeline.held_steps(reducer)
        if self._last is not None:
            held = held[held <= self._last.get(reducer, -1)]
        return held[-self._max_steps :]

    def read(self, reducer: int, steps: Sequence[int] | Int64) -> list[StepFrame]:
        """Returns the steps among these (ascending) that are held and whose backward has begun."""
        views = self._timeline.views_of(reducer, np.asarray(steps, np.int64))
        made = (self._frame(reducer, int(step), views) for step in steps)
        return [frame for frame in made if frame.begun]

    def _frame(self, reducer: int, step: int, views: Sequence[TableView]) -> StepFrame:
        """Returns one step from the rows of each rank."""
        rows = {one.rank: (one, int(np.searchsorted(one.step, step))) for one in views if step in one.step}
        generation = max((int(one.generation[row]) for one, row in rows.values()), default=0)
        try:
            assignment = self._timeline.assignment(reducer, generation)
        except ValueError:
            assignment = {}
        described, ranks = assignment.get("buckets", ()), sorted({*assignment.get("group_ranks", ()), *rows})
        width = max([len(described), *(one.buckets.shape[1] for one in views)])
        steps, before = np.zeros((len(ranks), len(STEP_FIELDS)), np.int64), np.zeros((len(ranks), 1), np.int64)
        spans = np.zeros((len(ranks), len(SPANS)), np.int64)
        times = np.zeros((len(ranks), width, len(BUCKET_FIELDS)), np.int64)
        for index, rank in enumerate(ranks):
            if rank in rows:
                one, row = rows[rank]
                steps[index], before[index], spans[index] = one.steps[row], one.previous_end[row], one.spans[row]
                times[index, : one.buckets.shape[1]] = one.buckets[row]
        used = np.flatnonzero(times.any(axis=(0, 2)))
        times = times[:, : max(len(described), int(used.max(initial=-1)) + 1)]
        sizes = np.full(times.shape[1], -1, np.int64)
        for entry in described:
            sizes[entry["bucket"]] = entry["bytes"]
        launched = times[:, :, _BYTES].max(axis=0, initial=0)
        return StepFrame(
            reducer,
            step,
            generation,
            ranks,
            bucket_bytes=np.where(launched > 0, launched, sizes),
            bounds_ns=steps[:, _BOUNDS],
            outside_ns=np.concatenate([steps[:, _FORWARD], before], axis=1),
            spans_ns=spans,
            times_ns=times[:, :, _TIMES],
            device_ns=times[:, :, _DEVICE],
            abandoned=bool(steps[:, _ABANDONED].any()),
            communication=together(
                [rows[rank][0].communication.of(rows[rank][1]) if rank in rows else None for rank in ranks],
                times.shape[1],
            ),
        )
