"""A test of a prediction: the ranks train with it for some steps, and the error of the prediction is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...control.tuning import Session
from ...control.turns import LiveTurns, TrainingEnded
from ...errors import DdpLabError
from ...simulation.settings import Setting

if TYPE_CHECKING:
    from ...control.training import TrainingControl
    from ...simulation.race import Confirmation

__all__ = ["Trial"]

_ROUNDS = 3
_PATIENCE_SECONDS = 10.0
_KEPT = 8
_NOBODY = "There are no ranks to run it on. Predictions need a running cluster in this notebook."
_IDLE = "No model is training. Start the training cell with %%distributed --no-wait, then press the button again."


class Trial:
    """Runs a prediction ("Run it"), on a thread of its own.

    The current setting and the predicted one alternate, some steps each, so that both run under the same conditions;
    then the current setting is restored.

    Args:
        training: controls the ranks that train; None if there are none.
        changed: called on that thread when there is something new to show.
    """

    def __init__(self, training: TrainingControl | None, changed: Callable[[], None]) -> None:
        self._training, self._changed = training, changed
        self._lock = threading.Lock()
        self._state, self._text = "idle", ""
        self._scores: list[dict[str, Any]] = []
        self._thread: threading.Thread | None = None

    def told(self) -> dict[str, Any]:
        """The state for the browser: ``state`` ("idle", "running" or "failed"), ``text``, ``scores``, ``why``."""
        with self._lock:
            why = _NOBODY if self._training is None else ""
            return {"state": self._state, "text": self._text, "scores": list(self._scores), "why": why}

    def start(self, reducer: int, cap_mb: float, *, predicted_ms: float, present_ms: float) -> None:
        """Starts a trial, unless one is running; returns at once.

        Args:
            reducer: the model's number on the timeline.
            cap_mb: the bucket size limit to try.
            predicted_ms: its predicted step time.
            present_ms: the predicted step time of the current setting.
        """
        if self._training is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._tell("running", "waiting for the ranks …")
        arguments = (self._training, reducer, Setting((cap_mb,)), predicted_ms, present_ms)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ddp_lab what-if", daemon=True)
        self._thread.start()

    def _run(
        self, training: TrainingControl, reducer: int, setting: Setting, predicted_ms: float, present_ms: float
    ) -> None:
        try:
            turns = LiveTurns(training, reducer, None, _PATIENCE_SECONDS)
            if not turns.training:
                self._tell("failed", _IDLE)
                return
            self._tell("running", f"{setting} against {turns.users}: round 1 of {_ROUNDS} …")
            session = Session(turns, None, seconds=float("inf"), tell=partial(self._tell, "running"))
            compared = session.compare(setting, _ROUNDS)
        except TrainingEnded as ended:
            self._tell("failed", f"{ended} The model keeps its current setting.")
        except DdpLabError as error:
            self._tell("failed", str(error))
        except BaseException as error:  # noqa: BLE001 - the thread's top: shown in the view
            self._tell("failed", f"{type(error).__name__}: {error}")
        else:
            self._score(setting, compared, predicted_ms, present_ms)

    def _score(self, setting: Setting, compared: Confirmation, predicted_ms: float, present_ms: float) -> None:
        measured = compared.winner_ms
        with self._lock:
            score = {
                "setting": str(setting),
                "predicted": predicted_ms,
                "measured": measured,
                "error": 100 * (predicted_ms / measured - 1),
                "gainPredicted": 100 * (1 - predicted_ms / present_ms),
                "gainMeasured": compared.gain.percent,
            }
            self._scores = [*self._scores, score][-_KEPT:]
        self._tell("idle", "")

    def _tell(self, state: str, text: str) -> None:
        with self._lock:
            self._state, self._text = state, text
        self._changed()
