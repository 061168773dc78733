"""One cell as ipyparallel messages, below ipyparallel's documented surface.

[Note: one request]
Each rank gets one apply request that calls `ddp_lab.engine.cells.cell.run` there by name. The callbacks for its
messages hang on the request's future before the request is sent (`message_future_hook`), so none is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ipyparallel import Reference
from ipyparallel.serialize import pack_apply_message

from ...control.records import CellText
from ...errors import ClusterError
from ...protocol.entry_points import CALL, RUN_CELL, RankFunction
from .stdin import QUESTION

__all__ = ["send"]

_RUN = Reference(RUN_CELL.expression)
_OUTPUTS = {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error", QUESTION}


def send(
    client: Any,
    engines: Mapping[int, int],
    cell: Mapping[str, Any],
    code: str | CellText | RankFunction,
    take: Callable[[int, str, Any], None],
) -> None:
    """Sends a cell to every rank and returns at once. See [Note: one request].

    Args:
        client: the ipyparallel client.
        engines: rank -> engine id.
        cell: ``id``, ``label``, ``sources`` (as `ddp_lab.engine.cells.cell.run`), ``after`` (id -> label of cells that
            the ranks may still run; if one fails, a rank does not run this one), and for a function ``args``,
            ``kwargs``.
        code: a cell's text, or a function that ranks import.
        take: called in the client's I/O thread with rank, kind and content: ``"begun"``, of each output its IOPub type
            and content, ``"reply"`` with the rank's report (or an exception), and ``"idle"`` after the last output.

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


def _pack(cell: Mapping[str, Any], code: str | CellText | RankFunction) -> Any:
    head: dict[str, Any] = {"id": cell["id"], "label": cell["label"], "sources": cell["sources"]}
    if not isinstance(code, RankFunction) or code == CALL:  # push and pull follow a failed cell, too
        head["after"] = cell["after"]
    if isinstance(code, str):
        code = CellText(code)
    if isinstance(code, CellText):
        return pack_apply_message(_RUN, ({**head, "code": code.text, "first_line": code.first_line},), {})
    function = Reference(code.expression)
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
