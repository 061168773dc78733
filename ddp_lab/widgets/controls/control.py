"""What controls have in common; of those, faults on purpose and watched gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ... import faults

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["Control", "FaultControl", "WatchControl", "fault_rows"]

_CHECK_SECONDS = 3.0


class Control:
    """What the browser asks of the ranks in one respect, and what it shows of it. `Controls`' thread calls it.

    Attributes:
        shown: what the browser shows, replaced as a whole: any thread reads it. Most have ``said`` and ``error``, in
            words.
        active: whether the ranks have to be looked at often.
        view: which view shows it: only while that is seen are the ranks asked; None: always.
        of_model: whether there is something to ask only as soon as there is a model.
    """

    nothing: ClassVar[Mapping[str, Any]] = {}  # what is shown where nobody can be asked
    view: str | None = None
    of_model = True

    def __init__(self, training: TrainingControl) -> None:
        self._training = training
        self.shown: dict[str, Any] = {**self.nothing, "said": "", "error": ""}

    @property
    def active(self) -> bool:
        """Whether the ranks have to be looked at often."""
        return False

    def obey(self, command: dict[str, Any]) -> None:
        """Carries out a request of the browser.

        Raises:
            ClusterError, ValueError: the ranks refuse it, or do not answer.
        """

    def look(self, reducer: int | None) -> None:
        """Asks the ranks how it is, for a model (None: the most recently active).

        Raises:
            ClusterError, ValueError: there is no such model, a rank does not answer, or the cluster does not run.
        """

    def fail(self, error: str) -> None:
        """Shows what went wrong, until the next request."""
        self.shown = {**self.shown, "error": error, "said": ""}

    def forget(self) -> None:
        """Nobody can be asked."""
        self.shown = {**self.nothing, "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}


class FaultControl(Control):
    """Injects faults, ends them, and looks which there are; shows ``faults``: `fault_rows`."""

    nothing: ClassVar[Mapping[str, Any]] = {"faults": []}
    of_model = False

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
        self.look(None)

    def look(self, reducer: int | None) -> None:
        """Asks the ranks which faults they have, of whatever model.

        Raises:
            ClusterError: a rank does not answer, or the cluster does not run.
        """
        self.shown = {**self.shown, "faults": fault_rows(self._training.faults())}


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


class WatchControl(Control):
    """Turns watches of gradients on and off, and has replicas compared.

    Shows every how many steps ``gradients`` and ``drift`` are looked at (0: not), how many requests are ``pending``.
    """

    nothing: ClassVar[Mapping[str, Any]] = {"gradients": 0, "drift": 0, "pending": 0}
    view = "gradients"

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
            ClusterError, ValueError: there is no such model, a rank does not answer, or the cluster does not run.
        """
        self.shown = {**self.shown, **self._training.looks(reducer)}
