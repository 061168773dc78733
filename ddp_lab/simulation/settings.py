"""Settings of a model in training (bucket size limits and hook): which ones to try, and the result of tuning.

[Note: which settings to try]
The simulator ranks a grid of size limits (each power of 2 down from the whole model, with and without a smaller first
bucket). Its error is some percent, and the curve is flat near the best limit, so its best few are similar, and trying
only those would test one idea. Hence the best one is taken, then the best of those with clearly fewer buckets, the best
of those with clearly more, and then by rank; each differs from all others by more than a factor of 1.7 in a limit.
Settings with the same buckets count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .candidate_selection import Gain
from .link_model import CommModel
from .simulator import Assignment, Configuration, Hook, simulate_many
from .workload import Workload

__all__ = ["HOOKS", "Setting", "Tried", "Tuned", "candidates", "grid", "spread"]

_MEBIBYTE = 1024 * 1024
_DEFAULT = (1.0, 25.0)  # torch's caps in MiB
_SMALLEST_MB = 0.01
_MOST_BUCKETS = 200
_FIRST_MB = (0.25, 1.0)
_CLEARLY = 1.7
_ALIKE = math.log(_CLEARLY)

# Half of the bytes; to convert them takes about as long as to copy them.
HOOKS = dict.fromkeys(("fp16", "bf16"), Hook(bytes_factor=0.5, ns_per_byte=0.2, after_ns_per_byte=0.2))
"""Lossy comm hooks that can be tried, as the simulator sees them."""

_REGISTER = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import {0}_compress_hook; "
    "model.register_comm_hook(None, {0}_compress_hook)"
)


@dataclass(frozen=True)
class Setting:
    """A setting for `reconfigure`.

    Attributes:
        caps_mb: bucket size limits in MiB, in launch order; the last one repeats.
        hook: name of a comm hook; None: the one that the model has, or none.
    """

    caps_mb: tuple[float, ...]
    hook: str | None = None

    @property
    def configuration(self) -> Configuration:
        """For the simulator."""
        return Configuration(self.caps_mb, hook=HOOKS.get(self.hook or ""))

    def change(self, present: Setting) -> dict[str, Any]:
        """Arguments of `reconfigure` that change `present` to this setting; empty if they are equal.

        A model's own hook can only be restored by its name, so `present` must not have replaced it.
        """
        made: dict[str, Any] = {}
        if self.caps_mb != present.caps_mb:
            # A first cap and one for the others are told as such: as the constructor does it.
            if len(self.caps_mb) <= 2:
                made["bucket_cap_mb"] = self.caps_mb[-1]
                made["first_bucket_mb"] = self.caps_mb[0]
            else:
                made["bucket_cap_mb_list"] = list(self.caps_mb)
        if self.hook != present.hook:
            made["comm_hook"] = self.hook or "none"
        return made

    @property
    def arguments(self) -> str:
        """The code that gives a model this setting from the start."""
        hook = "" if self.hook is None else "; " + _REGISTER.format(self.hook)
        if self.caps_mb == _DEFAULT:
            return f"DistributedDataParallel(model){hook}"
        if len(set(self.caps_mb)) == 1:
            return f"DistributedDataParallel(model, bucket_cap_mb={_number(self.caps_mb[0])}){hook}"
        caps = ", ".join(map(_number, self.caps_mb))
        return f"DistributedDataParallel(model, bucket_cap_mb_list=[{caps}]){hook}"

    def __str__(self) -> str:
        first, others = self.caps_mb[0], self.caps_mb[-1]
        if len(self.caps_mb) > 2:
            words = ", ".join(map(_number, self.caps_mb)) + " MiB"
        elif first == others:
            words = f"{_number(others)} MiB"
        else:
            words = f"first {_number(first)}, then {_number(others)} MiB"
        return words if self.hook is None else f"{words}, {self.hook}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def grid(workload: Workload, hooks: Iterable[str | None] = (None,)) -> list[Setting]:
    """The settings that are ranked.

    Args:
        workload: whose gradients are to be put into buckets.
        hooks: None for the present one, and names of `HOOKS`.
    """
    whole = workload.bytes / _MEBIBYTE
    caps = [_rounded(1.05 * whole)]  # all in one bucket, whatever is rounded
    cap = whole / 2
    while cap >= _SMALLEST_MB and whole / cap <= _MOST_BUCKETS:
        caps.append(_rounded(cap))
        cap /= 2
    pairs = [(cap,) for cap in caps] + [(first, cap) for cap in caps for first in _FIRST_MB if first <= cap / 2]
    return [Setting(pair, hook) for hook in hooks for pair in pairs]


def _rounded(value: float) -> float:
    """Two digits, so that it is pleasant to write; three for a model of one bucket."""
    return float(f"{value:.2g}")


def candidates(
    workload: Workload, link: CommModel, present: Setting, count: int, hooks: Iterable[str | None] = (None,)
) -> list[tuple[Setting, float]]:
    """The best few settings by simulation; see [Note: which settings to try].

    Args:
        workload: what a step computes.
        link: how long an all-reduce takes.
        present: the user's, which is not among them.
        count: how many.
        hooks: see `grid`.

    Returns:
        Settings with their predicted step in ns, the fastest first.
    """
    known = [present]
    tried = _different(workload, [present, *grid(workload, hooks)])[1:]
    if not tried:
        return []
    predicted = simulate_many(workload, [one.configuration for one in tried], link).step_ns
    ranked: list[int] = predicted.argsort(kind="stable").tolist()
    buckets = [len(Assignment.of(workload, one.configuration, {}).buckets) for one in tried]
    best = buckets[ranked[0]]
    fewer = [index for index in ranked if buckets[index] * _CLEARLY <= best]
    more = [index for index in ranked if buckets[index] >= best * _CLEARLY]
    found: list[tuple[Setting, float]] = []
    for index in dict.fromkeys([ranked[0], *fewer[:1], *more[:1], *ranked]):
        if len(found) < count and all(_unlike(tried[index], other) for other in known):
            known.append(tried[index])
            found.append((tried[index], float(predicted[index])))
    return sorted(found, key=lambda one: one[1])


def spread(workload: Workload, present: Setting, count: int) -> list[Setting]:
    """Settings over the whole range of caps: what to try where no link is known to simulate."""
    single = [one for one in _different(workload, [present, *grid(workload)])[1:] if len(one.caps_mb) == 1]
    step = max(1, len(single) // max(count, 1))
    return single[::step][:count]


def _different(workload: Workload, settings: Sequence[Setting]) -> list[Setting]:
    """The first setting for each assignment of buckets and hook."""
    seen: dict[Any, Setting] = {}
    known: dict[Any, Assignment] = {}
    for one in settings:
        seen.setdefault((Assignment.of(workload, one.configuration, known).buckets, one.hook), one)
    return list(seen.values())


def _unlike(one: Setting, other: Setting) -> bool:
    if one.hook != other.hook:
        return True
    ends = zip((one.caps_mb[0], one.caps_mb[-1]), (other.caps_mb[0], other.caps_mb[-1]), strict=True)
    return any(abs(math.log(a / b)) > _ALIKE for a, b in ends)


@dataclass(frozen=True)
class Tried:
    """One setting that took part.

    Attributes:
        setting: what.
        predicted_ms: the step as simulated; None where nothing could be simulated.
        measured_ms: median of its turns; None if the ranks rejected it.
        rounds: number of its turns.
        note: why it was not tried further, if that was not because of its speed.
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
        best: the setting that is clearly faster; None if there is none, or it is not known.
        applied: whether the model has it now. Otherwise its previous setting was restored.
        gain: saving of the best candidate compared with the user's setting; None if the user's setting was the fastest.
        tried: all settings, the fastest first.
        steps: training steps that tuning took.
        seconds: how long it took.
        ended: why it stopped before the result was clear; empty if it did not.
        views_percent: simulated additional saving of ``gradient_as_bucket_view=True``; None if the model has it, or
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
        """The code that gives a model the faster setting from the start; the user's setting if there is none."""
        return (self.best or self.users).arguments

    @property
    def verdict(self) -> str:
        """One or two sentences."""
        if self.best is not None and self.gain is not None:
            now = "It is now applied to the model." if self.applied else "Nothing was changed."
            return (
                f"{self.best} is faster than {self.users} by {self.gain.percent:.1f} % of the step "
                f"({self.gain.low_percent:.1f} to {self.gain.high_percent:.1f} %, 95 % bound). {now}"
            )
        if self.ended:
            return f"{self.ended} Until then no setting was clearly faster than {self.users}. Nothing was changed."
        if self.gain is None:
            return f"The current setting ({self.users}) is the fastest that was tried. Nothing was changed."
        return (
            f"No setting is clearly faster than the current one ({self.users}): the best candidate saves "
            f"{self.gain.percent:.1f} % ({self.gain.low_percent:.1f} to {self.gain.high_percent:.1f} %, 95 % bound). "
            "Nothing was changed."
        )

    def __str__(self) -> str:
        lines = [self.verdict, f"{self.steps} training steps, {self.seconds:.0f} s."]
        if self.best is not None:
            lines += ["To use it from the start:", f"    {self.arguments}"]
        if self.best is not None and self.best.hook is not None:
            lines.append(f"The comm hook {self.best.hook} is lossy. Compare the loss with and without it.")
        if self.views_percent is not None and self.views_percent >= 0.5:
            lines.append(
                f"gradient_as_bucket_view=True would save about {self.views_percent:.1f} % more (simulated, because "
                "only the constructor can set it)."
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
