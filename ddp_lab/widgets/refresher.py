"""What keeps a widget alive while a cell blocks the kernel's main thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Refresher", "receive_while_busy"]

_log = logging.getLogger(__name__)


def receive_while_busy(widget: Any) -> bool:
    """Lets the front end's messages reach `widget` while a cell runs; returns whether anything had to be done.

    ipykernel ≥ 7.1 handles the messages of widgets on a thread of their own (a subshell). 7.4.0 sends the answers to
    what the kernel published to the thread that published last: the main one, which is busy. This asks for the
    front end's own choice again. Elsewhere nothing changes, and messages wait for the end of the cell.
    """
    comm = getattr(widget, "comm", None)
    if comm is None or not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


class Refresher:
    """A daemon thread that calls `action` at most `rate` times a second, as long as the action's object lives.

    The action returns whether there was something to do; without work for two seconds it is called five times a
    second. Between two calls there is a pause, however long they take. An exception ends the thread and goes to
    `failed`.
    """

    _IDLE_SECONDS = 0.2
    _IDLE_AFTER = 2.0

    def __init__(self, action: Callable[[], bool], failed: Callable[[BaseException], None], rate: float) -> None:
        self._action = weakref.WeakMethod(action)
        self._failed = weakref.WeakMethod(failed)
        self._interval = 1 / rate
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread if it does not run."""
        if not self.running:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="ddp_lab dashboard", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Calls the action soon, also when it was idle."""
        self._wake.set()

    def stop(self, timeout: float = 2.0) -> None:
        """Ends the thread and waits for it (unless it is the caller)."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        calm, due = 0.0, time.monotonic()
        while not self._stopped.is_set():
            action = self._action()
            if action is None:
                return
            try:
                busy = action()
            except Exception as error:  # noqa: BLE001 - a thread's top: stored and shown by `failed`
                _log.exception("the dashboard stopped refreshing")
                failed = self._failed()
                if failed is not None:
                    failed(error)
                return
            del action
            calm = 0.0 if busy else calm + self._interval
            idle = calm > self._IDLE_AFTER
            # Also when woken it keeps its distance: many wake-ups are one refresh.
            if not idle:
                now = time.monotonic()
                due = max(due + self._interval, now + self._interval / 4)
                self._stopped.wait(due - now)
            else:
                self._wake.wait(self._IDLE_SECONDS)
            self._wake.clear()
