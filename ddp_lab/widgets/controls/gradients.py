"""The controls of the gradients view: what is watched, and a comparison of the replicas on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["WatchControl"]

_CHECK_SECONDS = 3.0


class WatchControl:
    """Turns watches on and off, and has replicas compared. One thread at a time."""

    active = False  # nothing of it needs to be looked at often

    def __init__(self, training: TrainingControl) -> None:
        self._training = training
        self.shown: dict[str, Any] = {"gradients": 0, "drift": 0, "pending": 0, "said": "", "error": ""}
        """What the browser shows: every how many steps (0: not), requests not yet begun, ``said``, ``error``."""

    def obey(self, command: dict[str, Any]) -> None:
        """Carries out ``{"do": "gradients" | "drift", "every": n} | {"do": "check"}``, with ``reducer``.

        Raises:
            ClusterError, ValueError: a rank refuses it, or does not answer.
        """
        reducer, do = command.get("reducer"), command["do"]
        if do == "check":
            found = self._training.check_drift(reducer, timeout=_CHECK_SECONDS)
            self._say("All ranks hold the same model." if found.ok else "")
        else:
            every = int(command["every"])
            set_ = self._training.watch_gradients if do == "gradients" else self._training.watch_drift
            set_(every, reducer)
            when = f"every {every} steps" if every > 1 else "every step"
            what = "Gradients are watched" if do == "gradients" else "Replicas are compared"
            self._say(
                f"{what} {when}, from the next steps on." if every else f"{what} no more, from the next steps on."
            )
        self.look(reducer)

    def look(self, reducer: int | None) -> None:
        """Asks what is watched.

        Raises:
            ClusterError: a rank does not answer, or there is no such model.
        """
        self.shown = {**self.shown, **self._training.looks(reducer)}

    def fail(self, error: str) -> None:
        """Shows what went wrong, until the next request."""
        self.shown = {**self.shown, "error": error, "said": ""}

    def forget(self) -> None:
        """Nobody can be asked."""
        self.shown = {"gradients": 0, "drift": 0, "pending": 0, "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}
