"""What tuning came to: which settings were tried, what was found, and what to write into the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .race import Gain
from .settings import Setting

__all__ = ["Tried", "Tuned"]


@dataclass(frozen=True)
class Tried:
    """One setting that took part.

    Attributes:
        setting: what.
        predicted_ms: the step as simulated; None where nothing could be simulated.
        measured_ms: median of its turns; None if the ranks refused it.
        rounds: turns that it took.
        note: why it took no further turns, if that was not its speed.
    """

    setting: Setting
    predicted_ms: float | None
    measured_ms: float | None
    rounds: int
    note: str = ""


@dataclass(frozen=True)
class Tuned:
    """The outcome of `Cluster.tune` and `ddp-lab tune`.

    Attributes:
        users: the setting that the model had.
        best: the one that is clearly faster; None: none is, or it is not known.
        applied: whether the model has it now. Otherwise it has what it had before.
        gain: of the winner of the race over the user's setting; None if the user's own won it.
        tried: all settings, the fastest first.
        steps: training steps that it took.
        seconds: how long it took.
        ended: why it stopped before the answer was clear; empty if it did not.
        views_percent: what ``gradient_as_bucket_view=True`` would save beside it, simulated; None: the model has it, or
            nothing could be simulated. It can't be tried live.
    """

    users: Setting
    best: Setting | None
    applied: bool
    gain: Gain | None
    tried: Sequence[Tried]
    steps: int
    seconds: float
    ended: str = ""
    views_percent: float | None = None

    @property
    def arguments(self) -> str:
        """What to write into the program to have the faster setting from the beginning; the user's if there is none."""
        return (self.best or self.users).arguments

    @property
    def verdict(self) -> str:
        """One or two sentences."""
        if self.best is not None and self.gain is not None:
            now = "The model has it now." if self.applied else "Nothing was changed."
            return (
                f"{self.best} is faster than {self.users} by {self.gain.percent:.1f} % of the step "
                f"({self.gain.low_percent:.1f} to {self.gain.high_percent:.1f} %, 95 % bound). {now}"
            )
        if self.ended:
            return f"{self.ended} No setting was clearly faster than {self.users} by then: nothing was changed."
        if self.gain is None:
            return f"What the model has ({self.users}) is the fastest of what was tried: nothing was changed."
        return (
            f"Nothing is clearly faster than what the model has ({self.users}): the best of the others gains "
            f"{self.gain.percent:.1f} % ({self.gain.low_percent:.1f} to {self.gain.high_percent:.1f} %, 95 % bound). "
            "Nothing was changed."
        )

    def __str__(self) -> str:
        lines = [self.verdict, f"{self.steps} training steps, {self.seconds:.0f} s."]
        if self.best is not None:
            lines += ["To have it from the beginning:", f"    {self.arguments}"]
        if self.best is not None and self.best.hook is not None:
            lines.append(f"The comm hook {self.best.hook} is lossy: compare the loss of both before you keep it.")
        if self.views_percent is not None and self.views_percent >= 0.5:
            lines.append(
                f"gradient_as_bucket_view=True would save about {self.views_percent:.1f} % more (simulated: only the "
                "constructor can set it)."
            )
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _table(self) -> list[str]:
        width = max([len(str(one.setting)) for one in self.tried] + [7])
        lines = [f"{'setting':{width}}  predicted ms  measured ms  turns"]
        for one in self.tried:
            predicted, measured = (
                "-" if value is None else f"{value:.2f}" for value in (one.predicted_ms, one.measured_ms)
            )
            lines.append(
                f"{one.setting!s:{width}}  {predicted:>12}  {measured:>11}  {one.rounds:5}  {one.note}".rstrip()
            )
        return lines
