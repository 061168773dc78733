"""What cells on ranks ask of the notebook's front end: answers to `input()`, and to show their widgets.

See [Note: one wire] in `ddp_lab.engine.cells.delivery`.
"""

from __future__ import annotations

import getpass
import importlib
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...control.interrupts import interrupts_allowed
from ...control.wire import Wire
from ...protocol.messages import CommMessage, InputAnswer, Question, read

QUESTION = "ddp_lab_question"
_NOBODY = "input() can't be answered because the notebook does not wait for this cell: run it without --no-wait"
_NO_INPUT = "the notebook could not ask for input: {error}"


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
            with interrupts_allowed():
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
        wire: to the ranks.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        wire.listen("", self.take)

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
            self._wire.send([rank], CommMessage(kind, message["content"], metadata, buffers))

        comm.on_msg(pass_on)
        comm.on_close(pass_on)
        kernel.comm_manager.register_comm(comm)
