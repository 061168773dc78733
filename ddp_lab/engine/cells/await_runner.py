"""Rank side: drives the coroutine of a cell with top-level `await` while the engine's own loop is running.

An engine handles a request inside its event loop, which can't be entered a second time. Cells get a loop of their
own; it lives as long as the process, so that tasks and connections of one cell are still there in the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

_loop: asyncio.AbstractEventLoop | None = None
_interrupted = False


def was_interrupted() -> bool:
    """Whether the last coroutine was cancelled by an interrupt, which its CancelledError represents."""
    return _interrupted


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs `coroutine` to its end on the cells' own loop and returns its value.

    An interrupt cancels the coroutine where it waits, and waits for its clean-up. A coroutine that reports its own
    failure, as a cell's does, then returns that report; else the interrupt passes on.
    """
    global _interrupted, _loop
    _interrupted = False
    with _outer_loop_set_aside():
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
        task = _loop.create_task(coroutine)
        try:
            return _loop.run_until_complete(task)
        except BaseException:
            if task.done():
                raise
            _interrupted = True
            task.cancel()
            try:
                result = _loop.run_until_complete(task)
            except asyncio.CancelledError:
                result = None
            if getattr(result, "success", True):
                raise
            return result


@contextlib.contextmanager
def _outer_loop_set_aside() -> Iterator[None]:
    """Makes asyncio forget the running loop of this thread for a while.

    asyncio refuses to nest loops only through these thread-local marks; the outer loop is blocked in this very call
    anyway, as it is for every cell.
    """
    try:
        outer = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task(outer)
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)
