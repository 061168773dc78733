"""What a rank does in a whole step, one phase after the other: a pure function (`marks.js` does it for the browser)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .step_frames import BEGIN, END, FINALIZE, FORWARD_BEGIN, FORWARD_END, PREVIOUS_END, StepFrame

__all__ = ["Phase", "phases"]


@dataclass(frozen=True)
class Phase:
    """One phase: milliseconds of the step's common axis; `kind`: other, forward, backward or finalize."""

    name: str
    kind: str
    begin: float
    end: float


def phases(frame: StepFrame, row: int, marks: Sequence[tuple[int, int, str]] = ()) -> list[Phase]:
    """Returns the phases of one rank, from the end of the step before to the end of the backward.

    Args:
        frame: the step.
        row: which of its ranks.
        marks: (rank, host time in ns, name), as `Timeline.marks` returns them. Outside the model a mark names what
            follows it, until the next mark or phase.
    """
    bounds, outside = frame.milliseconds(frame.bounds_ns)[row], frame.milliseconds(frame.outside_ns)[row]
    own = sorted(((at - frame.origin_ns) / 1e6, name) for rank, at, name in marks if rank == frame.ranks[row])
    forward = not math.isnan(outside[FORWARD_BEGIN]) and not math.isnan(outside[FORWARD_END])
    begin = float(bounds[BEGIN])
    first = float(outside[FORWARD_BEGIN]) if forward else begin
    found = _named(own, float(outside[PREVIOUS_END]), first, "optimizer, rest")
    if forward:
        found.append(Phase("forward", "forward", first, float(outside[FORWARD_END])))
        found += _named(own, float(outside[FORWARD_END]), begin, "loss, rest")
    found.append(Phase("backward", "backward", begin, float(bounds[FINALIZE])))
    found.append(Phase("finalize", "finalize", float(bounds[FINALIZE]), float(bounds[END])))
    return [one for one in found if one.end > one.begin]


def _named(marks: Sequence[tuple[float, str]], begin: float, end: float, first: str) -> list[Phase]:
    """The time from `begin` to `end` in pieces that the marks in between name; empty if one of both is NaN."""
    if math.isnan(begin) or math.isnan(end):
        return []
    points = [(begin, first), *((at, name) for at, name in marks if begin <= at < end), (end, "")]
    return [Phase(name, "other", at, until) for (at, name), (until, _) in itertools.pairwise(points)]
