"""Which functions of torch make a rank wait for others, told by the frames of a thread: its own, or those that a tool
read from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["COLLECTIVE", "GROUP", "POINT_TO_POINT", "Entered", "entered", "is_library"]

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
