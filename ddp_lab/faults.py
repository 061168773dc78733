"""Fault injection: faults of a rank, a layer or a network link that can be injected.

Plain records, for both sides of the wire: `Cluster.inject` sends one to its rank, where `ddp_lab.fault_injection`
injects it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "DeadRank",
    "DroppedGradient",
    "Fault",
    "SlowLayer",
    "SlowLink",
    "SlowRank",
    "from_dict",
    "mark_kind",
    "to_dict",
]


@dataclass(frozen=True)
class Fault:
    """Common to all faults.

    Attributes:
        rank: the (global) rank on which it happens.
    """

    rank: int

    def text(self) -> str:
        """A few words for a mark on the timeline, without the rank, which the mark contains."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises `ValueError` if it is invalid."""
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}")
        for name, value in vars(self).items():
            if name.endswith("seconds") and not 0 <= value < 86_400:
                raise ValueError(f"{name} must be between 0 and a day, got {value}")


@dataclass(frozen=True)
class SlowRank(Fault):
    """Each forward of the rank takes longer: a slower device, or slower input.

    Attributes:
        seconds: the delay.
    """

    seconds: float

    def text(self) -> str:
        return f"slow rank: {_ms(self.seconds)} in each forward"


@dataclass(frozen=True)
class SlowLayer(Fault):
    """The gradient of one parameter, and all that follow it, are late on the rank.

    Attributes:
        parameter: its qualified name in the module.
        seconds: the delay.
    """

    parameter: str
    seconds: float

    def text(self) -> str:
        return f"slow layer: {_ms(self.seconds)} before the gradient of '{self.parameter}'"


@dataclass(frozen=True)
class SlowLink(Fault):
    """Each bucket of the rank is delayed before its collective starts, as if it had to pass a slow link first.

    It does not slow down the collective itself. The buckets of this rank are delayed one after the other; then the
    collective runs at its own speed, and all ranks wait for it. The computation continues meanwhile.

    Attributes:
        latency_seconds: delay of each bucket.
        mb_per_second: 10⁶ bytes per second; None: unlimited.
    """

    latency_seconds: float = 0.0
    mb_per_second: float | None = None

    def text(self) -> str:
        rate = "" if self.mb_per_second is None else f" and {self.mb_per_second:g} MB/s"
        return f"slow link: {_ms(self.latency_seconds)}{rate} before each collective"

    def check(self) -> None:
        super().check()
        if self.mb_per_second is not None and not self.mb_per_second > 0:
            raise ValueError(f"mb_per_second must be positive, got {self.mb_per_second}")


@dataclass(frozen=True)
class DroppedGradient(Fault):
    """In one backward the gradient of a parameter is missing on the rank, as with a branch that was not executed.

    The next forward raises the usual error ("Expected to have finished reduction ..."), on all ranks. A program that
    enters another collective before that forward waits in it for ranks that wait for the bucket, as with a real fault.
    With `find_unused_parameters` the parameter counts as unused on that rank instead.

    Attributes:
        parameter: its qualified name in the module.
    """

    parameter: str

    def text(self) -> str:
        return f"dropped gradient of '{self.parameter}'"


@dataclass(frozen=True)
class DeadRank(Fault):
    """The rank's process is killed (SIGKILL) at its next forward."""

    def text(self) -> str:
        return "this rank dies"


_KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind for kind in (SlowRank, SlowLayer, SlowLink, DroppedGradient, DeadRank)
}


def to_dict(fault: Fault) -> dict[str, Any]:
    """The fault, JSON-able."""
    return {"kind": type(fault).__name__, **asdict(fault)}


def from_dict(made: dict[str, Any]) -> Fault:
    """The inverse of `to_dict`.

    Raises:
        ValueError: there is no such fault, or it is invalid.
    """
    values = dict(made)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"there is no fault {kind!r}: choose one of {', '.join(_KINDS)}")
    fault = _KINDS[kind](**values)
    fault.check()
    return fault


_BEGINNINGS = ("slow rank: ", "slow layer: ", "slow link: ", "dropped gradient of '", "this rank dies")
_ONCE = _BEGINNINGS[3:]


def mark_kind(name: str) -> str | None:
    """The meaning of a mark on the timeline for faults.

    Returns:
        ``"begin"`` and ``"end"`` of one that lasts, ``"once"`` for one that is over at once, None for other marks.
    """
    if name.startswith(_ONCE):
        return "once"
    if name.startswith(_BEGINNINGS):
        return "begin"
    return "end" if name.startswith("end of ") and name[7:].startswith(_BEGINNINGS) else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms"
