"""Answers what ranks ask (`input()`, `breakpoint()`) from the notebook's own input line, one question at a time."""

from __future__ import annotations

import getpass
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...control.interrupts import let_through

__all__ = ["QUESTION", "Answers", "Send"]

QUESTION = "ddp_lab_question"
Send = Callable[[int, Mapping[str, Any]], None]
"""Sends a rank the answer: ``number`` of the question, and ``text`` or ``error``."""
_NOBODY = "nobody waits for this cell in the notebook, so input() can't be answered: run it without --no-wait"
_NO_INPUT = "the notebook could not ask for input: {error}"


class Answers:
    """The questions of one cell run; owned by the thread that shows its outputs.

    Args:
        send: how an answer travels; None: ranks are not answered.
    """

    def __init__(self, send: Send | None) -> None:
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
        """Answers all questions that nobody can be asked here."""
        while self._asked:
            self._answer(*self._asked.popleft(), error=_NOBODY)

    def _answer(self, rank: int, question: Mapping[str, Any], **answer: str) -> None:
        if self._send is not None:
            self._send(rank, {"op": "answer", "number": question["number"], **answer})
