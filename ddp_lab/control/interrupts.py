"""Defers the user's interrupt where it would leave something half done.

[Note: interrupts of the client]
Python raises KeyboardInterrupt between any two steps of the main thread: when a cell has been sent to rank 0 and not
yet to rank 1, when a message has been taken from a queue and not yet shown, or when a lock has been taken and the
`with` that releases it has not been entered. So code that sends cells, collects answers or uses such a lock runs
with `interrupts_deferred`: an interrupt waits until the block ends, or until a place that lets it through. Such
places are where a thread only waits, so an interrupt is delayed by at most one of these steps.

The state belongs to the main thread, the only one in which Python runs signal handlers; others defer nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Held:
    """The interrupts that the main thread defers."""

    depth = 0
    handler: Callable[[int, FrameType | None], Any] | None = None  # the handler to call when nothing is deferred
    pending = False


_held = _Held()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defers interrupts until the block ends, or until `interrupts_allowed` in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _held.depth == 0:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # ignored, or not Python's
            yield
            return
        _held.handler, _held.pending = handler, False
        signal.signal(signal.SIGINT, _note)
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1
        if _held.depth == 0 and _held.handler is not None:
            signal.signal(signal.SIGINT, _held.handler)
            _raise_pending()


@contextlib.contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Inside `interrupts_deferred`: a deferred interrupt is raised now, others at once, until the block ends."""
    if _held.depth == 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _held.handler)
    try:
        _raise_pending()
        yield
    finally:
        signal.signal(signal.SIGINT, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _held.pending = True


def _raise_pending() -> None:
    pending, _held.pending = _held.pending, False
    if pending and _held.handler is not None:
        _held.handler(signal.SIGINT, sys._getframe())
