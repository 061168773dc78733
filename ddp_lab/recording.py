"""Python face of the process's event recorder: on and off, marks, statistics, drain, save.

Events are fixed-size facts (`ddp_lab.protocol.events.DTYPE`) that C++ writes into a bounded ring; readers take them by
cursor. Data that does not fit into an event (a mark's name, the parameters of a bucket) is a *description*: a
JSON-able dict, appended once and read by a cursor of its own. An event may refer to a description that was
appended before it, so a reader drains first the events, then the descriptions, and passes on the latter first.

A description is kept as long as the object that it describes (its owner, a model) exists and there is no newer bucket
layout of it, and then until no event recorded in that time is in the ring; forever without an owner. So a process may
build any number of models. Short-lived ones, which describe one step each, or report that the owner of a layout no
longer exists, are replaced by newer ones: the newest 2,048 are kept.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed

from . import native
from .protocol import archive
from .protocol.archive import Archive
from .protocol.events import DTYPE, Kind

__all__ = [
    "RecordingStatistics",
    "describe",
    "describe_fleeting",
    "descriptions",
    "disable",
    "drain",
    "enable",
    "enabled",
    "log",
    "mark",
    "place",
    "save",
    "statistics",
    "suspended",
]

_C = native.load()

before_descriptions: list[Callable[[], None]] = []
"""Called before descriptions are read, by the thread that reads them: they append what C++ has found since."""


@dataclass
class _Description:
    text: str  # JSON
    position: int
    first: int  # the sequence number of the first event that may refer to it
    end: int | None = None  # of the first that can't: its owner no longer exists, or has a newer description
    reducer: int | None = None  # the model whose bucket layout it is
    owner: weakref.finalize[..., object] | None = None  # notices when its owner is destroyed

    def is_needed(self, recorded: int, capacity: int) -> bool:
        """Whether an event that may refer to it can be in the ring or still be recorded; `recorded`: events so far."""
        return self.end is None or (self.first < self.end and recorded < self.end + capacity)


_descriptions: list[_Description] = []
_FLEETING_KEPT = 2048
_fleeting: collections.deque[tuple[int, str]] = collections.deque(maxlen=_FLEETING_KEPT)  # position, JSON
# Models that no longer exist, not yet reported.
_gone: collections.deque[int] = collections.deque(maxlen=_FLEETING_KEPT)
_next_position = 0
_describing = threading.Lock()
_marks: dict[str, int] = {}  # name -> index
_marks_lock = threading.Lock()
_places: dict[tuple[object, ...], int] = {}  # what a place is -> index
_MOST_PLACES = 4_096


@dataclass(frozen=True)
class RecordingStatistics:
    """Statistics of the process's recorder.

    Attributes:
        recorded: events since the process started.
        dropped: events overwritten before the furthest reader drained them.
        capacity: events that the ring holds.
        enabled: whether events are being recorded.
        ns_per_event: measured cost of one event in nanoseconds; None if it was not requested.
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
    """Records nothing while the block runs, on any thread: for steps that are not part of the training."""
    before = enabled()
    disable()
    try:
        yield
    finally:
        if before:
            enable()


def mark(name: str) -> None:
    """Records that this point of the program was reached, e.g. ``mark("epoch")``; shown on the timeline.

    Each different name is kept for the life of the process, so use few.
    """
    if not enabled():
        return
    with _marks_lock:
        if name not in _marks:
            describe({"type": "mark", "index": len(_marks), "name": name})
            _marks[name] = len(_marks)
    _C.record(Kind.MARK, parameter=_marks[name])


def place(part: str, name: str, **details: Any) -> int:
    """The index of a place: a part of the program that the main thread spends time in, outside of models.

    Args:
        part: key of `ddp_lab.analysis.step_parts.PARTS`.
        name: which one of that part, for example a line of the program.
        details: further JSON-able facts about it.

    Returns:
        The field ``parameter`` of its events. A process has at most 4,096 places; all further ones are one.
    """
    key = (part, name, *details.items())
    with _marks_lock:
        if key not in _places and len(_places) >= _MOST_PLACES:
            part, name, details, key = "code", "further places", {}, ()
        if key not in _places:
            describe({"type": "place", "index": len(_places), "part": part, "name": name, **details})
            _places[key] = len(_places)
        return _places[key]


def log(name: str, value: float) -> None:
    """Records a number of the training at this moment, e.g. ``log("loss", loss.item())``; shown in the overview.

    It costs some microseconds, once per step is enough. Of many that are not read yet the newest are kept.

    Args:
        name: what the number is; use few names.
        value: a Python number, or a tensor with one element (on a GPU reading it waits for the device).

    Raises:
        TypeError: `value` is not a number.
    """
    if enabled():
        describe_fleeting({"type": "value", "name": str(name), "value": float(value), "at_ns": time.monotonic_ns()})


def statistics(*, measure: bool = False) -> RecordingStatistics:
    """How many events were recorded and dropped, and with `measure` the cost of one here.

    Args:
        measure: time 180,000 events on a recorder of its own (about 10 ms) to fill in `ns_per_event`.
    """
    recorded, dropped, capacity, on = _C.recorder_statistics()
    return RecordingStatistics(recorded, dropped, capacity, on, _C.measure_ns_per_event() if measure else None)


def drain(cursor: int) -> tuple[npt.NDArray[np.void], int, int]:
    """Takes the events from sequence number `cursor` on; never blocks threads that record.

    Stops at a gap (events overwritten while this call read); everything has been read when a call returns
    neither events nor drops.

    Args:
        cursor: 0, or the third value of the previous call.

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
        description: the dict, which is copied.
        owner: the object that it describes, e.g. a model. The description is kept as long as it exists, and then
            as long as the ring holds events of that time; forever without an owner.

    Raises:
        TypeError: it contains something that JSON can't express.
    """
    global _next_position
    text = json.dumps(description)
    _C.leave(text)
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
                one.owner.detach()  # it would keep the text as long as the owner exists
        _descriptions[:] = [*needed, made]
    if owner is not None:
        made.owner = weakref.finalize(owner, _owner_is_gone, made)
        made.owner.atexit = False


def describe_fleeting(description: dict[str, Any], *, leave: bool = False) -> None:
    """Appends a description that newer ones of this kind may replace: the newest 2,048 are kept.

    Args:
        description: the dict, which is copied.
        leave: whether it says why a rank dies, so that `ddp-lab run` can read it after the process has ended.

    Raises:
        TypeError: it contains something that JSON can't express.
    """
    global _next_position
    text = json.dumps(description)
    if leave:
        _C.leave(text)
    with _describing:
        _fleeting.append((_next_position, text))
        _next_position += 1


def _owner_is_gone(description: _Description) -> None:
    """Takes no lock: garbage collection can run anywhere, also while this thread holds one."""
    if description.end is None:
        description.end = statistics().recorded
        if description.reducer is not None:
            _gone.append(description.reducer)


def _describe_gone() -> None:
    """Appends a description for each model that no longer exists. Needs the lock."""
    global _next_position
    while _gone:
        _fleeting.append((_next_position, json.dumps({"type": "gone", "reducer": _gone.popleft()})))
        _next_position += 1


def descriptions(cursor: int) -> tuple[list[dict[str, Any]], int]:
    """The descriptions from position `cursor` on that are still kept, and the next cursor."""
    for describe_new in before_descriptions:
        describe_new()
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
    """Writes the events in the ring to an ``.npz`` file, for a script without a notebook.

    Every rank writes a file of its own, in the format of `ddp_lab.Timeline.save`; without a process group it is rank 0.

    Returns:
        The path written.
    """
    parts, dropped = _held()
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if in_group else 0
    return archive.write(
        Path(path),
        Archive(
            [(rank, part) for part in parts],
            [(rank, description) for description in descriptions(0)[0]],
            {rank: {"dropped": dropped, "status": {}}},
        ),
    )


def _held() -> tuple[list[npt.NDArray[np.void]], int]:
    """Events recorded so far, in parts separated by gaps, and how many were overwritten."""
    end = statistics().recorded
    parts, total_dropped, cursor = [], 0, 0
    while cursor < end:
        events, dropped, following = drain(cursor)
        if following == cursor:  # a thread is just recording it
            break
        parts.append(events)
        total_dropped += dropped
        cursor = following
    return parts, total_dropped
