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
from ...control.wire import Wire
from ...protocol.entry_points import RankFunction
from ...protocol.messages import (
    Call,
    Cell,
    CellReport,
    CommMessage,
    InputAnswer,
    Question,
    RequestFailure,
    read,
    report_of,
)

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
        self._comms = CommRelay(lambda rank, message: wire.send([rank], message))
        wire.on_cell(self._on_cell)

    def send(self, ranks: Iterable[int], cell: Cell) -> None:
        """Sends a cell to ranks and returns at once."""
        self.wire.send(ranks, cell)

    def call(self, calls: Mapping[int, tuple[RankFunction, Sequence[Any]]]) -> Calls:
        """Lets ranks call a function each, between two cells; returns at once.

        Args:
            calls: rank -> the function and its arguments. A rank that has not connected gets it when it does.
        """
        made = Calls(f"call-{uuid.uuid4().hex}")
        with held_back():  # all or none: ranks wait for each other
            self.listen(made.call_id, made.take)
            for rank, (function, args) in calls.items():
                self.wire.send([rank], Call(made.call_id, function, arguments(args, {})))
        return made

    def listen(self, cell_id: str, take: Take) -> None:
        """From now on calls `take`, on the wire's thread, for what ranks say of a cell.

        Args:
            cell_id: the cell's id.
            take: called with rank, kind and data; see [Note: one wire].
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
        errors: rank -> what it raised.
    """

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.values: dict[int, Any] = {}
        self.errors: dict[int, RequestFailure] = {}

    def take(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """Takes a rank's answer."""
        report = report_of(frames)
        if isinstance(report, CellReport):
            self.values[rank] = pickle.loads(report.blob or b"")
        else:
            self.errors[rank] = report


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, ...]:
    """A function's arguments as a `Cell` or a `Call` has them."""
    buffers: list[pickle.PickleBuffer] = []
    called = pickle.dumps((tuple(args), dict(kwargs)), protocol=5, buffer_callback=buffers.append)
    return called, *map(bytes, buffers)


class Answers:
    """Answers `input()` and `breakpoint()` on ranks from the notebook's own input line, one question at a time.

    Holds the questions of one cell run; owned by the thread that shows its outputs.

    Args:
        send: sends a rank the answer.
    """

    def __init__(self, send: Callable[[int, InputAnswer], None]) -> None:
        self._send = send
        self._asked: deque[tuple[int, Question]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, rank: int, frames: Sequence[bytes]) -> None:
        """Takes a question."""
        self._asked.append((rank, read(Question, json.loads(frames[0]))))

    def ask(self) -> None:
        """Asks the user the first question and sends what was typed; on the main thread.

        Raises:
            KeyboardInterrupt: the user pressed interrupt instead.
        """
        rank, question = self._asked.popleft()
        read = getpass.getpass if question.secret else input
        try:
            with let_through():
                text = read(f"rank {rank} │ {question.prompt}")
        except (EOFError, OSError, RuntimeError) as error:  # a front end without input raises a RuntimeError
            why = _NO_INPUT.format(error=error or type(error).__name__)
            self._send(rank, InputAnswer(question.number, error=why))
        else:
            self._send(rank, InputAnswer(question.number, text))

    def refuse(self) -> None:
        """Answers all questions with an error: there is no user to ask."""
        while self._asked:
            rank, question = self._asked.popleft()
            self._send(rank, InputAnswer(question.number, error=_NOBODY))


class CommRelay:
    """Shows widgets that cells make on ranks in the notebook; used by the wire's thread.

    A widget talks to its page through a comm of its kernel. The page knows only the notebook's kernel. So each comm
    that a rank opens gets a proxy there, which passes messages on, both ways.

    Args:
        send: sends a rank a message.
    """

    def __init__(self, send: Callable[[int, CommMessage], None]) -> None:
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
            buffers = tuple(bytes(buffer) for buffer in message.get("buffers") or ())
            kind, metadata = message["header"]["msg_type"], message.get("metadata") or {}
            self._send(rank, CommMessage(kind, message["content"], metadata, buffers))

        comm.on_msg(pass_on)
        comm.on_close(pass_on)
        kernel.comm_manager.register_comm(comm)
