"""The base class of controls; fault injection and gradient monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ... import faults

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["Control", "FaultControl", "WatchControl", "fault_rows"]

_CHECK_SECONDS = 3.0


class Control:
    """One group of the browser's requests to the ranks, and what the browser shows of it. `Controls`' thread calls it.

    Attributes:
        shown: what the browser shows, replaced as a whole because any thread reads it. Most have the texts ``said``
            and ``error``.
        active: whether the ranks must be queried often.
        view: the view that shows it: the ranks are queried only while it is in view; None: always.
        of_model: whether it needs a model.
    """

    nothing: ClassVar[Mapping[str, Any]] = {}  # what is shown without ranks
    view: str | None = None
    of_model = True

    def __init__(self, training: TrainingControl) -> None:
        self._training = training
        self.shown: dict[str, Any] = {**self.nothing, "said": "", "error": ""}

    @property
    def active(self) -> bool:
        """Whether the ranks must be queried often."""
        return False

    def obey(self, command: dict[str, Any]) -> None:
        """Runs a request of the browser.

        Raises:
            ClusterError, ValueError: the ranks reject it, or do not respond.
        """

    def look(self, reducer: int | None) -> None:
        """Queries the ranks for a model (None: the most recently active).

        Raises:
            ClusterError, ValueError: there is no such model, a rank does not respond, or the cluster is not running.
        """

    def fail(self, error: str) -> None:
        """Shows an error until the next request."""
        self.shown = {**self.shown, "error": error, "said": ""}

    def forget(self) -> None:
        """Clears what is shown, because there are no ranks to query."""
        self.shown = {**self.nothing, "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}


class FaultControl(Control):
    """Injects, ends and lists faults; shows ``faults``: `fault_rows`."""

    nothing: ClassVar[Mapping[str, Any]] = {"faults": []}
    of_model = False

    @property
    def active(self) -> bool:
        """Whether a fault is active, or about to be."""
        return bool(self.shown["faults"])

    def obey(self, command: dict[str, Any]) -> None:
        """Runs ``{"do": "inject", "fault": {"kind": ..., ...}} | {"do": "end", "rank": ..., "number": ...}``.

        Raises:
            ClusterError, ValueError: the rank rejects it, or does not respond.
        """
        if command["do"] == "inject":
            if command["fault"].get("seconds", 0.0) is None:
                raise ValueError("enter the delay in milliseconds")
            fault = faults.from_dict(command["fault"])
            self._training.inject(fault, command.get("reducer"))
            self._say(f"Requested on rank {fault.rank}: {fault.text()}, starting with its next forward.")
        else:
            self._training.clear_faults(command.get("rank"), command.get("number"))
            which = "All faults end" if command.get("number") is None else "It ends"
            self._say(f"{which} with the next forward.")
        self.look(None)

    def look(self, reducer: int | None) -> None:
        """Queries the faults of the ranks, for all models.

        Raises:
            ClusterError: a rank does not respond, or the cluster is not running.
        """
        self.shown = {**self.shown, "faults": fault_rows(self._training.faults())}


def fault_rows(found: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Faults as the browser lists them: ``rank``, ``number``, ``kind``, ``text`` and ``begun`` of each.

    Args:
        found: the result of `TrainingControl.faults`.
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
    """Starts and stops gradient monitoring, and compares replicas.

    Shows the monitoring intervals in steps, ``gradients`` and ``drift`` (0: off), and the number of ``pending``
    requests.
    """

    nothing: ClassVar[Mapping[str, Any]] = {"gradients": 0, "drift": 0, "pending": 0}
    view = "gradients"

    def obey(self, command: dict[str, Any]) -> None:
        """Runs ``{"do": "gradients" | "drift", "every": n} | {"do": "check"}``, with ``reducer``.

        Raises:
            ClusterError, ValueError: a rank rejects it, or does not respond.
        """
        reducer, do = command.get("reducer"), command["do"]
        if do == "check":
            found = self._training.check_drift(reducer, timeout=_CHECK_SECONDS)
            self._say("All ranks hold the same model." if found.ok else "")
        else:
            every = int(command["every"])
            set_ = self._training.watch_gradients if do == "gradients" else self._training.watch_drift
            set_(every, reducer)
            what, done = ("Gradients", "monitored") if do == "gradients" else ("Replicas", "compared")
            when = f" every {every} steps" if every > 1 else " every step" if every else ""
            self._say(f"{what} are {'' if every else 'no longer '}{done}{when}, starting within the next steps.")
        self.look(reducer)

    def look(self, reducer: int | None) -> None:
        """Queries what is monitored.

        Raises:
            ClusterError, ValueError: there is no such model, a rank does not respond, or the cluster is not running.
        """
        self.shown = {**self.shown, **self._training.monitoring(reducer)}
