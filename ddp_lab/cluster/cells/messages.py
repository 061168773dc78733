"""One cell as ipyparallel messages, below ipyparallel's documented surface, and answers to `input()` on ranks.

[Note: one request]
Each rank gets one apply request that calls `ddp_lab.engine.cells.cell.run` there by name. The callbacks for its
messages are attached to the request's future before the request is sent (`message_future_hook`), so none is missed.
"""

from __future__ import annotations

import getpass
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ipyparallel import Reference
from ipyparallel.serialize import pack_apply_message

from ...control.interrupts import let_through
from ...control.records import CellText
from ...errors import ClusterError
from ...protocol.entry_points import CALL, RUN_CELL, RankFunction

QUESTION = "ddp_lab_question"
_NOBODY = "input() can't be answered because the notebook does not wait for this cell: run it without --no-wait"
_NO_INPUT = "the notebook could not ask for input: {error}"

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
        ClusterError: a rank no longer has an engine; nothing was sent.
    """
    idents = {}
    for rank, engine in engines.items():
        uuid = client._engines.get(engine)
        if uuid is None:
            raise ClusterError(
                f"rank {rank} has no process: it failed or never started (`%cluster rejoin` starts a new one)"
            )
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
    if not isinstance(code, RankFunction) or code == CALL:  # push and pull also run after a failed cell
        head["after"] = cell["after"]
    if isinstance(code, str):
        code = CellText(code)
    if isinstance(code, CellText):
        return pack_apply_message(_RUN, ({**head, "code": code.text, "first_line": code.first_line},), {})
    function = Reference(code.expression)
    return pack_apply_message(_RUN, (head, function, cell["args"], cell["kwargs"]), {})


def _attach(rank: int, take: Callable[[int, str, Any], None], future: Any) -> None:
    """Attaches the callbacks to a request that has not been sent yet."""
    metadata = future.output.metadata

    def on_message(message: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind in _OUTPUTS:
            # ipyparallel keeps a copy of all outputs, joined again for each message: quadratic for much output.
            metadata["stdout"] = metadata["stderr"] = ""
            metadata["outputs"] = []
            take(rank, kind, message["content"])
        elif kind == "status" and message["content"]["execution_state"] == "busy":
            take(rank, "begun", None)

    future.iopub_callbacks.append(on_message)
    future.output.add_done_callback(lambda _: take(rank, "idle", None))
    future.add_done_callback(lambda done: take(rank, "reply", done.result()))


class Answers:
    """Answers `input()` and `breakpoint()` on ranks from the notebook's own input line, one question at a time.

    Holds the questions of one cell run; owned by the thread that shows its outputs.

    Args:
        send: sends a rank the answer: ``number`` of the question, and ``text`` or ``error``.
    """

    def __init__(self, send: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._send = send
        self._asked: deque[tuple[int, Mapping[str, Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, rank: int, question: Mapping[str, Any]) -> None:
        """Takes a question: ``number``, ``prompt``, ``secret``."""
        self._asked.append((rank, question))

    def ask(self) -> None:
        """Asks the user the first question and sends what was typed; on the main thread.

        Raises:
            KeyboardInterrupt: the user pressed interrupt instead.
        """
        rank, question = self._asked.popleft()
        read = getpass.getpass if question["secret"] else input
        try:
            with let_through():
                text = read(f"rank {rank} │ {question['prompt']}")
        except (EOFError, OSError, RuntimeError) as error:  # a front end without input raises a RuntimeError
            self._answer(rank, question, error=_NO_INPUT.format(error=error or type(error).__name__))
        else:
            self._answer(rank, question, text=text)

    def refuse(self) -> None:
        """Answers all questions with an error: there is no user to ask."""
        while self._asked:
            self._answer(*self._asked.popleft(), error=_NOBODY)

    def _answer(self, rank: int, question: Mapping[str, Any], **answer: str) -> None:
        self._send(rank, {"op": "answer", "number": question["number"], **answer})
