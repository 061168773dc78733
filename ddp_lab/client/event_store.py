"""Raw events of all ranks in the order of arrival: appended in batches, bounded, read by cursor."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

__all__ = ["EventStore"]


class EventStore:
    """Keeps the newest batches of at most `max_events` events; a cursor counts the events ever appended."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._chunks: list[tuple[int, npt.NDArray[np.void]]] = []
        self._starts: list[int] = []
        self._first = 0  # index of the oldest chunk that is kept
        self.next = 0

    @property
    def start(self) -> int:
        """Cursor of the oldest event that is kept."""
        return self._starts[self._first] if self._first < len(self._starts) else self.next

    def append(self, rank: int, events: npt.NDArray[np.void]) -> None:
        """Adds events of one rank and forgets the oldest batches."""
        if not len(events):
            return
        self._chunks.append((rank, events))
        self._starts.append(self.next)
        self.next += len(events)
        while self.next - self.start > self._max_events and self._first < len(self._chunks) - 1:
            self._chunks[self._first] = (-1, events[:0])
            self._first += 1
        if self._first > 1_000 and self._first > len(self._chunks) // 2:
            del self._chunks[: self._first], self._starts[: self._first]
            self._first = 0

    def since(self, cursor: int) -> tuple[list[tuple[int, npt.NDArray[np.void]]], int, int]:
        """Events from `cursor` on as (rank, events) pairs, the next cursor, and how many in between are gone.

        Raises:
            ValueError: `cursor` lies beyond the last event.
        """
        if not 0 <= cursor <= self.next:
            raise ValueError(f"cursor {cursor} is not between 0 and {self.next}")
        gone = max(0, self.start - cursor)
        cursor += gone
        index = max(self._first, bisect_right(self._starts, cursor) - 1)
        found = self._chunks[index:]
        if found and cursor > self._starts[index]:
            rank, events = found[0]
            found[0] = (rank, events[cursor - self._starts[index] :])
        return [pair for pair in found if len(pair[1])], self.next, gone
