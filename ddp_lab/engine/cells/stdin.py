"""`input()` on a rank asks the notebook: so `breakpoint()`, `pdb` and `%debug` work in cells.

[Note: a rank that asks]
The question is sent with the cell's outputs, so that everything printed before it is shown first. The client asks
its own front end and sends the answer as a control message, which wakes the rank's main thread. A debugger survives a
KeyboardInterrupt; so once its cell is interrupted, a rank has no more input, and the debugger quits.
"""

from __future__ import annotations

import builtins
import getpass
import itertools
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ...protocol.messages import InputAnswer, Question, plain
from . import cell

QUESTION = "ddp_lab_question"  # its type among the outputs


class Asking:
    """Replaces `input` and `getpass.getpass` in this process; outside cells they are Python's own.

    Args:
        kernel: this engine's.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._question: tuple[int, SimpleQueue[InputAnswer]] | None = None  # number; where its answer comes
        self._interrupted: str | None = None
        self._input, self._getpass = builtins.input, getpass.getpass

    def install(self, on_control: Callable[[type[InputAnswer], Callable[[InputAnswer], None]], None]) -> None:
        """Begins to ask the client."""
        on_control(InputAnswer, self._take)
        builtins.input = self._ask_openly
        getpass.getpass = self._ask_secretly

    def interrupt(self, cell_id: str) -> None:
        """Ends all input of this cell; on any thread."""
        with self._lock:
            self._interrupted = cell_id

    def _ask_openly(self, prompt: object = "", /) -> str:
        return self._ask(str(prompt), False, lambda: self._input(prompt))

    def _ask_secretly(self, prompt: str = "Password: ", stream: Any = None, **options: Any) -> str:
        return self._ask(prompt, True, lambda: self._getpass(prompt, stream, **options))

    def _ask(self, prompt: str, secret: bool, otherwise: Callable[[], str]) -> str:
        """On the main thread. Raises EOFError if there is no user to answer."""
        cell_id = cell.running()
        if cell_id is None or threading.current_thread() is not threading.main_thread():
            return otherwise()
        sys.stdout.flush()
        number, answers = next(self._numbers), SimpleQueue[InputAnswer]()
        with self._lock:
            if self._interrupted == cell_id:
                raise EOFError("the cell was interrupted")
            self._question = number, answers
        content = plain(Question(number, prompt, secret))
        session, parent = self._kernel.session, self._kernel.get_parent()
        session.send(self._kernel.iopub_socket, QUESTION, content=content, parent=parent)
        answer = answers.get()
        if answer.error:
            raise EOFError(answer.error)
        return answer.text

    def _take(self, message: InputAnswer) -> None:
        """On the control thread; drops answers to questions that are no longer pending."""
        with self._lock:
            if self._question is None or self._question[0] != message.number:
                return
            answers, self._question = self._question[1], None
        answers.put(message)
