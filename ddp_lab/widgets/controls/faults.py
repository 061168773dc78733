"""Faults from the dashboard: asked for, listed and ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import faults

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["FaultControl", "fault_rows"]


class FaultControl:
    """Injects faults, ends them, and looks which there are. One thread at a time."""

    def __init__(self, training: TrainingControl) -> None:
        self._training = training
        self.shown: dict[str, Any] = {"faults": [], "said": "", "error": ""}
        """What the browser shows: ``faults`` (`fault_rows`), ``said`` and ``error`` in words."""

    @property
    def active(self) -> bool:
        """Whether a fault happens, or is about to."""
        return bool(self.shown["faults"])

    def obey(self, command: dict[str, Any]) -> None:
        """Carries out ``{"do": "inject", "fault": {"kind": ..., ...}} | {"do": "end", "rank": ..., "number": ...}``.

        Raises:
            ClusterError, ValueError: the rank refuses it, or does not answer.
        """
        if command["do"] == "inject":
            if command["fault"].get("seconds", 0.0) is None:
                raise ValueError("say by how many ms")
            fault = faults.from_dict(command["fault"])
            self._training.inject(fault, command.get("reducer"))
            self._say(f"Asked of rank {fault.rank}: {fault.text()}, from its next forward on.")
        else:
            self._training.clear_faults(command.get("rank"), command.get("number"))
            which = "All faults end" if command.get("number") is None else "It ends"
            self._say(f"{which} with the next forward.")
        self.look()

    def look(self) -> None:
        """Asks the ranks which faults they have.

        Raises:
            ClusterError: the cluster does not run.
        """
        self.shown = {**self.shown, "faults": fault_rows(self._training.faults())}

    def fail(self, error: str) -> None:
        """Shows what went wrong, until the next request."""
        self.shown = {**self.shown, "error": error, "said": ""}

    def forget(self) -> None:
        """Nobody can be asked."""
        self.shown = {"faults": [], "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}


def fault_rows(found: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Faults as the browser lists them: ``rank``, ``number``, ``kind``, ``text`` and ``begun`` of each.

    Args:
        found: of `TrainingControl.faults`.
    """
    rows = []
    for rank, of_rank in sorted(found.items()):
        for one in of_rank:
            fields = {name: value for name, value in one.items() if name not in ("number", "begun")}
            fault = faults.from_dict(fields)
            rows.append({"rank": rank, "number": one["number"], "begun": one["begun"]})
            rows[-1] |= {"kind": fields["kind"], "text": fault.text()}
    return rows
