"""What a thread's frames say of a rank: which function of torch makes it wait for others, whose code is the user's, and
what a rank does whose stack another process has read.

[Note: seen from outside]
A stack names functions and lines, not arguments. So a call's group and number are known only if the rank's Flight
Recorder was read, too: the oldest collective that has not ended is the one that a waiting rank waits in.
A thread that waits in C++ is still in a Python line: of torch, or of the user, such as ``work.wait()`` or
``loss.item()``, which waits for a GPU and so for its collectives. With the C++ frames below it, it is told apart from
one that computes there.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from .collectives_in_flight import GroupFlights, group_description
from .snapshot import Call, Place, RankSnapshot

__all__ = ["COLLECTIVE", "GROUP", "POINT_TO_POINT", "Entered", "entered", "is_library", "is_users", "place"]
__all__ += ["snapshot_of_stack"]

COLLECTIVE, POINT_TO_POINT, GROUP = "collective", "point to point", "group"
_KINDS = {
    **dict.fromkeys(
        (
            *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced"),
            *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
            *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
            *("scatter_object_list", "all_gather_single", "reduce_scatter_single"),
        ),
        COLLECTIVE,
    ),
    **dict.fromkeys(("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list"), POINT_TO_POINT),
    **dict.fromkeys(("init_process_group", "new_group", "new_subgroups", "split_group"), GROUP),
}
_FILE = "torch/distributed/distributed_c10d.py"
_LIBRARY = re.compile(
    r"^<(?!cell |ipython-input|stdin)|/(site|dist)-packages/|/lib/python\d[\d.]*/"
    r"|/ddp_lab/(comm|engine|launch|parallel)/"  # installed in place
)
_OURS = __file__.rpartition("diagnosis")[0]
_BELOW_CELLS = ("IPython", "ipykernel", "ipyparallel", "tornado", "torch")  # wherever they are installed
_FOLDERS = (
    *(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib")),
    *(
        os.path.join(os.path.dirname(found.origin), "")
        for name in _BELOW_CELLS
        if (found := find_spec(name)) and found.origin
    ),
)
_NATIVE_WAIT = re.compile(r"\b(c10d|gloo|nccl)\w*::|\bncclComm|cu(da)?(Stream|Event|Device|Ctx)Synchronize")
_PEERS = re.compile(r"\b(c10d|gloo|nccl)")
_WAITING_LINE = re.compile(r"\.(wait|item|cpu|tolist|numpy|synchronize)\(")
_BACKWARD = "_engine_run_backward"


class Entered(NamedTuple):
    """A call of torch.distributed that a thread has not returned from.

    Attributes:
        place: of its frame, counted from the innermost one.
        name: of the function.
        kind: `COLLECTIVE`, `POINT_TO_POINT` or `GROUP` (one is being created).
    """

    place: int
    name: str
    kind: str


def entered(frames: Iterable[tuple[str, str]]) -> Entered | None:
    """The outermost such call.

    Args:
        frames: file and function of each frame, innermost first.
    """
    found = None
    for place, (file, function) in enumerate(frames):
        kind = _KINDS.get(function)
        if kind is not None and file.endswith(_FILE):
            found = Entered(place, function, kind)
    return found


def is_library(file: str) -> bool:
    """Whether a file belongs to a library, judged by its path alone, as on another machine."""
    return bool(_LIBRARY.search(file))


def is_users(file: str) -> bool:
    """Whether code of this file is the user's own: a cell's or a script's, not a library's."""
    return file.startswith("<cell ") or not file.startswith((_OURS, *_FOLDERS, "<"))


def place(file: str, line: int, function: str) -> Place:
    """A frame, with the text of its line if the file is on this host; else the function stands for it."""
    text = linecache.getline(file, line).strip() or f"{function}()"
    return Place(file, line, function, text, users=not is_library(file))


def snapshot_of_stack(
    rank: int,
    stack: Sequence[Place],
    flights: Sequence[GroupFlights] = (),
    native: Iterable[str] | None = None,
    blocked: bool = True,
) -> RankSnapshot:
    """The rank.

    Args:
        rank: its rank.
        stack: of its main thread, innermost first.
        flights: its collectives, if its recorder was read.
        native: names of the C++ functions below the innermost Python line; None if unknown.
        blocked: whether the thread has not run for a while.
    """
    call = _call(stack, flights, None if native is None else list(native)) if blocked else None
    return RankSnapshot(
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
    flight, group = max(flying, key=lambda pair: pair[0].seconds)
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
