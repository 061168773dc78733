"""Replays a recorded timeline: its events are added to another timeline, at their times."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ...protocol.events import DTYPE, Batch
from ..event_tables import TimelineModel

__all__ = ["Player"]

_Timeline = TypeVar("_Timeline", bound=TimelineModel)
_LONGEST_PAUSE_NS = 1_000_000_000  # longer ones, between two cells say, are played as one second
_TOLD_SECONDS = 0.2


class Player(Generic[_Timeline]):
    """The player of `Timeline.replay`. It has no thread of its own: its widget calls `advance` repeatedly.

    Attributes:
        timeline: the part that has been replayed so far; it starts again after `seek` to an earlier time.
        seconds: duration of the whole replay at speed 1.
    """

    def __init__(self, recorded: _Timeline, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Copies the current recording, and plays it from the beginning.

        Args:
            recorded: the recording; it is not changed.
            speed: 0.1 takes ten times as long as the recorded run.
            clock: returns seconds.

        Raises:
            ValueError: the speed is not positive, or nothing was recorded.
        """
        saved = recorded.events()
        if not any(len(events) for _, events in saved.chunks):
            raise ValueError("there is nothing to replay: no event was recorded")
        self.timeline: _Timeline = type(recorded)()
        self.timeline.recorded = True
        self._lock = threading.RLock()
        self._clock = clock
        self._status = {rank: about["status"] for rank, about in saved.ranks.items()}
        self._dropped = {rank: int(about["dropped"]) for rank, about in saved.ranks.items()}
        self._ranks, self._events = _in_order(saved.chunks)
        gaps = np.diff(self._events["host_ns"], prepend=self._events["host_ns"][:1])
        self._due = np.cumsum(np.clip(gaps, 0, _LONGEST_PAUSE_NS)) / 1e9
        self._described = _placed(self._ranks, self._events, saved.described)
        self.seconds = float(self._due[-1])
        self._speed, self._playing, self._position = _checked(speed), True, 0.0
        self._at = clock()
        self._told: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._begin()
        self.advance()

    @property
    def playing(self) -> bool:
        """Whether it is playing; False after `pause` and at the end."""
        with self._lock:  # not over before another thread has handed on the last events
            return self._playing

    @property
    def position(self) -> float:
        """Position in the recording, in seconds."""
        with self._lock:
            return self._position

    @property
    def speed(self) -> float:
        """Seconds of the recording that pass in one second."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        with self._lock:
            self.advance()
            self._speed = _checked(speed)

    def play(self) -> None:
        """Continues; from the beginning if the end was reached."""
        with self._lock:
            if self._position >= self.seconds:
                self.seek(0.0)
            self._at, self._playing = self._clock(), True

    def pause(self) -> None:
        """Pauses at the current position."""
        with self._lock:
            self.advance()
            self._playing = False

    def seek(self, seconds: float) -> None:
        """Moves to a position in the recording, forwards or backwards."""
        with self._lock:
            self.advance()
            position = min(max(float(seconds), 0.0), self.seconds)
            if position < self._position:
                self._begin()
            self._position = position
            self._feed()

    def advance(self) -> bool:
        """Adds the events that are due; returns whether it is playing."""
        with self._lock:
            now = self._clock()
            if self._playing:
                self._position = min(self._position + (now - self._at) * self._speed, self.seconds)
                self._playing = self._position < self.seconds
                self._feed()
            self._at = now
            return self._playing

    def obey(self, asked: dict[str, Any]) -> None:
        """Runs a request of the browser: ``playing``, ``speed``, ``position``, each if present."""
        if "speed" in asked:
            self.speed = float(asked["speed"])
        if "position" in asked:
            self.seek(float(asked["position"]))
        if "playing" in asked:
            self.play() if asked["playing"] else self.pause()
        self._told = (-math.inf, {})

    def told(self) -> dict[str, Any]:
        """The state for the browser: new at most five times per second."""
        with self._lock:
            at, told = self._told
            if self._at - at >= _TOLD_SECONDS or told.get("playing") != self._playing:
                told = {"playing": self._playing, "speed": self._speed, "seconds": self.seconds}
                self._told = (self._at, {**told, "position": self._position})
            return self._told[1]

    def _begin(self) -> None:
        """Clears the timeline, except for the ranks' status."""
        self._fed = self._says = 0
        self._counts = dict(self._dropped)  # where a rank's first event is numbered so, as many are counted as lost
        self.timeline.clear()
        for rank, status in self._status.items():
            self.timeline.set_status(rank, {**status, "session": 0})

    def _feed(self) -> None:
        until = int(np.searchsorted(self._due, self._position, side="right"))
        while self._says < len(self._described) and self._described[self._says][0] < until:
            _, rank, description = self._described[self._says]
            self.timeline.describe(rank, {**description, "session": 0})
            self._says += 1
        of, new = self._ranks[self._fed : until], self._events[self._fed : until]
        for rank in np.unique(of).tolist():
            events = new[of == rank]
            self.timeline.extend(Batch(rank, 0, self._counts[rank], 0, events))
            self._counts[rank] += len(events)
        self._fed = until


def _placed(
    ranks: npt.NDArray[np.int64], events: npt.NDArray[np.void], described: Sequence[tuple[int, dict[str, Any]]]
) -> list[tuple[int, int, dict[str, Any]]]:
    """The event before which each description is added, its rank, and the description, in the order of these events.

    For buckets it is the first event that needs the description; for a step, its last; otherwise the first of all.

    Args:
        ranks: whose events they are.
        events: in the order of time.
        described: (rank, description) in the order of arrival.
    """

    @functools.cache
    def of_model(rank: int, reducer: int) -> tuple[dict[int, int], dict[int, int]]:
        """The beginning of each generation, and the end of each step."""
        own = np.flatnonzero((ranks == rank) & (events["reducer"] == reducer))
        generations, first = np.unique(events["generation"][own], return_index=True)
        steps, last = np.unique(events["step"][own][::-1], return_index=True)
        begins = dict(zip(generations.tolist(), own[first].tolist(), strict=True))
        return begins, dict(zip(steps.tolist(), own[::-1][last].tolist(), strict=True))

    def place(rank: int, description: dict[str, Any]) -> int:
        if "reducer" not in description:
            return 0
        generations, steps = of_model(rank, int(description["reducer"]))
        if description.get("type") == "assignment":
            return generations.get(description["generation"], 0)
        return steps.get(description.get("step", -1), 0)

    return sorted(((place(rank, one), rank, one) for rank, one in described), key=lambda one: one[0])


def _in_order(
    chunks: list[tuple[int, npt.NDArray[np.void]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """All events in the order of time, and their ranks; the events of a rank stay in the order of recording."""
    ranks = np.repeat([rank for rank, _ in chunks], [len(events) for _, events in chunks])
    events: npt.NDArray[np.void] = np.concatenate([np.empty(0, DTYPE), *(events for _, events in chunks)])
    at = events["host_ns"].copy()
    for rank in np.unique(ranks):
        at[ranks == rank] = np.maximum.accumulate(at[ranks == rank])
    order = np.argsort(at, kind="stable")
    return ranks[order], events[order]


def _checked(speed: float) -> float:
    if not 0 < speed < math.inf:
        raise ValueError(f"speed must be positive, got {speed} (1: the recorded speed; 0.1: ten times slower)")
    return float(speed)
