"""What the browser asks of the kernel: commands by their type, queued on any thread and carried out on one."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

__all__ = ["Commands"]

Command = dict[str, Any]


class Commands:
    """Messages of the front end, ``{"type": ..., ...}``, and who carries them out."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._known: dict[str, Callable[[Command], None]] = {}

    def on(self, kind: str, action: Callable[[Command], None]) -> None:
        """From now on `action` gets the commands of this type; it must return at once."""
        self._known[kind] = action

    def put(self, command: Command) -> None:
        """Takes a command, on any thread."""
        self._queue.put(command)

    def obey(self) -> bool:
        """Carries out what came since the last time; returns whether anything did. Unknown types are left out."""
        asked = False
        while not self._queue.empty():
            asked = True
            command = self._queue.get()
            action = self._known.get(str(command.get("type")))
            if action is not None:
                action(command)
        return asked
