"""Which pages show a widget now: each says so every few seconds, and one that was closed no longer does."""

from __future__ import annotations

import threading
import time

__all__ = ["Pages"]

_PAGE_SECONDS = 20.0  # after its last word a page counts as closed


class Pages:
    """Pages by their ids; any thread."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # page -> when it counts as closed

    def note(self, page: str, seen: bool) -> None:
        """Notes whether a page shows the widget. On the thread that got the page's message."""
        # On the main thread messages wait while a cell runs, and so does the page's word that it is still there.
        waits = threading.current_thread() is threading.main_thread()
        known = {**self._until}
        known.pop(page, None)
        if seen:
            known[page] = float("inf") if waits else time.monotonic() + _PAGE_SECONDS
        self._until = known

    @property
    def any(self) -> bool:
        """Whether a page shows it."""
        now = time.monotonic()
        return any(until > now for until in self._until.values())
