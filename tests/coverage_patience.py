"""A plugin of coverage.py: a process that is killed from Python saves what was measured before.

Most ranks end by SIGKILL, at a restart, say, or half a second after they were asked to end, in which a busy machine
has not saved it. So who was asked to end is given some seconds, and any other process is told to save by a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coverage

_ENDING_SECONDS = 8.0  # less than a client waits for its fork server
_SAVING_SECONDS = 0.5  # tests wait for ends by then; whose main thread is in C code does not answer
_SAVE = signal.SIGRTMAX

_asked: dict[int, float] = {}  # pid of who was asked to end -> when


def coverage_init(registry: Any, options: Any) -> None:
    """Called by coverage.py in every process that it measures."""
    if not isinstance(os.kill, _Patient) and threading.current_thread() is threading.main_thread():
        os.kill, os.killpg = _Patient(os.kill), _Patient(os.killpg)
        signal.signal(_SAVE, _save)


class _Patient:
    """Sends a signal as `send` does; SIGKILL once the process has saved, or has had its time."""

    def __init__(self, send: Callable[[int, int], None]) -> None:
        self._send = send

    def __call__(self, pid: int, number: int, /) -> None:
        if number == signal.SIGTERM:
            _asked[pid] = time.monotonic()
        elif number == signal.SIGKILL and pid == os.getpid():
            _save()
        elif number == signal.SIGKILL and pid in _asked:
            _wait_until(_asked.pop(pid) + _ENDING_SECONDS, lambda: _ended(pid))
        elif number == signal.SIGKILL and _listens(pid):
            with contextlib.suppress(ProcessLookupError):
                self._send(pid, _SAVE)
                _wait_until(time.monotonic() + _SAVING_SECONDS, lambda: not _listens(pid))
        self._send(pid, number)


def _save(*_: Any) -> None:
    measure = coverage.Coverage.current()
    if measure is not None:
        measure.save()
    signal.signal(_SAVE, signal.SIG_IGN)  # which tells the one who waits


def _wait_until(deadline: float, true: Callable[[], bool]) -> None:
    while time.monotonic() < deadline and not true():
        time.sleep(0.005)


def _ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it is nobody's child here, or was waited for
        return True


def _listens(pid: int) -> bool:
    """Whether a process that has not ended has a handler for the signal."""
    try:
        _, caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")
    except (OSError, ValueError):
        return False
    return bool(int(caught.split()[0], 16) >> (_SAVE - 1) & 1)
