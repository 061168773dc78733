"""Fault injection: the active faults, and those on the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...faults import mark_kind
from ...timeline.timeline import Timeline
from ..paint.scene_svg import empty_svg, listed
from ..scene import Notice, Table
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
    rows = [[f"{(ns - first) / 1e9:.1f}", rank, name] for ns, rank, name in sorted(marks)[-_MOST_LINES:]]
    now = "\n".join(f"⚠ active: rank {one['rank']}: {one['text']}" for one in active)
    table = Table(["seconds", "rank", "fault:"], rows)
    return listed(
        "Fault injection: faults, in seconds since the first",
        [*([Notice(now)] if active else []), *([table] if rows else [])],
    )
