"""The last steps of every reducer as dense arrays over ranks and buckets: the dashboard's model.

`StepStore` takes raw events by cursor and keeps, for each step, when each bucket of each rank became ready, was
launched and was reduced. It draws nothing and asks nobody: `layout`, `svg` and the browser read its `StepFrame`s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis import step_metrics
from ..analysis.step_metrics import Breakdown, GradientSync, Overlap
from ..protocol.events import Kind

__all__ = ["StepFrame", "StepStore"]

Assignment = dict[str, Any]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_Columns = dict[str, npt.NDArray[Any]]  # fields of events by name, and their rank
_COLUMNS = ("kind", "step", "reducer", "bucket", "host_ns", "generation")
_DEVICE_COLUMNS = ("device_begin_ns", "device_end_ns")

# columns of `StepFrame.times_ns` and `StepFrame.bounds_ns`
FIRST_READY, READY, LAUNCHED, REDUCED = range(4)
BEGIN, FINALIZE, END = range(3)
# columns of `StepFrame.outside_ns`
FORWARD_BEGIN, FORWARD_END, PREVIOUS_END = range(3)

_TIME_COLUMN = np.full(256, -1, np.int8)
for _column, _kind in enumerate((Kind.GRAD_READY, Kind.BUCKET_READY, Kind.BUCKET_LAUNCHED, Kind.BUCKET_REDUCED)):
    _TIME_COLUMN[_kind] = _column
_BOUND_COLUMN = np.full(256, -1, np.int8)
for _column, _kind in enumerate((Kind.BACKWARD_BEGIN, Kind.FINALIZE_BEGIN, Kind.BACKWARD_END)):
    _BOUND_COLUMN[_kind] = _column
_OUTSIDE_COLUMN = np.full(256, -1, np.int8)
for _column, _kind in enumerate((Kind.FORWARD_BEGIN, Kind.FORWARD_END)):
    _OUTSIDE_COLUMN[_kind] = _column
_USED = (_TIME_COLUMN >= 0) | (_BOUND_COLUMN >= 0) | (_OUTSIDE_COLUMN >= 0)
_USED[[Kind.DEVICE_SPAN, Kind.ABANDONED]] = True


@dataclass
class StepFrame:
    """One step of one reducer on its ranks; times are host nanoseconds, 0 where the event has not arrived.

    Attributes:
        reducer, step, generation: which step, and which assignment its bucket numbers refer to.
        ranks: the rank of each row.
        bucket_bytes: int64 ``[buckets]``, -1 where unknown.
        bounds_ns: int64 ``[ranks, 3]``: backward begin, finalize begin, backward end.
        outside_ns: int64 ``[ranks, 3]``: begin and end of the last forward before the backward, end of the step
            before.
        times_ns: int64 ``[ranks, buckets, 4]``: first gradient ready, ready, launched, reduced.
        device_ns: int64 ``[ranks, buckets, 2]``: begin and end of the collective on the device.
        abandoned: whether a rank gave this backward up.
    """

    reducer: int
    step: int
    generation: int
    ranks: list[int]
    bucket_bytes: Int64
    bounds_ns: Int64
    outside_ns: Int64
    times_ns: Int64
    device_ns: Int64
    abandoned: bool = False

    @classmethod
    def empty(cls, reducer: int, step: int, generation: int, ranks: list[int], bucket_bytes: Int64) -> StepFrame:
        """Returns a step of which no event has arrived."""
        shape = (len(ranks), len(bucket_bytes))
        return cls(
            reducer,
            step,
            generation,
            list(ranks),
            bucket_bytes,
            np.zeros((shape[0], 3), np.int64),
            np.zeros((shape[0], 3), np.int64),
            np.zeros((*shape, 4), np.int64),
            np.zeros((*shape, 2), np.int64),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of ranks and of buckets."""
        return self.times_ns.shape[0], self.times_ns.shape[1]

    @property
    def begun(self) -> bool:
        """Whether a rank has begun its backward (else only forwards are known, perhaps those of an evaluation)."""
        return bool(self.bounds_ns.any() or self.times_ns.any())

    @property
    def complete(self) -> bool:
        """Whether the backward has ended on every rank."""
        return bool(self.bounds_ns.size) and bool((self.bounds_ns[:, END] > 0).all())

    @property
    def origin_ns(self) -> int:
        """The earliest backward begin (of any event, as long as none began): 0 ms of the common axis."""
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
        """Returns the gradient sync of its buckets, as far as it has arrived: columns of `Timeline.sync`."""
        return step_metrics.gradient_sync(self.times_ns[..., LAUNCHED], self.times_ns[..., REDUCED], self.bucket_bytes)

    def overlap(self) -> Overlap:
        """Returns hidden and exposed communication, a row for each rank: columns of `Timeline.spans` and `.steps`."""
        launched, reduced = self.times_ns[..., LAUNCHED], self.times_ns[..., REDUCED]
        begin, end = np.moveaxis(self.device_ns, -1, 0)
        return step_metrics.overlap_of(launched, reduced, begin, end, self.bounds_ns[:, FINALIZE])

    def edges_ns(self) -> Int64:
        """Returns where the parts of each bucket's time meet: ``[ranks, buckets, 6]``, see `step_metrics.edges`."""
        first, ready, launched, reduced = np.moveaxis(self.times_ns, -1, 0)
        return step_metrics.edges(first, ready, launched, reduced, self.bounds_ns[:, FINALIZE])

    def breakdown(self, overlap: Overlap) -> Breakdown:
        """Returns what it consists of, as one step."""
        bounds, outside = self.bounds_ns.T, self.outside_ns.T
        by_rank = {
            "step_ms": step_metrics.milliseconds(bounds[END], outside[PREVIOUS_END]),
            "forward_ms": step_metrics.milliseconds(outside[FORWARD_END], outside[FORWARD_BEGIN]),
            "compute_ms": step_metrics.milliseconds(bounds[FINALIZE], bounds[BEGIN]),
            "hidden_ms": overlap.rank_hidden_ms,
            "exposed_ms": overlap.rank_exposed_ms,
        }
        return step_metrics.breakdown(np.array([self.step]), {name: ms[None] for name, ms in by_rank.items()})

    def grow(self, ranks: list[int], bucket_bytes: Int64) -> None:
        """Makes room for other ranks or buckets than were known when the step began."""
        old_rows = [ranks.index(rank) for rank in self.ranks]
        larger = StepFrame.empty(self.reducer, self.step, self.generation, ranks, bucket_bytes)
        buckets = min(self.shape[1], len(bucket_bytes))
        larger.bounds_ns[old_rows] = self.bounds_ns
        larger.outside_ns[old_rows] = self.outside_ns
        larger.times_ns[old_rows, :buckets] = self.times_ns[:, :buckets]
        larger.device_ns[old_rows, :buckets] = self.device_ns[:, :buckets]
        self.ranks, self.bucket_bytes = larger.ranks, bucket_bytes
        self.bounds_ns, self.outside_ns = larger.bounds_ns, larger.outside_ns
        self.times_ns, self.device_ns = larger.times_ns, larger.device_ns


class StepStore:
    """Keeps the last steps of every reducer, bounded in number and bytes.

    Not thread-safe: one thread extends and reads it (the dashboard holds a lock around it).
    """

    def __init__(
        self,
        assignment: Callable[[int, int], Assignment | None],
        *,
        max_steps: int = 500,
        max_bytes: int = 32 << 20,
    ) -> None:
        """Makes an empty store.

        Args:
            assignment: returns the description of a reducer's buckets, None while it has not arrived.
            max_steps: steps kept for each reducer.
            max_bytes: bound on the arrays of all reducers together; the oldest steps go first.
        """
        self._assignment = assignment
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._bytes = 0
        self._frames: dict[int, OrderedDict[int, StepFrame]] = {}
        self._dirty: OrderedDict[tuple[int, int], None] = OrderedDict()

    def extend(self, chunks: Iterable[tuple[int, npt.NDArray[np.void]]]) -> None:
        """Takes events (dtype `ddp_lab.protocol.events.DTYPE`) of some ranks, in the order in which each rank recorded
        them."""
        parts = [(rank, events) for rank, events in chunks if len(events)]
        if not parts:
            return
        # Ranks send a few small batches each between two refreshes: joining them column by column costs least.
        columns = {name: np.concatenate([events[name] for _, events in parts]) for name in _COLUMNS}
        columns["rank"] = np.repeat([rank for rank, _ in parts], [len(events) for _, events in parts])
        if (columns["kind"] == Kind.DEVICE_SPAN).any():
            columns |= {name: np.concatenate([events[name] for _, events in parts]) for name in _DEVICE_COLUMNS}
        step, reducer = columns["step"], columns["reducer"]
        used = _USED[columns["kind"]] & (step >= 0) & (reducer >= 0)
        for one in _distinct(reducer[used]):
            of_reducer = used & (reducer == one)
            for number in _distinct(step[of_reducer]):
                chosen = np.flatnonzero(of_reducer & (step == number))
                self._take(one, number, {name: values[chosen] for name, values in columns.items()})

    def reducers(self) -> list[int]:
        """Returns the reducers of which a step is held whose backward has begun."""
        return sorted(reducer for reducer in self._frames if self.steps(reducer))

    def steps(self, reducer: int) -> list[int]:
        """Returns the step numbers held of one reducer whose backward has begun, in order."""
        return sorted(step for step, frame in self._frames.get(reducer, {}).items() if frame.begun)

    def frame(self, reducer: int, step: int) -> StepFrame | None:
        """Returns one step, None if it is not held (yet, or any more)."""
        held = self._frames.get(reducer)
        return None if held is None else held.get(step)

    def frames(self, reducer: int | None = None) -> list[StepFrame]:
        """Returns every step held, of one reducer or of all, in order of the steps."""
        chosen = self.reducers() if reducer is None else [reducer]
        return [self._frames[one][step] for one in chosen for step in self.steps(one)]

    def latest(self, reducer: int | None = None) -> StepFrame | None:
        """Returns the newest complete step (the newest of all if none is complete) of one reducer.

        Without a reducer it is that of the reducer whose backward began last.
        """
        frames = self.frames(reducer)
        done = [frame for frame in frames if frame.complete and not frame.abandoned] or frames
        return max(done, key=lambda frame: (frame.origin_ns, frame.step), default=None)

    def take_dirty(self) -> list[StepFrame]:
        """Returns the steps that changed since the last call, oldest change first, and forgets that they did.

        A step whose backward has not begun is left out.
        """
        keys = list(self._dirty)
        self._dirty.clear()
        found = (self.frame(*key) for key in keys)
        return [frame for frame in found if frame is not None and frame.begun]

    def _take(self, reducer: int, step: int, events: _Columns) -> None:
        """Writes events of one step, each rank's in order of time, into their frame."""
        frame = self._frame_for(reducer, step, events)
        if frame is None:
            return
        row = np.searchsorted(frame.ranks, events["rank"])
        kind, bucket, host = events["kind"], events["bucket"], events["host_ns"]
        column = _TIME_COLUMN[kind]
        first = np.flatnonzero((column == FIRST_READY) & (bucket >= 0))[::-1]
        # Only the earliest gradient of a bucket counts: written in reverse, the earliest event is the last to write.
        first = first[frame.times_ns[row[first], bucket[first], FIRST_READY] == 0]
        frame.times_ns[row[first], bucket[first], FIRST_READY] = host[first]
        later = np.flatnonzero((column > FIRST_READY) & (bucket >= 0))
        frame.times_ns[row[later], bucket[later], column[later]] = host[later]
        bound = _BOUND_COLUMN[kind]
        inside = np.flatnonzero(bound >= 0)
        frame.bounds_ns[row[inside], bound[inside]] = host[inside]
        outside = _OUTSIDE_COLUMN[kind]
        forward = np.flatnonzero(outside >= 0)
        frame.outside_ns[row[forward], outside[forward]] = host[forward]
        self._take_previous_end(frame, events["rank"])
        if (kind == Kind.ABANDONED).any():
            frame.abandoned = True
        if "device_end_ns" in events:
            spans = np.flatnonzero((kind == Kind.DEVICE_SPAN) & (bucket >= 0))
            frame.device_ns[row[spans], bucket[spans], 0] = events["device_begin_ns"][spans]
            frame.device_ns[row[spans], bucket[spans], 1] = events["device_end_ns"][spans]
        self._dirty[frame.reducer, frame.step] = None

    def _take_previous_end(self, frame: StepFrame, ranks: npt.NDArray[Any]) -> None:
        """Notes when these ranks ended the step before: a rank's events come in order, so it is known by now."""
        before = self.frame(frame.reducer, frame.step - 1)
        if before is None:
            return
        for rank in _distinct(ranks):
            if rank in before.ranks:
                end = before.bounds_ns[before.ranks.index(rank), END]
                frame.outside_ns[frame.ranks.index(rank), PREVIOUS_END] = end

    def _frame_for(self, reducer: int, step: int, events: _Columns) -> StepFrame | None:
        """Returns the frame of the events' step, made or enlarged as needed; None if the step is too old."""
        seen = set(_distinct(events["rank"]))
        held = self._frames.setdefault(reducer, OrderedDict())
        frame = held.get(step)
        if frame is None:
            if len(held) >= self._max_steps and step < min(held):
                return None
            generation = int(events["generation"].max())
            frame = StepFrame.empty(reducer, step, generation, *self._known(reducer, generation, seen))
            held[step] = frame
            self._bytes += _size(frame)
            self._forget_old(held)
        highest = int(events["bucket"].max())
        generation = int(events["generation"].max())
        if generation > frame.generation and not frame.times_ns.any():
            # The forward began under the assignment that it then replaced.
            frame.generation = generation
            self._bytes -= _size(frame)
            frame.grow(*self._known(reducer, generation, {*frame.ranks, *seen}))
            self._bytes += _size(frame)
        if not seen <= set(frame.ranks) or highest >= frame.shape[1]:
            ranks, sizes = self._known(reducer, frame.generation, {*frame.ranks, *seen})
            if highest >= len(sizes):
                sizes = np.concatenate([sizes, np.full(highest + 1 - len(sizes), -1, np.int64)])
            if len(sizes) < frame.shape[1]:
                sizes = np.concatenate([sizes, frame.bucket_bytes[len(sizes) :]])
            self._bytes -= _size(frame)
            frame.grow(ranks, sizes)
            self._bytes += _size(frame)
        return frame

    def _known(self, reducer: int, generation: int, ranks: set[int]) -> tuple[list[int], Int64]:
        """Returns the ranks of the group and those seen, and the bytes of each bucket that is described."""
        assignment = self._assignment(reducer, generation) or {}
        buckets = assignment.get("buckets", ())
        sizes = np.full(len(buckets), -1, np.int64)
        for entry in buckets:
            sizes[entry["bucket"]] = entry["bytes"]
        return sorted({*assignment.get("group_ranks", ()), *ranks}), sizes

    def _forget_old(self, held: OrderedDict[int, StepFrame]) -> None:
        """Drops the oldest steps beyond both bounds; the newest step always stays."""
        while len(held) > self._max_steps or (self._bytes > self._max_bytes and len(held) > 1):
            step = min(held)
            frame = held.pop(step)
            self._bytes -= _size(frame)
            self._dirty.pop((frame.reducer, step), None)


def _distinct(values: npt.NDArray[Any]) -> list[int]:
    """Returns the distinct values, ascending; by counting, several times as fast as sorting or hashing."""
    if not len(values):
        return []
    lowest, highest = int(values.min()), int(values.max())
    if highest - lowest > 4_096:
        return [int(value) for value in np.unique(values)]
    return [int(value) + lowest for value in np.flatnonzero(np.bincount(values - lowest))]


def _size(frame: StepFrame) -> int:
    """Returns the bytes of a frame's arrays."""
    return int(frame.bounds_ns.nbytes + frame.outside_ns.nbytes + frame.times_ns.nbytes + frame.device_ns.nbytes)
