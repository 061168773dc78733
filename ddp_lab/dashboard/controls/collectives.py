"""Collectives on demand: requested by a view, run on the ranks by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...control.collectives import DEFAULT_BYTES, ShownCollective
from ...errors import DdpLabError
from ..views import collective_page

__all__ = ["SIZES", "CollectiveStage", "no_ranks"]

SIZES = (1024, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)
_Question = tuple[str, str, int]


def no_ranks(collective: str, algorithm: str, bytes: int) -> ShownCollective:
    """Takes the place of the ranks if there are none."""
    raise DdpLabError("this is a recording: there are no ranks to run a collective on")


class CollectiveStage:
    """The state of the collectives view, and the thread that runs the requested collectives.

    Args:
        run: ``run(collective, algorithm, bytes)`` runs it on the ranks and returns what happened.
        choices: returns collective -> algorithm -> why it can't run here now, "" if it can.
        busy: returns why no collective can run now, "" if one can.
    """

    def __init__(
        self,
        run: Callable[[str, str, int], ShownCollective],
        choices: Callable[[], Mapping[str, Mapping[str, str]]],
        busy: Callable[[], str] = str,
    ) -> None:
        self.shown: ShownCollective | None = None
        self._page: dict[str, Any] | None = None  # the same for a page
        self._run = run
        self._choices = choices
        self._busy = busy
        self._lock = threading.Lock()
        self._question: _Question | None = None
        self._thread: threading.Thread | None = None
        self._state, self._text = "idle", ""
        self._number = 0  # of runs; it tells the browser about a new one

    def show(self, shown: ShownCollective) -> None:
        """Shows a collective that was run, unless another one is requested, which would then seem to be complete."""
        with self._lock:
            if self._question is None:
                self.shown, self._state, self._text = shown, "idle", ""
                self._page = {**shown.to_dict(), **collective_page(shown)}
                self._number += 1

    def ask(self, command: Mapping[str, Any]) -> None:
        """Takes a request of the browser, ``{"collective", "algorithm", "bytes"}``, and returns at once."""
        question = (str(command["collective"]), str(command["algorithm"]), int(command["bytes"]))
        with self._lock:
            self._question = question
            self._state, self._text = "running", f"{question[0]} by {question[1]}: running on the ranks …"
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ddp_lab collectives", daemon=True)
                self._thread.start()

    @property
    def running(self) -> bool:
        """Whether an answer is expected."""
        return self._thread is not None

    def told(self) -> dict[str, Any]:
        """The state for the browser."""
        with self._lock:
            about = {"state": self._state, "text": self._text, "number": self._number, "shown": self._page}
            return {
                **about,
                "busy": "" if self._state == "running" else self._busy(),
                "choices": {name: dict(known) for name, known in self._choices().items()},
                "sizes": list(SIZES),
                "bytes": DEFAULT_BYTES,
            }

    def _work(self) -> None:
        while True:
            with self._lock:
                question, self._question = self._question, None
                if question is None:
                    self._thread = None
                    return
            try:
                shown = self._run(*question)
            except (DdpLabError, ValueError) as error:
                self._failed(str(error))
            except BaseException as error:  # noqa: BLE001  the thread's top: shown in the view
                self._failed(f"{type(error).__name__}: {error}")
            else:
                self.show(shown)

    def _failed(self, text: str) -> None:
        with self._lock:
            if self._question is None:
                self._state, self._text = "failed", text
