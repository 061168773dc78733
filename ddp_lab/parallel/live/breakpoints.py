"""Pausing a model's backward at chosen points, looking at it meanwhile, and going on.

[Note: timeouts during a pause]
While one rank pauses the others wait in their collectives, and after the timeout of their group (30 minutes for Gloo,
10 for NCCL, unless the program says otherwise) these fail. So as long as there are breakpoints the timeouts of all
groups of all ranks are a week. A collective that was started before keeps the timeout that it was started with: that
can only be one of the step in which the breakpoints were set. Waits of the user's own with a timeout still run out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..core.timeouts import set_timeout, timeout_of
from ..monitoring.inspection import live_models
from . import interruptible_sleep
from .fault_injection import index_of

if TYPE_CHECKING:
    from ..core.model_state import ModelState

__all__ = ["POINTS", "clear", "go_on", "hold_timeouts", "release", "restore_timeouts", "set_breakpoints", "stage"]

POINTS = ("gradient_ready", "bucket_ready", "launched", "reduced")
_STOPS = {
    "breakpoint": (),
    "event": POINTS,
    "bucket": ("bucket_ready",),
}
_HELD = timedelta(days=7)
_STATES = ("pending", "ready", "launched", "reduced")

_lock = threading.Lock()
_before: list[tuple[Any, timedelta]] = []  # backends whose timeouts are raised, and what they were
_armed: weakref.WeakSet[ModelState] = weakref.WeakSet()  # models that have breakpoints here
# Why theirs were taken away, and in which step that was seen first.
_ended: weakref.WeakKeyDictionary[ModelState, tuple[str, int | None]] = weakref.WeakKeyDictionary()


def set_breakpoints(
    model: ModelState, points: Sequence[str], parameters: Sequence[str] = (), buckets: Sequence[int] = ()
) -> None:
    """Pauses the model's backwards on this rank at these points from now on. Any thread.

    Args:
        model: the model.
        points: of `POINTS`.
        parameters: of whose gradients; empty: all.
        buckets: which buckets the other points are about; empty: all.

    Raises:
        ValueError: there is no such point, parameter or bucket.
    """
    chosen = [index_of(model, name) for name in parameters]
    for bucket in buckets:
        if not 0 <= bucket < len(model._assignment):
            raise ValueError(f"there is no bucket {bucket}: the model has {len(model._assignment)}")
    model.reducer.set_breakpoints(_mask(points), chosen, list(buckets))
    with _lock:
        _ended.pop(model, None)
        (_armed.add if points else _armed.discard)(model)


def clear(model: ModelState) -> None:
    """Takes the breakpoints away; a pause that is under way ends. Any thread."""
    model.reducer.clear_breakpoints()
    with _lock:
        _armed.discard(model)


def go_on(model: ModelState, until: str) -> bool:
    """Ends a pause; returns whether there was one.

    Args:
        model: the model.
        until: ``"breakpoint"``: the next of those that were set; ``"event"``: whatever happens next;
            ``"bucket"``: the next bucket is ready.
    """
    if until not in _STOPS:
        raise ValueError(f"until={until!r}: choose one of {', '.join(_STOPS)}")
    return bool(model.reducer.go_on(_mask(_STOPS[until])))


def _mask(points: Sequence[str]) -> list[bool]:
    for point in points:
        if point not in POINTS:
            raise ValueError(f"there is no point {point!r}: choose of {', '.join(POINTS)}")
    return [point in points for point in POINTS]


def stage(model: ModelState) -> dict[str, Any]:
    """Where the model's backward stands on this rank, as JSON can hold it. Any thread, also during a pause.

    Returns:
        ``step``, ``generation``, ``in_flight`` (a backward is under way), ``finalizing`` (it waits for collectives),
        ``paused`` (None or a dict: ``point``, ``parameter`` or ``bucket``, ``since_ns``), ``armed`` (it has
        breakpoints), ``ended`` (why they were taken away, if nobody asked for it; until it trains on), and ``buckets``:
        for each its ``state``, how many gradients have ``arrived`` of how many (``of``), and the names of the
        ``missing`` ones.
    """
    found = model.reducer.stage()
    missing = set(found["missing"])
    buckets = []
    for members, (_, ready, launched, reduced) in zip(model._assignment, found["buckets"], strict=False):
        absent = [index for index in members if index in missing]
        buckets.append(
            {
                "state": _STATES[sum(moment != 0 for moment in (ready, launched, reduced))],
                "arrived": len(members) - len(absent),
                "of": len(members),
                "missing": [model._names[index] for index in absent],
            }
        )
    return {
        "step": found["step"],
        "generation": found["generation"],
        "in_flight": found["in_flight"],
        "finalizing": found["finalizing"],
        "paused": _paused(model, found["pause"]),
        "armed": model in _armed,
        "ended": _why_ended(model, found["step"]),
        "buckets": buckets,
    }


def _why_ended(model: ModelState, step: int) -> str:
    """Why breakpoints were taken away, until the model trains on."""
    with _lock:
        why, seen = _ended.get(model, ("", None))
        if why and seen is None:
            _ended[model] = (why, step)
        elif seen is not None and seen != step:
            del _ended[model]
            return ""
        return why


def _paused(model: ModelState, pause: tuple[int, int, int, int] | None) -> dict[str, Any] | None:
    if pause is None:
        return None
    point, index, _, since = pause
    made: dict[str, Any] = {"point": POINTS[point], "since_ns": since}
    if POINTS[point] == "gradient_ready":
        made["parameter"] = model._names[index]
    else:
        made["bucket"] = index
    return made


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
    """Gives the groups their own timeouts back."""
    with _lock:
        for backend, timeout in _before:
            set_timeout(backend, timeout)
        _before.clear()


def release(why: str) -> None:
    """This rank is to stop: ends pauses (with an exception) and sleeps of faults, and takes all breakpoints away.

    Any thread; never blocks.
    """
    for model in live_models():
        reducer = getattr(model, "reducer", None)
        if reducer is not None:
            reducer.end_pause(f"A backward that paused at a breakpoint was ended there: {why}.")
        with _lock:
            if model in _armed:
                _armed.discard(model)
                _ended[model] = (why, None)
    interruptible_sleep.wake_all()
    restore_timeouts()
