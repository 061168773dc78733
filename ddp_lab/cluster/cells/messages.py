"""Cells on their way to the ranks and back, answers to `input()` on ranks, and the messages of cells' widgets.

See [Note: one wire] in `ddp_lab.engine.cells.delivery`.
"""

from __future__ import annotations

import getpass
import importlib
import json
import pickle
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...control.interrupts import held_back, let_through
from ...control.records import CellText
from ...control.wire import Wire
from ...protocol.entry_points import CALL, RankFunction

QUESTION = "ddp_lab_question"
_NOBODY = "input() can't be answered because the notebook does not wait for this cell: run it without --no-wait"
_NO_INPUT = "the notebook could not ask for input: {error}"

Take = Callable[[int, str, Sequence[bytes]], None]


class CellMessages:
    """Sends cells to ranks, and gives what they say of each cell to whoever waits for it.

    Attributes:
        wire: to the ranks.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._takers: dict[str, Take] = {}  # by cell; the wire's thread only reads it
        self._comms = CommRelay(lambda rank, message, frames: wire.send([rank], message, frames))
        wire.on_cell(self._on_cell)

    def send(self, ranks: Iterable[int], cell: Mapping[str, Any], code: str | CellText | RankFunction) -> None:
        """Sends a cell to ranks and returns at once.

        Args:
            ranks: to whom.
            cell: ``id``, ``label``, ``sources`` (as `ddp_lab.engine.cells.cell.run`), ``after`` (id -> label of cells
                that the ranks may still run; if one fails, a rank does not run this one), and for a function ``args``,
                ``kwargs``.
            code: a cell's text, or a function that ranks import.
        """
        head = {"id": cell["id"], "label": cell["label"], "sources": cell["sources"]}
        if not isinstance(code, RankFunction) or code == CALL:  # push and pull also run after a failed cell
            head["after"] = cell["after"]
        if isinstance(code, RankFunction):
            message = {"op": "cell", "cell": head, "function": [code.module, code.name]}
            self.wire.send(ranks, message, _arguments(cell["args"], cell["kwargs"]))
            return
        text = code if isinstance(code, CellText) else CellText(code)
        head |= {"code": text.text, "first_line": text.first_line, "above": text.above}
        self.wire.send(ranks, {"op": "cell", "cell": head})

    def call(self, calls: Mapping[int, tuple[RankFunction, Sequence[Any]]]) -> Calls:
        """Lets ranks call a function each, between two cells; returns at once.

        Args:
            calls: rank -> the function and its arguments. A rank that has not connected gets it when it does.
        """
        made = Calls(f"call-{uuid.uuid4().hex}")
        with held_back():  # all or none: ranks wait for each other
            self.listen(made.call_id, made.take)
            for rank, (function, args) in calls.items():
                message = {"op": "call", "call": made.call_id, "function": [function.module, function.name]}
                self.wire.send([rank], message, _arguments(args, {}))
        return made

    def listen(self, cell_id: str, take: Take) -> None:
        """From now on calls `take`, on the wire's thread, for what ranks say of a cell.

        Args:
            cell_id: the cell's id.
            take: called with rank, kind and data; see `content`.
        """
        with held_back():
            self._takers[cell_id] = take

    def forget(self, cell_id: str) -> None:
        """Drops what ranks still say of a cell."""
        with held_back():
            self._takers.pop(cell_id, None)

    def _on_cell(self, rank: int, cell_id: str, kind: str, frames: Sequence[bytes]) -> None:
        take = self._comms.take if kind.startswith("comm_") else self._takers.get(cell_id)
        if take is not None:
            take(rank, kind, frames)


class Calls:
    """The answers of ranks that call a function each; filled on the wire's thread.

    Attributes:
        values: rank -> what the function returned.
        errors: rank -> ``name``, ``message`` and ``traceback`` of what it raised.
    """

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.values: dict[int, Any] = {}
        self.errors: dict[int, dict[str, str]] = {}

    def take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """Takes a rank's answer."""
        said = content(kind, frames)
        if "outside" in said:
            self.errors[rank] = said["outside"]
        else:
            self.values[rank] = pickle.loads(said["blob"])


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bytes]:
    buffers: list[pickle.PickleBuffer] = []
    called = pickle.dumps((tuple(args), dict(kwargs)), protocol=5, buffer_callback=buffers.append)
    return [called, *map(bytes, buffers)]


def content(kind: str, frames: Sequence[bytes]) -> dict[str, Any]:
    """What a rank says: nothing for ``"begun"``; for ``"reply"`` the report; else an output's content."""
    if not frames:
        return {}
    said: dict[str, Any] = json.loads(frames[0])
    if kind == "reply":
        said["blob"] = b"".join(frames[1:]) or None
    return said


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


class CommRelay:
    """Shows widgets that cells make on ranks in the notebook; used by the wire's thread.

    A widget talks to its page through a comm of its kernel. The page knows only the notebook's kernel. So each comm
    that a rank opens gets a proxy there, which passes messages on, both ways.

    Args:
        send: sends a rank a message with data.
    """

    def __init__(self, send: Callable[[int, Mapping[str, Any], Sequence[bytes]], None]) -> None:
        self._send = send

    def take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """Passes a message of a rank on to the page; drops it if there is no notebook.

        Args:
            rank: who says it.
            kind: ``"comm_open"``, ``"comm_msg"`` or ``"comm_close"``.
            frames: content and metadata as JSON, and buffers.
        """
        ipython = sys.modules.get("IPython")  # a notebook has it
        kernel = None if ipython is None else getattr(ipython.get_ipython(), "kernel", None)
        if kernel is None:
            return
        content, metadata, buffers = json.loads(frames[0]), json.loads(frames[1]), list(frames[2:])
        if kind == "comm_open":
            self._open(kernel, rank, content["comm_id"])
        kernel.session.send(
            kernel.iopub_socket,
            kind,
            content=content,
            metadata=metadata,
            buffers=buffers,
            parent=kernel.get_parent("shell"),
        )

    def _open(self, kernel: Any, rank: int, comm_id: str) -> None:
        comm = importlib.import_module("ipykernel.comm").Comm(comm_id=comm_id, primary=False)

        def pass_on(message: Mapping[str, Any]) -> None:
            told = {"type": message["header"]["msg_type"], "content": message["content"]}
            buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
            self._send(rank, {"op": "comm", **told, "metadata": message.get("metadata") or {}}, buffers)

        comm.on_msg(pass_on)
        comm.on_close(pass_on)
        kernel.comm_manager.register_comm(comm)
