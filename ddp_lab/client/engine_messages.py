"""One cell as ipyparallel messages: the only module below ipyparallel's documented surface.

[Note: one request]
Each rank gets one apply request that calls `ddp_lab.engine.cell.run` there by name. The callbacks for its messages
hang on the request's future before the request is sent (`message_future_hook`), so none is missed.
"""

from __future__ import annotations

import linecache
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ipyparallel import Reference
from ipyparallel.serialize import can, pack_apply_message

from ..errors import ClusterError

__all__ = ["RankFunction", "check_sendable", "send"]

_RUN = Reference("__import__('ddp_lab.engine.cell', fromlist=['run']).run")
_OUTPUTS = {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error"}


@dataclass(frozen=True)
class RankFunction:
    """A function that the ranks import: by name, so that the client need not.

    Attributes:
        module: the module's full name.
        name: the function's name in it.
    """

    module: str
    name: str


def send(
    client: Any,
    engines: Mapping[int, int],
    cell: Mapping[str, Any],
    code: str | Callable[..., Any] | RankFunction,
    take: Callable[[int, str, Any], None],
) -> None:
    """Sends a cell to every rank and returns at once. See [Note: one request].

    Args:
        client: the ipyparallel client.
        engines: rank -> engine id.
        cell: ``id``, ``label``, and ``args`` and ``kwargs`` for a function.
        code: a cell's text or a function.
        take: called in the client's I/O thread with rank, kind and content: ``"begun"`` once the rank takes the cell
            up, of each output its IOPub type and content, ``"reply"`` with the rank's report (or an exception), and
            ``"idle"`` after the last output.

    Raises:
        ClusterError: a rank has no engine any more; nothing was sent.
    """
    idents = {}
    for rank, engine in engines.items():
        uuid = client._engines.get(engine)
        if uuid is None:
            raise ClusterError(f"rank {rank} has no engine: it died or was never started")
        idents[rank] = uuid.encode()
    buffers = _pack(cell, code)
    for rank, ident in idents.items():
        client._send(
            client._mux_stream,
            "apply_request",
            buffers=buffers,
            ident=ident,
            metadata={},
            track_outstanding=True,
            message_future_hook=partial(_attach, rank, take),
        )


def check_sendable(value: Any) -> None:
    """Raises what pickling `value` for a rank raises."""
    pickle.dumps(can(value))


def _pack(cell: Mapping[str, Any], code: str | Callable[..., Any] | RankFunction) -> Any:
    head: dict[str, Any] = {"id": cell["id"], "label": cell["label"]}
    if isinstance(code, str):
        return pack_apply_message(_RUN, ({**head, "code": code},), {})
    function: Any = code
    if isinstance(code, RankFunction):
        function = Reference(f"__import__({code.module!r}, fromlist=['_']).{code.name}")
    else:
        head["sources"] = _sources_of(code)
    return pack_apply_message(_RUN, (head, function, cell["args"], cell["kwargs"]), {})


def _attach(rank: int, take: Callable[[int, str, Any], None], future: Any) -> None:
    """Hangs the callbacks on a request that has not been sent yet."""
    metadata = future.output.metadata

    def on_message(message: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind in _OUTPUTS:
            # ipyparallel keeps a copy of all outputs, joined anew for each message: quadratic for a chatty cell.
            metadata["stdout"] = metadata["stderr"] = ""
            metadata["outputs"] = []
            take(rank, kind, message["content"])
        elif kind == "status" and message["content"]["execution_state"] == "busy":
            take(rank, "begun", None)

    future.iopub_callbacks.append(on_message)
    future.output.add_done_callback(lambda _: take(rank, "idle", None))
    future.add_done_callback(lambda done: take(rank, "reply", done.result()))


def _sources_of(function: Callable[..., Any]) -> dict[str, str]:
    """The text of the file a function was written in, if ranks can't read it themselves."""
    code = getattr(function, "__code__", None)
    if code is None or os.path.exists(code.co_filename):
        return {}
    lines = linecache.getlines(code.co_filename)
    return {code.co_filename: "".join(lines)} if lines else {}
