"""Fault injection: the active faults, and those on the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...faults import mark_kind
from ...timeline.timeline import Timeline
from ..paint.scene_svg import WIDTH, drawing, empty_svg, text
from .view import View

__all__ = ["FaultInjection", "faults_svg"]

_MOST_LINES = 40


class FaultInjection(View):
    """Faults; its facts are the arguments of `faults_svg`."""

    name = "fault_injection"
    title = "Fault injection"
    about = "Injects, lists and ends faults."
    question = "Try it"
    steps = model = False
    ranks = fed = True
    also = ()
    pixels = None

    def svg(self, facts: tuple[Timeline, Sequence[dict[str, Any]]]) -> str:
        return faults_svg(*facts)


def faults_svg(timeline: Timeline, active: Sequence[dict[str, Any]]) -> str:
    """Returns the active faults, and those on the timeline, as a list.

    Args:
        timeline: with their marks.
        active: of `parts.fault_rows`.
    """
    marks = [(ns, rank, name) for rank, ns, name in timeline.marks() if mark_kind(name)]
    if not marks and not active:
        return empty_svg(
            "Fault injection: no fault has been injected. Inject one with lab.dashboard('fault_injection')."
        )
    first = min((ns for ns, _, _ in marks), default=0)
    lines = [(f"⚠ active: rank {one['rank']}: {one['text']}", "bold role-bad") for one in active]
    lines += [(f"{(ns - first) / 1e9:8.1f} s   rank {rank}: {name}", "") for ns, rank, name in sorted(marks)]
    body = [text(12, 20 + 18 * index, line, style) for index, (line, style) in enumerate(lines[-_MOST_LINES:])]
    return drawing(WIDTH, 20 + 18 * len(body), body, "Fault injection: faults, in seconds since the first")
