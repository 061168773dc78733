"""Journals as ranks of `ddp-lab run` write them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_lab.protocol import events, journal

__all__ = ["batch", "opening", "written"]


def opening(**changes: Any) -> list[bytes]:
    """The first message of a journal."""
    fields = {"rank": 0, "run": "r", "restart": 0, "world_size": 1, "host": "h", "clock": "c", "pid": 1, "session": 1}
    return journal.json_frames("journal", **{"schema_version": events.SCHEMA_VERSION, **fields, **changes})


def batch(made: events.Batch) -> list[bytes]:
    """A message with events."""
    return [bytes(frame) for frame in events.encode(made)]


def written(messages: Sequence[Sequence[bytes]]) -> bytes:
    """A file with these messages."""
    return journal.MAGIC + b"".join(journal.pack(frames, number) for number, frames in enumerate(messages))
