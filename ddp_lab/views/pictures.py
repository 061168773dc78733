"""Every view as one self-contained SVG picture: what stays in a saved notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

from ..analysis import findings
from ..formatting import counted, size
from ..timeline.timeline import Timeline
from . import scenes, view_data
from .gradients import gradient_facts
from .model_map import map_cells
from .paint.palette import COLOURS, bucket_colour
from .paint.scene_svg import WIDTH, framed, sheet
from .paint.svg import empty_svg
from .step_frames import StepFrame
from .timeline_scene import timeline_scene
from .view_data import unused

__all__ = ["picture"]

_ROW = 30


def picture(view: str, timeline: Timeline, frame: StepFrame, assignment: dict[str, Any] | None) -> str:
    """Returns a view as SVG.

    Args:
        view: its name (`ddp_lab.widgets.dashboard.VIEWS`).
        timeline: where the numbers are.
        frame: the step that is shown.
        assignment: description of its buckets, None if it is not known.
    """
    made: dict[str, Callable[[], str]] = {
        "timeline": lambda: framed(timeline_scene(frame, (assignment or {}).get("module"))),
        "sync": lambda: framed(scenes.sync_scene(view_data.sync(timeline, frame.reducer))),
        "overlap": lambda: framed(scenes.overlap_scene(view_data.breakdown(timeline, frame.reducer))),
        "stragglers": lambda: framed(scenes.stragglers_scene(view_data.waiting(timeline, frame.reducer))),
        "buckets": lambda: _buckets(timeline, assignment),
        "findings": lambda: _findings(timeline, frame.reducer),
        "gradients": lambda: framed(scenes.gradients_scene(gradient_facts(timeline, frame.reducer))),
    }
    return made[view]()


def _buckets(timeline: Timeline, assignment: dict[str, Any] | None) -> str:
    if assignment is None:
        return empty_svg("Buckets: the ranks have not said yet what they hold.")
    cells, depth = map_cells(assignment)
    idle = unused(timeline, assignment)
    depth, buckets = min(depth, 9), len(assignment["buckets"])
    body = []
    for cell in cells:
        width = (cell.end - cell.begin) * WIDTH
        if cell.depth >= depth or width < 0.4:
            continue
        x, y = cell.begin * WIDTH, cell.depth * _ROW
        rows = min(cell.rows, depth - cell.depth)
        fill, ink = bucket_colour(cell.bucket, buckets) if cell.bucket >= 0 else ("#e8eaed", "#1f2328")
        without = cell.parameter in idle
        name = f"layer {cell.name}" if cell.name.isdigit() else cell.name
        label = name if cell.parameter < 0 else f"{name} · {'unused' if without else f'b{cell.bucket}'}"
        where = ("several buckets" if cell.bucket < 0 else f"bucket {cell.bucket}") + (", unused" if without else "")
        body.append(
            f"<rect x='{x:.1f}' y='{y}' width='{max(width - 1, 0.5):.1f}' height='{rows * _ROW - 1}' fill='{fill}'>"
            f"<title>{escape(cell.path or cell.name)}: {where}</title></rect>"
        )
        if without:
            lines = _hatching(x, y, max(width - 1, 0.5), rows * _ROW - 1)
            body.append(f"<path d='{lines}' style='stroke:{ink};fill:none;opacity:.4'/>")
        text = next((one for one in (label, f"b{cell.bucket}") if 6.4 * len(one) + 6 < width), "")
        if text:
            body.append(f"<text x='{x + 4:.1f}' y='{y + 19}' style='fill:{ink}'>{escape(text)}</text>")
    height = depth * _ROW
    inner = f'<svg viewBox="0 0 {WIDTH} {height}">{"".join(body)}</svg>'
    total = sum(one["bytes"] for one in assignment["buckets"])
    order = "rebuilt in the order of readiness" if assignment["rebuilt"] else "not rebuilt"
    hatched = f"; hatched: {counted(len(idle), 'unused parameter')}" if idle else ""
    title = f"Buckets of {assignment['module']}: {buckets}, {size(total)}, {order}; dark: launched first{hatched}"
    return sheet(inner, title)


def _hatching(x: float, y: float, width: float, height: float) -> str:
    """A path of lines that rise to the right, 6 apart, within a rectangle."""
    lines, at = [], x - height
    while at < x + width:
        left, right = max(at, x), min(at + height, x + width)
        if left < right:
            lines.append(f"M{left:.1f} {y + height - (left - at):.1f}L{right:.1f} {y + height - (right - at):.1f}")
        at += 6
    return "".join(lines)


def _findings(timeline: Timeline, reducer: int) -> str:
    facts = timeline.judgement(reducer)
    found = findings.findings(facts)
    if not found:
        return empty_svg(f"Findings: {findings.headline(facts, found)}")
    body, y = [], 4
    for one in found[:12]:
        body.append(f"<text x='6' y='{y + 14}' style='font-weight:700;font-size:15px'>{one.gain_percent:.1f} %</text>")
        for style, text in (
            ("font-weight:600", one.title),
            ("", one.evidence),
            (f"fill:{COLOURS['forward']}", f"→ {one.remedy}"),
        ):
            for line in textwrap.wrap(text, 120):
                body.append(f"<text x='80' y='{y + 13}' style='{style}'>{escape(line)}</text>")
                y += 17
        y += 9
    return sheet(f'<svg viewBox="0 0 {WIDTH} {y}">{"".join(body)}</svg>', "Findings: gain in percent of the step")
