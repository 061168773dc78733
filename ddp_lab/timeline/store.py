"""Raw events of all ranks in the order of arrival: appended in batches, bounded, read by cursor."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["EventStore"]


_MOST_STEPS = 1 << 62


class EventStore:
    """Keeps the newest batches of at most `max_events` events; a cursor counts the events ever appended.

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
