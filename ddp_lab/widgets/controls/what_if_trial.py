"""A prediction put to the test: the ranks train with it for some steps, and its error is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...control.turns import LiveTurns, TrainingEnded
from ...errors import DdpLabError
from ...simulation.settings import Setting

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["Trial"]

_ROUNDS = 3
_PATIENCE_SECONDS = 10.0
_KEPT = 8
_NOBODY = "There are no ranks to try it on: predictions are run on a live cluster of this notebook."
_IDLE = "Nothing trains now: start the training cell with %%distributed --no-wait (or let it run), then press it again."


class Trial:
    """What "Run it" does, on a thread of its own.

    What the model has and what was predicted take turns of some steps each, so that both meet the same machine; then
    the model has what it had.

    Args:
        training: of the ranks that train; None: nobody's.
        changed: is called on that thread when there is something new to show.
    """

    def __init__(self, training: TrainingControl | None, changed: Callable[[], None]) -> None:
        self._training, self._changed = training, changed
        self._lock = threading.Lock()
        self._state, self._text = "idle", ""
        self._scores: list[dict[str, Any]] = []
        self._thread: threading.Thread | None = None

    def told(self) -> dict[str, Any]:
        """What the browser needs: ``state`` ("idle", "running" or "failed"), ``text``, ``scores``, ``possible``."""
        with self._lock:
            why = _NOBODY if self._training is None else ""
            return {"state": self._state, "text": self._text, "scores": list(self._scores), "why": why}

    def start(self, reducer: int, cap_mb: float, *, predicted_ms: float, present_ms: float) -> None:
        """Begins, unless it is under way; returns at once.

        Args:
            reducer: the model's number on the timeline.
            cap_mb: the cap to try.
            predicted_ms: its predicted step.
            present_ms: the predicted step of what the model has.
        """
        if self._training is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._tell("running", "waiting for the ranks …")
        arguments = (self._training, reducer, cap_mb, predicted_ms, present_ms)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ddp_lab what-if", daemon=True)
        self._thread.start()

    def _run(
        self, training: TrainingControl, reducer: int, cap_mb: float, predicted_ms: float, present_ms: float
    ) -> None:
        try:
            turns = LiveTurns(training, reducer, None, _PATIENCE_SECONDS)
            if not turns.training:
                self._tell("failed", _IDLE)
                return
            times = self._turns(turns, Setting((cap_mb,)))
        except TrainingEnded as ended:
            self._tell("failed", f"{ended} The model has what it had.")
        except DdpLabError as error:
            self._tell("failed", str(error))
        except BaseException as error:  # noqa: BLE001 - the thread's top: shown in the view
            self._tell("failed", f"{type(error).__name__}: {error}")
        else:
            self._score(Setting((cap_mb,)), times, predicted_ms, present_ms)

    def _turns(self, turns: LiveTurns, setting: Setting) -> list[tuple[float, float]]:
        """(present, tried) milliseconds of each round; the model has its own setting again afterwards."""
        made = []
        try:
            for number in range(_ROUNDS):
                self._tell("running", f"{setting} against {turns.users}: round {number + 1} of {_ROUNDS} …")
                order = (turns.users, setting) if number % 2 == 0 else (setting, turns.users)
                medians = {one: float(np.median(turns.take(one))) for one in order}
                made.append((medians[turns.users], medians[setting]))
        finally:
            turns.settle(turns.users)
        return made

    def _score(
        self, setting: Setting, times: list[tuple[float, float]], predicted_ms: float, present_ms: float
    ) -> None:
        measured = float(np.median([tried for _, tried in times]))
        ratio = float(np.median([tried / own for own, tried in times]))
        with self._lock:
            score = {
                "setting": str(setting),
                "predicted": predicted_ms,
                "measured": measured,
                "error": 100 * (predicted_ms / measured - 1),
                "gainPredicted": 100 * (1 - predicted_ms / present_ms),
                "gainMeasured": 100 * (1 - ratio),
            }
            self._scores = [*self._scores, score][-_KEPT:]
        self._tell("idle", "")

    def _tell(self, state: str, text: str) -> None:
        with self._lock:
            self._state, self._text = state, text
        self._changed()
