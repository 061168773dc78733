"""What a timeline keeps of a run in bounded memory: the newest events, and the time of every step since the start.

[Note: a bounded history]
A row holds the same number of neighbouring steps as every other, at first one. When the rows are full, that number
doubles: so a history of any length has at most 16,384 rows, whose smallest and largest times are exact. The median of a
row of several steps is the median of those of the rows that were joined.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import Breakdown

__all__ = ["COLUMNS", "EventStore", "StepHistory"]

COLUMNS = ("first", "last", "began", "low", "median", "high", "exposed")
"""First and last step; seconds when the first began; smallest, median and largest ms of a step, median ms exposed."""
_MOST_STEPS = 1 << 62
_MOST_ROWS = 1 << 14
_FIRST, _LAST, _BEGAN, _LOW, _MEDIAN, _HIGH, _EXPOSED = range(len(COLUMNS))
_Rows = npt.NDArray[np.float64]


class StepHistory:
    """The steps of one model that all its ranks have completed.

    Args:
        most_rows: how many rows it may have.
    """

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self._most, self._every = most_rows, 1
        self._rows: _Rows = np.zeros((0, len(COLUMNS)))

    @property
    def last(self) -> int:
        """The newest step, -1 if there is none."""
        return int(self._rows[-1, _LAST]) if len(self._rows) else -1

    def extend(self, steps: Breakdown, began_ns: npt.NDArray[np.int64]) -> None:
        """Appends steps later than `last`.

        Args:
            steps: their times.
            began_ns: when each began.
        """
        total = steps.total
        parts = (steps.step, steps.step, began_ns / 1e9, total, total, total, steps.exposed)
        added = np.concatenate([self._rows[-1:], np.stack(parts, axis=1)])
        self._rows = np.concatenate([self._rows[:-1], _joined(added, self._every)])
        while len(self._rows) > self._most:
            self._every *= 2
            self._rows = _joined(self._rows, self._every)

    def blocks(self, most: int) -> _Rows:
        """Returns the history in at most so many blocks of neighbouring steps.

        Returns:
            Shape ``[blocks, len(COLUMNS)]``.
        """
        rows = self._rows  # another thread may replace them
        if len(rows) <= most:
            return rows
        begin, end = rows[0, _FIRST], rows[-1, _LAST] + 1
        return _joined(rows, -(-(end - begin) // most), begin)


def _joined(rows: _Rows, every: float, begin: float = 0.0) -> _Rows:
    """Joins neighbours whose first steps are in the same piece of so many steps, counted from `begin`."""
    cuts = np.flatnonzero(np.diff((rows[:, _FIRST] - begin) // every)) + 1
    if len(cuts) + 1 >= len(rows):
        return rows
    firsts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
    made: _Rows = rows[firsts]
    made[:, _LAST] = rows[ends - 1, _LAST]
    group = np.repeat(np.arange(len(firsts)), ends - firsts)
    for column in (_MEDIAN, _EXPOSED):
        ordered = rows[np.lexsort((rows[:, column], group)), column]
        made[:, column] = (ordered[(firsts + ends - 1) // 2] + ordered[(firsts + ends) // 2]) / 2
    made[:, _LOW] = np.minimum.reduceat(rows[:, _LOW], firsts)
    made[:, _HIGH] = np.maximum.reduceat(rows[:, _HIGH], firsts)
    return made


class EventStore:
    """Raw events of all ranks in the order of arrival: appended in batches, bounded, read by cursor.

    It keeps the newest batches of at most `max_events` events; a cursor counts the events ever appended.

    Args:
        max_events: how many of the newest events are kept.
        thinned: how many older ones are kept at most: all events of some steps, whose numbers are multiples of a power
            of two, as in [Note: old steps are thinned].
    """

    def __init__(self, max_events: int, thinned: int = 0) -> None:
        self._max_events, self._max_thinned = max_events, thinned
        self._thinned: list[tuple[int, npt.NDArray[np.void]]] = []
        self._thinned_events, self._every = 0, 1
        self._chunks: deque[tuple[int, int, npt.NDArray[np.void]]] = deque()  # cursor of the first, rank, events
        self.next = 0

    @property
    def start(self) -> int:
        """Cursor of the oldest event that is kept."""
        return self._chunks[0][0] if self._chunks else self.next

    def append(self, rank: int, events: npt.NDArray[np.void]) -> None:
        """Adds events of one rank and deletes the oldest batches."""
        if not len(events):
            return
        self._chunks.append((self.next, rank, events))
        self.next += len(events)
        while self.next - self.start > self._max_events and len(self._chunks) > 1:
            _, of, oldest = self._chunks.popleft()
            self._thin(of, oldest)

    def thinned(self) -> list[tuple[int, npt.NDArray[np.void]]]:
        """The kept events before `start`, as (rank, events) pairs in the order of arrival."""
        return list(self._thinned)

    def _thin(self, rank: int, events: npt.NDArray[np.void]) -> None:
        if not self._max_thinned:
            return
        kept_events = self._of_kept_steps(events)
        if not len(kept_events):
            return
        self._thinned.append((rank, kept_events))
        self._thinned_events += len(kept_events)
        while self._thinned_events > self._max_thinned and self._every < _MOST_STEPS:
            self._every *= 2
            kept = [(of, self._of_kept_steps(one)) for of, one in self._thinned]
            self._thinned = [(of, one) for of, one in kept if len(one)]
            self._thinned_events = sum(len(one) for _, one in self._thinned)
        if self._thinned_events > self._max_thinned:  # all of them are of one step
            self._thinned, self._thinned_events = [], 0

    def _of_kept_steps(self, events: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        chosen: npt.NDArray[np.void] = events[(events["step"] >= 0) & (events["step"] % self._every == 0)]
        return chosen  # a copy: it does not hold on to the batch

    def since(self, cursor: int) -> tuple[list[tuple[int, npt.NDArray[np.void]]], int, int]:
        """Events from `cursor` on as (rank, events) pairs, the next cursor, and how many in between were deleted.

        Raises:
            ValueError: `cursor` lies beyond the last event.
        """
        if not 0 <= cursor <= self.next:
            raise ValueError(f"cursor {cursor} is not between 0 and {self.next}")
        gone = max(0, self.start - cursor)
        cursor += gone
        found: list[tuple[int, npt.NDArray[np.void]]] = []
        for start, rank, events in reversed(self._chunks):  # what is new is at the end, and little
            if start + len(events) <= cursor:
                break
            found.append((rank, events[max(0, cursor - start) :]))
        return found[::-1], self.next, gone
