"""The controls as self-contained SVG pictures: the last pause as a state machine, the faults of a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..faults import mark_kind
from ..timeline.timeline import Timeline
from .paint.palette import COLOURS, bucket_colour
from .paint.scene_svg import sheet, text
from .paint.svg import empty_svg

__all__ = ["rehearsal_svg", "step_svg"]

_WIDTH = 860
_STATES = ("pending", "ready", "launched", "reduced")
_COLUMN = _WIDTH / len(_STATES)
_TILE, _ACROSS = 38, 5
_STOP, _WAIT = COLOURS["bad"], COLOURS["waiting"]
_MOST = 40  # rows of a list


def step_svg(stepping: dict[str, Any] | None) -> str:
    """Returns the buckets of each rank in their states at the last pause.

    Args:
        stepping: of `control_step.machine`; None: nothing has paused.
    """
    if not stepping:
        return empty_svg("Step through: no backward has paused. Set breakpoints with lab.dashboard('step').")
    body, y = [], 32.0
    for index, name in enumerate(_STATES):
        x = index * _COLUMN
        body.append(f"<rect x='{x + 2:.0f}' y='4' width='{_COLUMN - 4:.0f}' height='20' fill='#eceff1'/>")
        body.append(text(x + _COLUMN / 2, 18, name, "bold", "middle"))
    for rank in stepping["ranks"]:
        places = [_STATES.index(one[0]) for one in rank["buckets"]]
        most = max((places.count(index) for index in range(len(_STATES))), default=0)
        height = 30 + 26 * max(1, -(-most // _ACROSS))
        paused = rank["kind"] == "paused"
        body.append(
            f"<rect x='1' y='{y:.0f}' width='{_WIDTH - 2}' height='{height}' fill='none' "
            f"stroke='{_STOP if paused else '#c4c4c4'}' stroke-width='{2 if paused else 1}'/>"
        )
        words = f"rank {rank['rank']}, step {rank['step']}: {rank['text']}"
        body.append(text(8, y + 17, words, "bold" if paused else ""))
        body += _tiles(rank, places, y + 26, _STOP if paused else _WAIT)
        y += height + 6
    title = "Step through: where each rank stood at the last pause"
    return _sheet(y + 4, title, body)


def _tiles(rank: dict[str, Any], places: Sequence[int], top: float, here: str) -> list[str]:
    made, count = [], [0] * len(_STATES)
    for bucket, (one, state) in enumerate(zip(rank["buckets"], places, strict=True)):
        x = state * _COLUMN + 8 + (count[state] % _ACROSS) * (_TILE + 3)
        y = top + (count[state] // _ACROSS) * 26
        count[state] += 1
        fill, ink = bucket_colour(bucket, len(places))
        share = one[1] / max(one[2], 1) if one[0] == "pending" else 1.0
        edge = f"stroke='{here}' stroke-width='3'" if rank["bucket"] == bucket else "stroke='#808080'"
        made.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{_TILE * share:.1f}' height='22' fill='{fill}'/>")
        made.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{_TILE}' height='22' fill='none' {edge}>"
            f"<title>bucket {bucket}: {one[0]}, {one[1]} of {one[2]} gradients</title></rect>"
        )
        ink = ink if share > 0.5 else "#1f2328"
        place = f"x='{x + _TILE / 2:.1f}' y='{y + 15:.1f}'"
        made.append(f"<text {place} text-anchor='middle' style='fill:{ink}'>{bucket}</text>")
    return made


def rehearsal_svg(timeline: Timeline, active: Sequence[dict[str, Any]]) -> str:
    """Returns the faults that happen, and those on the timeline, as a list.

    Args:
        timeline: with their marks.
        active: of `control_faults.fault_rows`.
    """
    marks = [(ns, rank, name) for rank, ns, name in timeline.marks() if mark_kind(name)]
    if not marks and not active:
        return empty_svg("Rehearsal: no fault has been injected. Try one with lab.dashboard('rehearsal').")
    lines = [(f"happens now: rank {one['rank']}: {one['text']}", True) for one in active]
    first = min((ns for ns, _, _ in marks), default=0)
    lines += [(f"{(ns - first) / 1e9:8.1f} s   rank {rank}: {name}", False) for ns, rank, name in sorted(marks)]
    shown = lines[-_MOST:]
    body = [
        text(12, 20 + 18 * index, f"⚠ {line}" if now else line, "bold role-bad" if now else "")
        for index, (line, now) in enumerate(shown)
    ]
    return _sheet(20 + 18 * len(shown), "Rehearsal: faults on purpose, in seconds since the first", body)


def _sheet(height: float, title: str, body: Sequence[str]) -> str:
    return sheet(f'<svg viewBox="0 0 {_WIDTH} {height:.0f}">{"".join(body)}</svg>', title)
