"""Every view as one self-contained SVG picture, for saved notebooks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ...analysis import findings
from ...analysis.collectives import CollectiveStep, Holds
from ...control.collectives import ShownCollective
from ...faults import mark_kind
from ...formatting import size
from ...timeline.timeline import Timeline
from ..paint.palette import COLOURS, bucket_colour, rank_role
from ..paint.scene_svg import WIDTH, empty_svg, framed, sheet, text, tile
from .layout_words import layout_words
from .model_map import cell_label, map_cells, map_words
from .scenes import SCENES
from .step_frames import StepFrame
from .timeline_scene import timeline_scene
from .view_data import unused

__all__ = ["NO_COLLECTIVE", "collective_svg", "faults_svg", "picture", "step_svg"]

NO_COLLECTIVE = "No collective has been run yet. Run one on the ranks with lab.animate_collective()."
_ROW, _MOST_ROWS = 30, 9  # of the map of a model
_STATES = ("pending", "ready", "launched", "reduced")
_COLUMN = WIDTH / len(_STATES)
_TILE, _ACROSS = 38, 5
_MOST_LINES = 40  # of a list
_INK = "#1f2328"
_TOP, _PAD, _HEAD, _FOOT = 24, 14, 34, 8  # of the steps of a collective


def picture(view: str, timeline: Timeline, frame: StepFrame, assignment: dict[str, Any] | None) -> str:
    """Returns a view as SVG.

    Args:
        view: its name in `catalogue.VIEWS`.
        timeline: the source of the numbers.
        frame: the step that is shown.
        assignment: description of its buckets, None if it is not known.
    """
    if view == "timeline":
        return framed(timeline_scene(frame, (assignment or {}).get("module"), assignment=assignment, tips=False))
    if view == "buckets":
        return _buckets(timeline, assignment)
    if view == "findings":
        return _findings(timeline, frame.reducer)
    return framed(SCENES[view](timeline, frame.reducer, None))


def _drawing(width: float, height: float, body: Sequence[str], title: str, summary: str = "") -> str:
    """Puts SVG of this size on a sheet."""
    return sheet(f'<svg viewBox="0 0 {width:.0f} {height:.0f}">{"".join(body)}</svg>', title, summary=summary)


def _buckets(timeline: Timeline, assignment: dict[str, Any] | None) -> str:
    if assignment is None:
        return empty_svg("Buckets: bucket layout not received yet.")
    cells, depth = map_cells(assignment)
    idle, words = unused(timeline, assignment), layout_words(assignment)
    depth, buckets = min(depth, _MOST_ROWS), len(assignment["buckets"])
    body = []
    for cell in cells:
        width = (cell.end - cell.begin) * WIDTH
        if cell.depth >= depth or width < 0.4:
            continue
        x, y, rows = cell.begin * WIDTH, cell.depth * _ROW, min(cell.rows, depth - cell.depth)
        fill, ink = bucket_colour(cell.bucket, buckets) if cell.bucket >= 0 else ("#e8eaed", _INK)
        label, where = cell_label(cell, idle, words)
        short = label if words.grouped else f"b{cell.bucket}"
        fitting = next((one for one in (label, short) if 6.4 * len(one) + 6 < width), "")
        box = (x, y, max(width - 1, 0.5), rows * _ROW - 1)
        body.append(tile(*box, fill, tip=f"{cell.path or cell.name}: {where}", words=fitting, ink=ink))
        if cell.parameter in idle:
            body.append(f"<path d='{_hatching(*box)}' style='stroke:{ink};fill:none;opacity:.4'/>")
    total = sum(one["bytes"] for one in assignment["buckets"])
    order, colours = map_words(assignment, idle)
    return _drawing(WIDTH, depth * _ROW, body, f"{assignment['module']} in {order}; {size(total)}; {colours}")


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
        for style, words in (("bold", one.title), ("", one.evidence), ("role-forward", f"→ {one.remedy}")):
            for line in textwrap.wrap(words, 120):
                body.append(text(80, y + 13, line, style))
                y += 17
        y += 9
    return _drawing(WIDTH, y, body, "Findings: estimated saving in percent of the step")


def step_svg(stepping: dict[str, Any] | None) -> str:
    """Returns the buckets of each rank in their states at the last pause.

    Args:
        stepping: of `stepping.machine`; None if no backward has paused.
    """
    if not stepping:
        return empty_svg("Step through: no backward has paused. Set breakpoints with lab.dashboard('step').")
    body, y = [], 32.0
    for index, name in enumerate(_STATES):
        body.append(tile(index * _COLUMN + 2, 4, _COLUMN - 4, 20, "#eceff1"))
        body.append(text((index + 0.5) * _COLUMN, 18, name, "bold", "middle"))
    for rank in stepping["ranks"]:
        places = [_STATES.index(one[0]) for one in rank["buckets"]]
        most = max((places.count(index) for index in range(len(_STATES))), default=0)
        height = 30 + 26 * max(1, -(-most // _ACROSS))
        paused = rank["kind"] == "paused"
        edge = (COLOURS["bad"], 2) if paused else ("#c4c4c4", 1)
        body.append(tile(1, y, WIDTH - 2, height, edge=edge))
        words = f"rank {rank['rank']}, step {rank['step']}: {rank['text']}"
        body.append(text(8, y + 17, words, "bold" if paused else ""))
        body += _tiles(rank, places, y + 26, COLOURS["bad" if paused else "waiting"])
        y += height + 6
    return _drawing(WIDTH, y + 4, body, "Step through: state of each rank at the last pause")


def _tiles(rank: dict[str, Any], places: Sequence[int], top: float, here: str) -> Iterator[str]:
    count = [0] * len(_STATES)
    for bucket, ((state, arrived, of, *_), place) in enumerate(zip(rank["buckets"], places, strict=True)):
        x, y = place * _COLUMN + 8 + (count[place] % _ACROSS) * (_TILE + 3), top + (count[place] // _ACROSS) * 26
        count[place] += 1
        fill, ink = bucket_colour(bucket, len(places))
        share = arrived / max(of, 1) if state == "pending" else 1.0
        yield tile(x, y, _TILE * share, 22, fill)
        edge = (here, 3) if rank["bucket"] == bucket else ("#808080", 1)
        yield tile(x, y, _TILE, 22, edge=edge, tip=f"bucket {bucket}: {state}, {arrived} of {of} gradients")
        yield text(x + _TILE / 2, y + 15, str(bucket), "", "middle", ink if share > 0.5 else _INK)


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
    return _drawing(WIDTH, 20 + 18 * len(body), body, "Fault injection: faults, in seconds since the first")


def collective_svg(shown: ShownCollective | None) -> str:
    """Returns what each rank held after each step as a self-contained SVG, one small picture per step."""
    if shown is None:
        return empty_svg(NO_COLLECTIVE)
    ranks = shown.ranks
    cell, row = max(14, min(46, 200 // ranks)), 15 if ranks <= 8 else 10
    panel, height = ranks * (cell + 3) + 26, _HEAD + ranks * row + _FOOT
    per_row = max(1, (WIDTH - 2 * _PAD) // (panel + _PAD))
    title, _, cost = str(shown).partition(": ")
    body = [*_contributions(ranks)]
    for number, step in enumerate((None, *shown.steps)):
        x, y = _PAD + number % per_row * (panel + _PAD), _TOP + number // per_row * height
        inner = "".join(_collective_step(shown, number, step, cell, row))
        body.append(f"<g transform='translate({x} {y})'>{inner}</g>")
    total = _TOP + -(-(len(shown.steps) + 1) // per_row) * height + 6
    return _drawing(WIDTH, total, body, title, cost)


def _contributions(ranks: int) -> Iterator[str]:
    """The legend: the colour of each rank."""
    x, few = _PAD + 92, ranks <= 8
    yield text(_PAD, 12, "contributions:", "faint")
    for rank in range(ranks):
        yield tile(x, 3, 10, 10, COLOURS[rank_role(rank)])
        yield text(x + 14, 12, f"rank {rank}" if few else str(rank), "faint")
        x += 62 if few else 34
    yield f"<circle cx='{x + 8}' cy='8' r='2.6'/>{text(x + 15, 12, 'arrived in this step', 'faint')}"


def _collective_step(
    shown: ShownCollective, number: int, step: CollectiveStep | None, cell: int, row: int
) -> Iterator[str]:
    title = "start" if step is None else f"{number}: {'adds' if step.adds else 'replaces'}, {step.ms:.2f} ms"
    holds = shown.begin if step is None else step.holds
    arrived = {} if step is None else {(one.target, part): one.source for one in step.transfers for part in one.places}
    yield text(16, 10, title, "bold")
    for rank in range(shown.ranks):
        x = 16 + rank * (cell + 3)
        yield text(x + cell / 2, 26, str(rank), "faint", "middle")
        for part in range(shown.ranks):
            y = _HEAD - 4 + part * row
            yield from _cell(holds, shown.begin, rank, part, x, y, cell, row - 3)
            if (rank, part) in arrived:
                about = f"<title>part {part} came from rank {arrived[rank, part]}</title>"
                yield f"<circle cx='{x + cell}' cy='{y + row / 2 - 1:.1f}' r='2.6'>{about}</circle>"
    for part in range(shown.ranks):
        yield text(10, _HEAD + 6 + part * row, str(part), "faint", "end")


def _cell(
    holds: Holds, begin: Holds, rank: int, part: int, x: float, y: float, width: int, height: int
) -> Iterator[str]:
    """A part of a rank's buffer, with each contribution at its place."""
    slots, held = sorted({one for parts in begin for one in parts[part]}), set(holds[rank][part])
    wide, gap = width / max(len(slots), 1), 0.6 if len(slots) > 1 else 0
    yield tile(x, y, width, height, "#f3f4f6")
    for place, one in enumerate(slots):
        if one in held:
            yield tile(x + place * wide, y, wide - gap, height, COLOURS[rank_role(one)])
    what = f"contributions of {', '.join(map(str, sorted(held)))}" if held else "nothing"
    edge = _INK if held >= set(slots) else "#c4c9ce"
    yield tile(x, y, width, height, edge=(edge, 1), tip=f"rank {rank}, part {part}: {what}")
