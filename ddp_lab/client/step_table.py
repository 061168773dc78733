"""The times of one rank's backwards of one reducer: dense, bounded, written from event batches without a loop.

Row = step (a ring of the last steps), column = bucket (or parameter). A batch is one fancy assignment per kind of
event, so that a live view of many ranks and buckets costs the receiver thread microseconds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..events import Kind

__all__ = ["BUCKET_FIELDS", "STEP_FIELDS", "StepTable"]

_Array = npt.NDArray[np.int64]

STEP_FIELDS: Final = ("forward_begin", "forward_end", "backward_begin", "finalize", "backward_end", "abandoned")
BUCKET_FIELDS: Final = ("first_ready", "ready", "launched", "reduced", "device_begin", "device_end", "bytes")
_STEP_KINDS: Final = {
    Kind.FORWARD_BEGIN: 0,
    Kind.FORWARD_END: 1,
    Kind.BACKWARD_BEGIN: 2,
    Kind.FINALIZE_BEGIN: 3,
    Kind.BACKWARD_END: 4,
    Kind.ABANDONED: 5,
}
_BUCKET_KINDS: Final = {Kind.BUCKET_READY: 1, Kind.BUCKET_LAUNCHED: 2, Kind.BUCKET_REDUCED: 3}
_FIRST_ROWS = 64
_NEVER = np.iinfo(np.int64).max


class StepTable:
    """Times in ns of the last `max_steps` steps; 0 where nothing has happened (yet).

    Attributes:
        step: shape ``[rows]``; the step that a row holds, -1 if none.
        generation: shape ``[rows]``; which assignment of buckets the step used.
        process_group: shape ``[rows]``; index of the group on that rank.
        steps: shape ``[rows, len(STEP_FIELDS)]``.
        buckets: shape ``[rows, buckets, len(BUCKET_FIELDS)]``.
        gradients: shape ``[rows, parameters]``; when each parameter's gradient was accumulated.
        last_step: the latest step seen, -1 if none.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._allocate(min(_FIRST_ROWS, max_steps), 0, 0)
        self.last_step = -1

    def _allocate(self, rows: int, buckets: int, parameters: int) -> None:
        self.step = np.full(rows, -1, np.int64)
        self.generation = np.zeros(rows, np.int64)
        self.process_group = np.full(rows, -1, np.int64)
        self.steps = np.zeros((rows, len(STEP_FIELDS)), np.int64)
        self.buckets = np.zeros((rows, buckets, len(BUCKET_FIELDS)), np.int64)
        self.gradients = np.zeros((rows, parameters), np.int64)

    def rows(self, last_steps: int | None = None) -> _Array:
        """Indices of the rows that hold a step, in the order of steps; only the newest `last_steps`."""
        held = np.flatnonzero(self.step >= 0)
        held = held[np.argsort(self.step[held])]
        return held if last_steps is None else held[max(0, len(held) - last_steps) :]

    def extend(self, events: npt.NDArray[np.void]) -> None:
        """Takes events of this rank and reducer, in the order of their sequence numbers."""
        events = events[events["step"] >= 0]
        if not len(events):
            return
        self._make_room(events)
        step = events["step"]
        # Older than what the ring holds, e.g. a device span that was resolved very late.
        current = step > self.last_step - len(self.step)
        if not current.all():
            events, step = events[current], step[current]
        self._claim(np.unique(step))
        row = step % len(self.step)
        kind, at, bucket = events["kind"], events["host_ns"], events["bucket"]
        for which, column in _STEP_KINDS.items():
            chosen = kind == which
            if chosen.any():
                self.steps[row[chosen], column] = at[chosen]
                self.generation[row[chosen]] = events["generation"][chosen]
                self.process_group[row[chosen]] = events["process_group"][chosen]
        for which, column in _BUCKET_KINDS.items():
            chosen = (kind == which) & (bucket >= 0)
            if chosen.any():
                self.buckets[row[chosen], bucket[chosen], column] = at[chosen]
                self.generation[row[chosen]] = events["generation"][chosen]
                if which == Kind.BUCKET_LAUNCHED:
                    self.buckets[row[chosen], bucket[chosen], 6] = events["bytes"][chosen]
        self._take_gradients(row, kind, bucket, events)
        chosen = (kind == Kind.DEVICE_SPAN) & (bucket >= 0)
        if chosen.any():
            self.buckets[row[chosen], bucket[chosen], 4] = events["device_begin_ns"][chosen]
            self.buckets[row[chosen], bucket[chosen], 5] = events["device_end_ns"][chosen]

    def _take_gradients(self, row: _Array, kind: _Array, bucket: _Array, events: npt.NDArray[np.void]) -> None:
        # A gradient that only accumulates (under no_sync) belongs to no bucket.
        chosen = (kind == Kind.GRAD_READY) & (bucket >= 0)
        if not chosen.any():
            return
        row, bucket, at, parameter = row[chosen], bucket[chosen], events["host_ns"][chosen], events["parameter"][chosen]
        self.gradients[row, parameter] = at
        first = self.buckets[:, :, 0]
        known = first[row, bucket]
        first[row, bucket] = np.where(known == 0, _NEVER, known)
        np.minimum.at(first, (row, bucket), at)

    def _make_room(self, events: npt.NDArray[np.void]) -> None:
        first, last = int(events["step"].min()), int(events["step"].max())
        rows = len(self.step)
        oldest = int(self.step[self.step >= 0].min()) if self.last_step >= 0 else first
        while rows < self._max_steps and max(last, self.last_step) - min(first, oldest) >= rows:
            rows = min(self._max_steps, rows * 2)
        buckets = max(self.buckets.shape[1], int(events["bucket"].max()) + 1)
        of_gradients = events["parameter"][(events["kind"] == Kind.GRAD_READY)]
        parameters = max(self.gradients.shape[1], int(of_gradients.max(initial=-1)) + 1)
        if (rows, buckets, parameters) != (len(self.step), self.buckets.shape[1], self.gradients.shape[1]):
            self._grow(rows, buckets, parameters)
        self.last_step = max(self.last_step, last)

    def _grow(self, rows: int, buckets: int, parameters: int) -> None:
        held = self.rows()
        step, generation, group = self.step[held], self.generation[held], self.process_group[held]
        steps, times, gradients = self.steps[held], self.buckets[held], self.gradients[held]
        self._allocate(rows, buckets, parameters)
        row = step % rows
        self.step[row], self.generation[row], self.process_group[row] = step, generation, group
        self.steps[row] = steps
        self.buckets[row, : times.shape[1]] = times
        self.gradients[row, : gradients.shape[1]] = gradients

    def _claim(self, steps: _Array) -> None:
        """Empties the rows that hold older steps than those that come."""
        row = steps % len(self.step)
        new = self.step[row] != steps
        row, steps = row[new], steps[new]
        self.step[row] = steps
        self.process_group[row] = -1
        for table in (self.generation, self.steps, self.buckets, self.gradients):
            table[row] = 0
