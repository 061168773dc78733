"""The times of one rank's backwards of one reducer: dense, bounded, written from event batches without a loop.

Row = step (a ring of the last steps), column = bucket (or parameter). A batch is one fancy assignment per kind of
event, so that a live view of many ranks and buckets costs the receiver thread microseconds.

[Note: old steps are thinned]
A step that leaves the ring moves to some additional rows, if its number is a multiple of a power of two. That power
starts at 1 and doubles whenever these rows are full: they always hold evenly spaced steps of the whole past, the same
ones on all ranks. The neighbours of such a step are missing.

[Note: no larger than what came]
A table is dense, but its indices come from outside: two events with a large step and a large parameter number would
make it a gigabyte. So the number of rows is limited by the number of events received. Complete steps fill a table a
hundred times as fast as it may grow; a rank that sends fewer events keeps fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...protocol.events import Kind

__all__ = ["BUCKET_FIELDS", "STEP_FIELDS", "StepTable"]

_Array = npt.NDArray[np.int64]

STEP_FIELDS: Final = ("forward_begin", "forward_end", "backward_begin", "finalize", "backward_end", "abandoned")
BUCKET_FIELDS: Final = ("first_ready", "ready", "launched", "reduced", "device_begin", "device_end", "bytes")
_STEP_KINDS: Final = ("FORWARD_BEGIN", "FORWARD_END", "BACKWARD_BEGIN", "FINALIZE_BEGIN", "BACKWARD_END", "ABANDONED")
_BUCKET_KINDS: Final = ("BUCKET_READY", "BUCKET_LAUNCHED", "BUCKET_REDUCED")
# As plain numbers: numpy compares with these several times as fast as with members of an enumeration.
_GRAD_READY, _BUCKET_LAUNCHED, _DEVICE_SPAN = map(int, (Kind.GRAD_READY, Kind.BUCKET_LAUNCHED, Kind.DEVICE_SPAN))
_BYTES: Final = BUCKET_FIELDS.index("bytes")


def _by_kind(kinds: Sequence[str], first: int) -> npt.NDArray[np.int8]:
    """By kind its column, from `first` on; -1 for other kinds."""
    table = np.full(256, -1, np.int8)
    table[[Kind[name] for name in kinds]] = np.arange(first, first + len(kinds))
    return table


_STEP_COLUMN = _by_kind(_STEP_KINDS, 0)
_BUCKET_COLUMN = _by_kind(_BUCKET_KINDS, BUCKET_FIELDS.index("ready"))
_END: Final = STEP_FIELDS.index("backward_end")
_FIRST_ROWS = 64
_SPARE_NUMBERS, _NUMBERS_AN_EVENT = 1 << 18, 256  # that a table may have, see [Note: no larger than what came]
_NEVER = np.iinfo(np.int64).max


class StepTable:
    """Times in ns of the last `max_steps` steps, and of some older ones; 0 where nothing has happened (yet).

    Args:
        max_steps: a quarter as many older ones are kept, see [Note: old steps are thinned].

    Attributes:
        step: shape ``[rows]``; the step that a row holds, -1 if none.
        generation: shape ``[rows]``; version of the bucket layout that the step used.
        process_group: shape ``[rows]``; index of the group on that rank.
        previous_end: shape ``[rows]``; the end of the previous step, if its row was overwritten; else 0.
        revisions: shape ``[rows]``; grows with each change of the row, over all rows.
        steps: shape ``[rows, len(STEP_FIELDS)]``.
        buckets: shape ``[rows, buckets, len(BUCKET_FIELDS)]``.
        gradients: shape ``[rows, parameters]``; when each parameter's gradient was accumulated.
        last_step: the latest step seen, -1 if none.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps, self._max_thinned = max_steps, max_steps // 4
        self._every = 1  # which steps are kept behind the ring
        self._taken = 0  # events
        self._revision = 0
        self._allocate(min(_FIRST_ROWS, max_steps), 0, 0, 0)
        self.last_step = -1

    def _allocate(self, ring: int, thinned: int, buckets: int, parameters: int) -> None:
        self._ring, rows = ring, ring + thinned
        self.step = np.full(rows, -1, np.int64)
        self.generation = np.zeros(rows, np.int64)
        self.process_group = np.full(rows, -1, np.int64)
        self.previous_end = np.zeros(rows, np.int64)
        self.revisions = np.zeros(rows, np.int64)
        self.steps = np.zeros((rows, len(STEP_FIELDS)), np.int64)
        self.buckets = np.zeros((rows, buckets, len(BUCKET_FIELDS)), np.int64)
        self.gradients = np.zeros((rows, parameters), np.int64)

    def rows(self) -> _Array:
        """Indices of the rows that hold a step, in the order of steps."""
        held = np.flatnonzero(self.step >= 0)
        return held[np.argsort(self.step[held])]

    def find(self, steps: _Array) -> _Array:
        """Indices of the rows that hold these steps, -1 where a step is not held."""
        row = np.where((steps >= 0) & (self.step[steps % self._ring] == steps), steps % self._ring, -1)
        behind = self.step[self._ring :]
        if len(behind) and (row < 0).any():
            order = np.argsort(behind)
            older = order[np.minimum(np.searchsorted(behind, steps, sorter=order), len(behind) - 1)]
            row = np.where((row < 0) & (steps >= 0) & (behind[older] == steps), self._ring + older, row)
        return row

    def changed(self, revision: int) -> tuple[_Array, int]:
        """Steps that have changed since a revision, and the newest one."""
        if revision == self._revision:
            return self.step[:0], revision
        return self.step[(self.revisions > revision) & (self.step >= 0)], self._revision

    def extend(self, events: npt.NDArray[np.void]) -> None:
        """Takes events of this rank and reducer, in the order of their sequence numbers."""
        step = events["step"]
        if len(step) and step.min() < 0:
            events = events[step >= 0]
            step = events["step"]
        if not len(events):
            return
        first, last = int(step.min()), int(step.max())
        self._make_room(events, first, last)
        if last - first >= self._ring:  # piece by piece, so that each step is there before it is forgotten
            numbers = (step - first) // self._ring
            for number in np.unique(numbers):
                piece = events[numbers == number]
                self._take(piece, int(piece["step"].max()))
        else:
            self._take(events, last)

    def _take(self, events: npt.NDArray[np.void], last: int) -> None:
        """Takes events of fewer steps than the ring has rows; the newest is `last`."""
        self.last_step = max(self.last_step, last)
        step = events["step"]
        # Older than what the ring holds, e.g. a device span that was resolved very late.
        current = step > self.last_step - self._ring
        if not current.all():
            events, step = events[current], step[current]
            if not len(events):
                return
        self._claim(np.array([last]) if int(step.min()) == last else np.unique(step))
        row = step % self._ring
        kind, at, bucket = events["kind"], events["host_ns"], events["bucket"]
        column = _STEP_COLUMN[kind]
        chosen = np.flatnonzero(column >= 0)
        if len(chosen):
            self.steps[row[chosen], column[chosen]] = at[chosen]
            self.generation[row[chosen]] = events["generation"][chosen]
            self.process_group[row[chosen]] = events["process_group"][chosen]
        column = _BUCKET_COLUMN[kind]
        chosen = np.flatnonzero((column >= 0) & (bucket >= 0))
        if len(chosen):
            self.buckets[row[chosen], bucket[chosen], column[chosen]] = at[chosen]
            self.generation[row[chosen]] = events["generation"][chosen]
            launched = chosen[kind[chosen] == _BUCKET_LAUNCHED]
            self.buckets[row[launched], bucket[launched], _BYTES] = events["bytes"][launched]
        self._take_gradients(row, kind, bucket, events)
        chosen = np.flatnonzero((kind == _DEVICE_SPAN) & (bucket >= 0))
        if len(chosen):
            self.buckets[row[chosen], bucket[chosen], 4] = events["device_begin_ns"][chosen]
            self.buckets[row[chosen], bucket[chosen], 5] = events["device_end_ns"][chosen]

    def _take_gradients(self, row: _Array, kind: _Array, bucket: _Array, events: npt.NDArray[np.void]) -> None:
        # A gradient that only accumulates (under no_sync) belongs to no bucket.
        chosen = np.flatnonzero((kind == _GRAD_READY) & (bucket >= 0))
        if not len(chosen):
            return
        row, bucket, at, parameter = row[chosen], bucket[chosen], events["host_ns"][chosen], events["parameter"][chosen]
        self.gradients[row, parameter] = at
        first = self.buckets[:, :, 0]
        known = first[row, bucket]
        first[row, bucket] = np.where(known == 0, _NEVER, known)
        np.minimum.at(first, (row, bucket), at)

    def _make_room(self, events: npt.NDArray[np.void], first: int, last: int) -> None:
        """Makes the tables large enough for these events of steps `first` to `last`."""
        ring, thinned = self._ring, len(self.step) - self._ring
        if not thinned and (last > self.last_step or first <= self.last_step - ring):  # thinned: it is full grown
            held = self.step[:ring]
            oldest = int(held[held >= 0].min()) if self.last_step >= 0 else first
            span = max(last, self.last_step) - min(first, oldest)
            while ring < self._max_steps and span >= ring:
                ring = min(self._max_steps, ring * 2)
            thinned = self._max_thinned if span >= self._max_steps else 0
        buckets = max(self.buckets.shape[1], int(events["bucket"].max()) + 1)
        parameters = self.gradients.shape[1]
        if int(events["parameter"].max()) >= parameters:  # that of a mark is no parameter's number
            of_gradients = events["parameter"][(events["kind"] == _GRAD_READY)]
            parameters = max(parameters, int(of_gradients.max(initial=-1)) + 1)
        self._taken += len(events)
        width = len(STEP_FIELDS) + buckets * len(BUCKET_FIELDS) + parameters
        most = max(1, (_SPARE_NUMBERS + _NUMBERS_AN_EVENT * self._taken) // width)
        if ring + thinned > most:  # it grows again when there is room for twice as many
            ring, thinned = self._ring if self._ring <= most < 2 * self._ring else min(ring, most), 0
        known = (self._ring, len(self.step) - self._ring, self.buckets.shape[1], self.gradients.shape[1])
        if (ring, thinned, buckets, parameters) != known:
            self._grow(ring, thinned, buckets, parameters)

    def _grow(self, ring: int, thinned: int, buckets: int, parameters: int) -> None:
        before = self._columns()
        held, of_ring = np.flatnonzero(self.step >= 0), self._ring
        if ring != of_ring:  # a smaller ring has lost some of them, as one that could not grow in time has
            held = held[(self.step[held] > self.last_step - ring) | ((held >= of_ring) & (thinned > 0))]
        row = np.where(held < of_ring, self.step[held] % ring, held - of_ring + ring)
        self._allocate(ring, thinned, buckets, parameters)
        for table, old in zip(self._columns(), before, strict=True):
            if old.ndim == 1:
                table[row] = old[held]
            else:
                table[row, : old.shape[1]] = old[held]

    def _columns(self) -> tuple[_Array, ...]:
        return (
            *(self.step, self.generation, self.process_group, self.previous_end, self.revisions),
            *(self.steps, self.buckets, self.gradients),
        )

    def _claim(self, steps: _Array) -> None:
        """Clears the rows of older steps, and moves some of these behind the ring."""
        row = steps % self._ring
        new = self.step[row] != steps
        self._revision += 1
        self.revisions[row] = self._revision
        if not new.any():
            return
        row, steps = row[new], steps[new]
        forgotten = row[self.step[row] >= 0]
        forgotten = forgotten[np.argsort(self.step[forgotten])]
        gone, ended = self.step[forgotten], self.steps[forgotten, _END]
        if len(forgotten):
            self._thin(forgotten)
        self._empty(row)
        self.step[row] = steps
        if len(gone):
            at = np.minimum(np.searchsorted(gone, steps - 1), len(gone) - 1)
            follows = gone[at] == steps - 1
            self.previous_end[row[follows]] = ended[at[follows]]

    def _thin(self, rows: _Array) -> None:
        """Moves some of these rows behind the ring, the oldest step first."""
        after = (self.step[rows] + 1) % self._ring
        follows = self.step[after] == self.step[rows] + 1
        self.previous_end[after[follows]] = self.steps[rows[follows], _END]
        rows = rows[self.step[rows] % self._every == 0]
        behind = np.arange(self._ring, len(self.step))
        free = behind[self.step[behind] < 0]
        while len(rows) > len(free) and len(behind):
            self._every *= 2
            self._empty(behind[self.step[behind] % self._every != 0])
            rows, free = rows[self.step[rows] % self._every == 0], behind[self.step[behind] < 0]
        rows = rows[: len(free)]
        for table in self._columns():
            table[free[: len(rows)]] = table[rows]

    def _empty(self, rows: _Array) -> None:
        self.step[rows] = self.process_group[rows] = -1
        for table in (self.generation, self.previous_end, self.steps, self.buckets, self.gradients):
            table[rows] = 0
