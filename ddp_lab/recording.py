"""Python face of the process's event recorder: on and off, marks, statistics, drain, save.

Events are fixed-size facts (`ddp_lab.protocol.events.DTYPE`) that C++ writes into a bounded ring; readers take them by
cursor. What does not fit into an event (a mark's name, which parameters a bucket holds) is a *description*: a
JSON-able dict, appended once and read by a cursor of its own. An event may refer to a description that was
appended before it, so a reader drains first the events, then the descriptions, and hands the latter on first.

[Note: how long a description is kept]
As long as the object that it describes lives (its owner, a model) and no newer assignment of it came, and then until no
event that was recorded in that time is in the ring any more; for ever without an owner. So a process may build models
without end. Fleeting ones, which describe one step each, or say that the owner of an assignment is gone, give
way to newer ones: the newest 2,048 are kept.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed

from . import native
from .files import replacing
from .protocol.events import DTYPE, SCHEMA_VERSION, Kind

__all__ = [
    "RecordingStatistics",
    "describe",
    "describe_fleeting",
    "descriptions",
    "disable",
    "drain",
    "enable",
    "enabled",
    "mark",
    "save",
    "statistics",
    "suspended",
]

_C = native.load()


@dataclass
class _Description:
    text: str  # JSON
    position: int
    first: int  # the sequence number of the first event that may refer to it
    end: int | None = None  # of the first one that can't: its owner is gone, or it was described anew
    reducer: int | None = None  # whose assignment it is
    owner: weakref.finalize[..., object] | None = None  # says when its owner is gone

    def is_needed(self, recorded: int, capacity: int) -> bool:
        """Whether an event that may refer to it can be in the ring or come; `recorded`: events so far."""
        return self.end is None or (self.first < self.end and recorded < self.end + capacity)


_descriptions: list[_Description] = []
_FLEETING_KEPT = 2048
_fleeting: collections.deque[tuple[int, str]] = collections.deque(maxlen=_FLEETING_KEPT)  # position, JSON
_gone: collections.deque[int] = collections.deque(maxlen=_FLEETING_KEPT)  # models that are gone; nobody was told yet
_next_position = 0
_describing = threading.Lock()
_marks: dict[str, int] = {}  # name -> index
_marks_lock = threading.Lock()


@dataclass(frozen=True)
class RecordingStatistics:
    """What the process's recorder did so far.

    Attributes:
        recorded: events since the process started.
        dropped: events overwritten before the furthest reader drained them.
        capacity: events that the ring holds.
        enabled: whether events are being recorded.
        ns_per_event: measured cost of one event in nanoseconds; None if it was not asked for.
    """

    recorded: int
    dropped: int
    capacity: int
    enabled: bool
    ns_per_event: float | None = None


def enable() -> None:
    """Records events from now on (recording is on when the process starts)."""
    _C.recorder_enable(True)


def disable() -> None:
    """Records nothing until `enable`: an event then costs one branch."""
    _C.recorder_enable(False)


def enabled() -> bool:
    """Whether events are being recorded."""
    return bool(_C.recorder_enabled())


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Records nothing while the block runs, on any thread: steps that are no part of the training stay out."""
    before = enabled()
    disable()
    try:
        yield
    finally:
        if before:
            enable()


def mark(name: str) -> None:
    """Records that this point of the program was reached, e.g. ``mark("epoch")``; shown on the timeline.

    Each different name is kept for the life of the process: let there be few.
    """
    if not enabled():
        return
    with _marks_lock:
        if name not in _marks:
            describe({"type": "mark", "index": len(_marks), "name": name})
            _marks[name] = len(_marks)
    _C.record(Kind.MARK, parameter=_marks[name])


def statistics(*, measure: bool = False) -> RecordingStatistics:
    """How many events were recorded and dropped, and where `measure` is set what one costs here.

    Args:
        measure: time 180,000 events on a recorder of its own (about 10 ms) to fill in `ns_per_event`.
    """
    recorded, dropped, capacity, on = _C.recorder_statistics()
    return RecordingStatistics(recorded, dropped, capacity, on, _C.measure_ns_per_event() if measure else None)


def drain(cursor: int) -> tuple[npt.NDArray[np.void], int, int]:
    """Takes the events from sequence number `cursor` on; never blocks who records them.

    Stops at a gap (events overwritten while this call read); everything has been read when a call returns
    neither events nor drops.

    Args:
        cursor: 0, or the third value that the previous call returned.

    Returns:
        The events (shape ``[n]``, dtype `ddp_lab.protocol.events.DTYPE`, consecutive sequence numbers), how many
        between `cursor` and the first of them were overwritten, and the next cursor.

    Raises:
        IndexError: `cursor` lies beyond the last event.
    """
    raw, dropped, following = _C.drain(cursor)
    return raw.view(DTYPE), dropped, following


def describe(description: dict[str, Any], owner: object | None = None) -> None:
    """Appends a description: a JSON-able dict with a ``"type"``.

    Args:
        description: is copied.
        owner: what it describes, a model say; see [Note: how long a description is kept].

    Raises:
        TypeError: it holds something that JSON can't express.
    """
    global _next_position
    text = json.dumps(description)
    now = statistics()
    with _describing:
        made = _Description(text, _next_position, now.recorded)
        if description.get("type") == "assignment":
            made.reducer = description.get("reducer")
            for one in _descriptions:
                if one.reducer == made.reducer and one.end is None:
                    one.end = now.recorded
        _next_position += 1
        needed = []
        for one in _descriptions:
            if one.is_needed(now.recorded, now.capacity):
                needed.append(one)
            elif one.owner is not None:
                one.owner.detach()  # it would hold the text as long as the owner lives
        _descriptions[:] = [*needed, made]
    if owner is not None:
        made.owner = weakref.finalize(owner, _owner_is_gone, made)
        made.owner.atexit = False


def describe_fleeting(description: dict[str, Any]) -> None:
    """Appends a description that newer ones of this kind may push out, see [Note: how long a description is kept].

    Raises:
        TypeError: it holds something that JSON can't express.
    """
    global _next_position
    text = json.dumps(description)
    with _describing:
        _fleeting.append((_next_position, text))
        _next_position += 1


def _owner_is_gone(description: _Description) -> None:
    """Takes no lock: garbage is collected anywhere, also where this thread holds one."""
    if description.end is None:
        description.end = statistics().recorded
        if description.reducer is not None:
            _gone.append(description.reducer)


def _describe_gone() -> None:
    """Appends a description of each model that has gone. Needs the lock."""
    global _next_position
    while _gone:
        _fleeting.append((_next_position, json.dumps({"type": "gone", "reducer": _gone.popleft()})))
        _next_position += 1


def descriptions(cursor: int) -> tuple[list[dict[str, Any]], int]:
    """The descriptions from position `cursor` on that are still kept, and the next cursor."""
    with _describing:
        _describe_gone()
        found = [(one.position, one.text) for one in _descriptions if one.position >= cursor]
        for position, text in reversed(_fleeting):
            if position < cursor:
                break
            found.append((position, text))
        following = _next_position
    return [json.loads(text) for _, text in sorted(found)], following


def save(path: str | os.PathLike[str]) -> Path:
    """Writes the events that the ring still holds to an ``.npz`` file, for a script without a notebook.

    Every rank writes a file of its own. Arrays in the file: ``events`` (`ddp_lab.protocol.events.DTYPE`),
    ``descriptions`` (JSON list), ``rank`` (0 without a process group), ``dropped`` (older events that were
    overwritten), ``schema_version``.

    Returns:
        The path written.
    """
    parts, dropped = _held()
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    target = Path(path)
    with replacing(target) as file:
        np.savez(
            file,
            events=np.concatenate([np.empty(0, DTYPE), *parts]),
            descriptions=np.array(json.dumps(descriptions(0)[0])),
            rank=np.array(torch.distributed.get_rank() if in_group else 0),
            dropped=np.array(dropped),
            schema_version=np.array(SCHEMA_VERSION),
        )
    return target


def _held() -> tuple[list[npt.NDArray[np.void]], int]:
    """Events recorded up to now, in as many parts as there were gaps, and how many were overwritten."""
    end = statistics().recorded
    parts, total_dropped, cursor = [], 0, 0
    while cursor < end:
        events, dropped, following = drain(cursor)
        if following == cursor:  # a thread is in the middle of recording it
            break
        parts.append(events)
        total_dropped += dropped
        cursor = following
    return parts, total_dropped
