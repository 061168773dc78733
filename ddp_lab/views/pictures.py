"""Every view as one self-contained SVG picture: what stays in a saved notebook."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from ..analysis import findings
from ..formatting import counted, rate, size
from ..timeline.timeline import Timeline
from . import view_data
from .gradients import gradients_svg
from .model_map import map_cells
from .paint import charts
from .paint.charts import Series
from .paint.palette import PHASES, bucket_colour
from .paint.svg import empty_svg, step_svg
from .step_frames import StepFrame
from .view_data import unused

__all__ = ["framed", "picture"]

_WIDTH = 920
_FONT = "font-family='system-ui,-apple-system,Segoe UI,sans-serif'"
_RULES = {
    "text": "fill:#1f2328;font-size:12px",
    "text.faint": "fill:#59636e",
    "text.on-heat": "fill:#fff",
    ".grid": "stroke:#e6e8ea;fill:none",
    ".axis": "stroke:#59636e;fill:none",
    ".heat": "fill:#d55e00;stroke:#d8dee4;stroke-width:.5",
    ".waiting": "fill:#e69f00",
    ".reducing": "fill:#009e73",
    **{f".{name}": f"fill:{colour}" for name, (colour, _) in PHASES.items()},
}
# Prefixed: where a page holds the picture as markup, its rules must not reach other pictures.
_CSS = "".join(f".ddp-picture {selector}{{{rule}}}" for selector, rule in _RULES.items())
_ROW = 30


def picture(view: str, timeline: Timeline, frame: StepFrame, assignment: dict[str, Any] | None) -> str:
    """Returns a view as SVG.

    Args:
        view: its name (`ddp_lab.widgets.dashboard.VIEWS`).
        timeline: where the numbers are.
        frame: the step that is shown.
        assignment: description of its buckets, None if it is not known.
    """
    module = (assignment or {}).get("module")
    if view == "timeline":
        return step_svg(frame, f"{module}, " if module else "")
    made: dict[str, Callable[[], str]] = {
        "sync": lambda: _sync(timeline, frame.reducer),
        "overlap": lambda: _overlap(timeline, frame.reducer),
        "stragglers": lambda: _stragglers(timeline, frame.reducer),
        "buckets": lambda: _buckets(timeline, assignment),
        "findings": lambda: _findings(timeline, frame.reducer),
        "gradients": lambda: gradients_svg(timeline, frame.reducer),
    }
    return made[view]()


def _overlap(timeline: Timeline, reducer: int) -> str:
    found = view_data.breakdown(timeline, reducer)
    if not len(found.step):
        return empty_svg("Overlap: no step has ended yet on every rank.")
    series = [Series(name, key, getattr(found, key)) for key, (_, name) in PHASES.items()]
    efficiency = float(found.floor.sum() / found.total.sum()) if found.total.sum() > 0 else float("nan")
    title = f"Overlap: what a step consists of; {efficiency:.0%} remain without exposed communication"
    return framed(charts.stacked(found.step, series, title, "step"), title, series)


def _stragglers(timeline: Timeline, reducer: int) -> str:
    found = view_data.waiting(timeline, reducer)
    if not found.cells.size or len(found.ranks) < 2:
        return empty_svg("Stragglers: nobody has waited for anybody yet.")
    title = f"Stragglers: ms a step that all others waited for a rank alone (mean of {found.steps} steps)"
    return framed(charts.heat(found.cells, [f"rank {rank}" for rank in found.ranks], title, "bucket"), title)


def _sync(timeline: Timeline, reducer: int) -> str:
    found = view_data.sync(timeline, reducer)
    if not len(found.bucket):
        return empty_svg("Gradient sync: no bucket has been reduced yet.")
    series = [
        Series("the first rank waits for the last one", "waiting", found.late_ms),
        Series("all-reduce, once all have launched", "reducing", found.all_reduce_ms),
    ]
    notes = [f"{rate(one)} (bus)" if one == one else "" for one in found.bus_gb_s.tolist()]
    title = "Gradient sync: medians over the steps"
    return framed(charts.rows([f"bucket {one}" for one in found.bucket], series, notes, title), title, series)


def _buckets(timeline: Timeline, assignment: dict[str, Any] | None) -> str:
    if assignment is None:
        return empty_svg("Buckets: the ranks have not said yet what they hold.")
    cells, depth = map_cells(assignment)
    idle = unused(timeline, assignment)
    depth, buckets = min(depth, 9), len(assignment["buckets"])
    body = []
    for cell in cells:
        width = (cell.end - cell.begin) * _WIDTH
        if cell.depth >= depth or width < 0.4:
            continue
        x, y = cell.begin * _WIDTH, cell.depth * _ROW
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
    inner = f'<svg viewBox="0 0 {_WIDTH} {height}">{"".join(body)}</svg>'
    total = sum(one["bytes"] for one in assignment["buckets"])
    order = "rebuilt in the order of readiness" if assignment["rebuilt"] else "not rebuilt"
    hatched = f"; hatched: {counted(len(idle), 'unused parameter')}" if idle else ""
    title = f"Buckets of {assignment['module']}: {buckets}, {size(total)}, {order}; dark: launched first{hatched}"
    return framed(inner, title)


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
    found = findings.findings(facts) if facts is not None else []
    if not found:
        return empty_svg(f"Findings: {findings.headline(facts, found)}")
    body, y = [], 4
    for one in found[:12]:
        body.append(f"<text x='6' y='{y + 14}' style='font-weight:700;font-size:15px'>{one.gain_percent:.1f} %</text>")
        for style, text in (("font-weight:600", one.title), ("", one.evidence), ("fill:#0072b2", f"→ {one.remedy}")):
            for line in textwrap.wrap(text, 120):
                body.append(f"<text x='80' y='{y + 13}' style='{style}'>{escape(line)}</text>")
                y += 17
        y += 9
    return framed(f'<svg viewBox="0 0 {_WIDTH} {y}">{"".join(body)}</svg>', "Findings: gain in percent of the step")


def framed(inner: str, title: str, series: Sequence[Series] = ()) -> str:
    """Puts a chart, which takes its colours from classes, on a white sheet with its title, legend and style."""
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', inner)
    assert box is not None
    width, height = max(int(box[1]), round(7.6 * len(title))), int(box[2])
    top = 30 + (20 if series else 0)
    placed = re.sub(r"^<svg [^>]*>", f"<svg x='8' y='{top}' width='{box[1]}' height='{box[2]}' {box[0]}>", inner)
    legend, x = "", 10.0
    for one in series:
        legend += f"<rect class='{one.style}' x='{x:.0f}' y='30' width='14' height='10'/>"
        legend += f"<text x='{x + 19:.0f}' y='39' class='faint'>{escape(one.name)}</text>"
        x += 40 + 6.3 * len(one.name)
    size_ = (width + 16, height + top + 8)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='ddp-picture' width='{size_[0]}' height='{size_[1]}' "
        f"viewBox='0 0 {size_[0]} {size_[1]}' role='img' aria-label='{escape(title)}' {_FONT}><style>{_CSS}</style>"
        f"<rect width='100%' height='100%' rx='4' fill='#fff'/>"
        f"<text x='8' y='19' style='font-weight:600;font-size:13px'>{escape(title)}</text>{legend}{placed}</svg>"
    )
