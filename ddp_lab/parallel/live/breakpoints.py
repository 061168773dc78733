"""Pausing a model's backward at chosen points, inspecting it meanwhile, and resuming.

[Note: timeouts during a pause]
While one rank is paused the others wait in their collectives, which fail after the timeout of their group (30 minutes
for Gloo, 10 for NCCL, unless the program sets another). So as long as there are breakpoints the timeouts of all groups
of all ranks are a week. A collective that was started before, in the step in which the breakpoints were set, keeps its
timeout. The user's own waits with a timeout still expire.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ...protocol.messages import BucketStage, Pause, Stage
from ..core.process_groups import set_timeout, timeout_of
from ..core.synchronizer import GradientSynchronizer
from .injected import index_of

__all__ = ["POINTS", "Breakpoints", "hold_timeouts", "restore_timeouts"]

POINTS = ("gradient_ready", "bucket_ready", "launched", "reduced")
_STOPS = {
    "breakpoint": (),
    "event": POINTS,
    "bucket": ("bucket_ready",),
}
_HELD = timedelta(days=7)
_STATES = ("pending", "ready", "launched", "reduced")

_lock = threading.Lock()
_before: list[tuple[Any, timedelta]] = []  # backends whose timeouts are raised, and their former ones


class Breakpoints:
    """The breakpoints of one model's backwards on this rank. Usable from any thread, also during a pause."""

    def __init__(self, sync: GradientSynchronizer) -> None:
        self._sync = sync
        self._lock = threading.Lock()
        self._armed = False
        self._why = ""  # why they were removed
        self._seen: int | None = None  # the step in which that was first reported

    def set(self, points: Sequence[str], parameters: Sequence[str] = (), buckets: Sequence[int] = ()) -> None:
        """Pauses the model's backwards at these points from now on.

        Args:
            points: of `POINTS`.
            parameters: those whose gradients pause; empty: all.
            buckets: those that pause at the other points; empty: all.

        Raises:
            ValueError: there is no such point, parameter or bucket.
        """
        sync = self._sync
        chosen = [index_of(sync, name) for name in parameters]
        for bucket in buckets:
            if not 0 <= bucket < len(sync.assignment):
                raise ValueError(f"there is no bucket {bucket}: the model has {len(sync.assignment)}")
        sync.reducer.set_breakpoints(_mask(points), chosen, list(buckets))
        with self._lock:
            self._why, self._seen, self._armed = "", None, bool(points)

    def clear(self) -> None:
        """Removes the breakpoints; a current pause ends."""
        self._sync.reducer.clear_breakpoints()
        with self._lock:
            self._armed = False

    def go_on(self, until: str) -> bool:
        """Ends a pause; returns whether there was one.

        Args:
            until: ``"breakpoint"``: the next one that was set; ``"event"``: the next event; ``"bucket"``: the next
                bucket is ready.
        """
        if until not in _STOPS:
            raise ValueError(f"until={until!r}: choose one of {', '.join(_STOPS)}")
        return bool(self._sync.reducer.go_on(_mask(_STOPS[until])))

    def end(self, why: str) -> None:
        """Ends a pause with an exception and removes the breakpoints. Never blocks."""
        self._sync.reducer.end_pause(f"A backward that was paused at a breakpoint was aborted: {why}.")
        with self._lock:
            if self._armed:
                self._armed, self._why, self._seen = False, why, None

    def stage(self) -> Stage:
        """The state of the model's backward on this rank."""
        sync = self._sync
        found = sync.reducer.stage()
        missing = set(found["missing"])
        buckets = []
        for members, (_, ready, launched, reduced) in zip(sync.assignment, found["buckets"], strict=False):
            absent = [index for index in members if index in missing]
            state = _STATES[sum(moment != 0 for moment in (ready, launched, reduced))]
            missed = tuple(sync.trained.names[index] for index in absent)
            buckets.append(BucketStage(state, len(members) - len(absent), len(members), missed))
        return Stage(
            step=found["step"],
            generation=found["generation"],
            in_flight=found["in_flight"],
            finalizing=found["finalizing"],
            paused=self._paused(found["pause"]),
            armed=self._armed,
            ended=self._why_ended(found["step"]),
            buckets=tuple(buckets),
        )

    def _why_ended(self, step: int) -> str:
        """Why breakpoints were removed, until the model trains again."""
        with self._lock:
            if self._why and self._seen is None:
                self._seen = step
            elif self._seen is not None and self._seen != step:
                self._why, self._seen = "", None
            return self._why

    def _paused(self, pause: tuple[int, int, int, int] | None) -> Pause | None:
        if pause is None:
            return None
        point, index, _, since = pause
        if POINTS[point] == "gradient_ready":
            return Pause(POINTS[point], since, parameter=self._sync.trained.names[index])
        return Pause(POINTS[point], since, bucket=index)


def _mask(points: Sequence[str]) -> list[bool]:
    for point in points:
        if point not in POINTS:
            raise ValueError(f"there is no breakpoint {point!r}: choose from {', '.join(POINTS)}")
    return [point in points for point in POINTS]


def hold_timeouts() -> None:
    """Raises the timeouts of all groups of this rank. See [Note: timeouts during a pause]."""
    with _lock:
        known = {id(backend) for backend, _ in _before}
        for group in list(c10d._world.pg_map):
            for device in group._device_types:
                backend = group._get_backend(torch.device(device))
                timeout = timeout_of(backend)
                if timeout is None or id(backend) in known:
                    continue
                known.add(id(backend))
                _before.append((backend, timeout))
                set_timeout(backend, _HELD)


def restore_timeouts() -> None:
    """Restores the groups' own timeouts."""
    with _lock:
        for backend, timeout in _before:
            set_timeout(backend, timeout)
        _before.clear()
