"""What a rank does, from the stack of its main thread as another process sees it.

[Note: seen from outside]
A stack names functions and lines, not arguments. So a call's group and number are known only if the rank's Flight
Recorder was read, too: the oldest collective that has not ended is the one that a waiting rank waits in.
A thread that waits in C++ is still in a Python line: of torch, or of the user, such as ``work.wait()`` or
``loss.item()``, which waits for a GPU and so for its collectives. With the C++ frames below it, it is told apart from
one that computes there.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence

from .flight_recorder import group_description
from .flights import Flight, GroupFlights
from .rank_state import Call, Examined, Place
from .torch_calls import COLLECTIVE, entered, is_library

__all__ = ["examined_stack", "place"]

_NATIVE_WAIT = re.compile(r"\b(c10d|gloo|nccl)\w*::|\bncclComm|cu(da)?(Stream|Event|Device|Ctx)Synchronize")
_PEERS = re.compile(r"\b(c10d|gloo|nccl)")
_WAITING_LINE = re.compile(r"\.(wait|item|cpu|tolist|numpy|synchronize)\(")
_BACKWARD = "_engine_run_backward"


def place(file: str, line: int, function: str) -> Place:
    """A frame, with the text of its line if the file is on this host; else the function stands for it."""
    text = linecache.getline(file, line).strip() or f"{function}()"
    return Place(file, line, function, text, users=not is_library(file))


def examined_stack(
    rank: int,
    stack: Sequence[Place],
    flights: Sequence[GroupFlights] = (),
    native: Iterable[str] | None = None,
    blocked: bool = True,
) -> Examined:
    """The rank.

    Args:
        rank: its rank.
        stack: of its main thread, innermost first.
        flights: its collectives, if its recorder was read.
        native: names of the C++ functions below the innermost Python line; None if unknown.
        blocked: whether the thread has not run for a while.
    """
    call = _call(stack, flights, None if native is None else list(native)) if blocked else None
    return Examined(
        rank, "running", stack=tuple(stack), call=call, flights=tuple(flights), last_cell="job", runs="script"
    )


def _call(stack: Sequence[Place], flights: Sequence[GroupFlights], native: list[str] | None) -> Call | None:
    """What the thread waits in; None if it waits for no other rank."""
    found = entered((one.file, one.function.rpartition(".")[2]) for one in stack)
    if found is not None:
        return _known(found.name, found.kind, flights)
    if not stack:
        return None
    waits = any(map(_NATIVE_WAIT.search, native)) if native is not None else _seems_to_wait(stack, flights)
    return _known(_wait_in_words(stack, native), COLLECTIVE, flights) if waits else None


def _seems_to_wait(stack: Sequence[Place], flights: Sequence[GroupFlights]) -> bool:
    """Without C++ frames: whether a collective is in flight and the line is one that waits."""
    within = stack[0].file.replace("\\", "/")
    return any(one.open for one in flights) and ("/torch/" in within or bool(_WAITING_LINE.search(stack[0].text)))


def _wait_in_words(stack: Sequence[Place], native: list[str] | None) -> str:
    peers = native is None or any(map(_PEERS.search, native))
    if any(one.function == _BACKWARD for one in stack):
        return "the backward, for its collectives"
    if any("/torch/distributed/fsdp/" in one.file for one in stack):
        return "a collective of FSDP"
    return "a collective" if peers else "a synchronisation with its GPU"


def _known(name: str, kind: str, flights: Sequence[GroupFlights]) -> Call:
    """A call with what the recorder knows of the collective that it waits in."""
    flying = [(group.open[0], group) for group in flights if group.open]
    if kind != COLLECTIVE or not flying:
        return Call(name, kind, "", (), "", 0, None, None)
    flight, group = max(flying, key=_seconds)
    made = flight.collective
    return Call(
        name=made.name if " " in name or made.name in name else name,
        kind=kind,
        group=group.group,
        ranks=group.ranks,
        what=made.what,
        bytes=made.bytes,
        peer=None,
        sequence=flight.number,
        description=group_description(group.description),
    )


def _seconds(pair: tuple[Flight, GroupFlights]) -> float:
    return pair[0].seconds
