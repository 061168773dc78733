"""Sleeping on purpose, so that it can be ended from outside: a rank that must stop does not sleep on."""

from __future__ import annotations

import threading
import time

__all__ = ["nap", "nap_until", "wake_all"]

_changed = threading.Condition()
_wakes = 0


def nap(seconds: float) -> bool:
    """Sleeps without the GIL; returns False if it was woken before `seconds` were over."""
    return nap_until(time.monotonic() + seconds)


def nap_until(moment: float) -> bool:
    """The same, until a moment of the monotonic clock."""
    with _changed:
        before = _wakes
        return not _changed.wait_for(lambda: _wakes != before, max(0.0, moment - time.monotonic()))


def wake_all() -> None:
    """Ends every nap of this process. Any thread."""
    global _wakes
    with _changed:
        _wakes += 1
        _changed.notify_all()
