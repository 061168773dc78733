"""A collective as a picture that stays: every step side by side."""

from __future__ import annotations

from ..analysis.collectives import CollectiveStep, Holds
from ..control.collectives import ShownCollective
from .paint.palette import COLOURS, rank_role
from .paint.scene_svg import sheet, text
from .paint.svg import empty_svg

__all__ = ["NOTHING", "picture"]

NOTHING = "No collective has been run yet: lab.show_collective() runs one on the ranks."
_WIDTH = 920
_TOP, _PAD, _HEAD, _FOOT = 24, 14, 34, 8


def picture(shown: ShownCollective | None) -> str:
    """Returns what each rank held after each step, one small picture a step, as a self-contained SVG."""
    if shown is None:
        return empty_svg(NOTHING)
    ranks = shown.ranks
    cell, row = max(14, min(46, 200 // ranks)), 15 if ranks <= 8 else 10
    panel = ranks * (cell + 3) + 26
    per_row = max(1, (_WIDTH - 2 * _PAD) // (panel + _PAD))
    height = _HEAD + ranks * row + _FOOT
    count = len(shown.steps) + 1
    title, _, cost = str(shown).partition(": ")
    body = _legend(ranks)
    for number in range(count):
        x = _PAD + number % per_row * (panel + _PAD)
        y = _TOP + number // per_row * height
        step = shown.steps[number - 1] if number else None
        inner = _panel(shown, number, step, cell, row)
        body.append(f"<g transform='translate({x} {y})'>{inner}</g>")
    total = _TOP + -(-count // per_row) * height + 6
    return sheet(f'<svg viewBox="0 0 {_WIDTH} {total}">{"".join(body)}</svg>', title, summary=cost)


def _legend(ranks: int) -> list[str]:
    body, x = [text(_PAD, 12, "contributions:", "faint")], _PAD + 92
    for rank in range(ranks):
        body.append(f"<rect x='{x}' y='3' width='10' height='10' fill='{_colour(rank)}'/>")
        body.append(text(x + 14, 12, f"rank {rank}" if ranks <= 8 else str(rank), "faint"))
        x += 62 if ranks <= 8 else 34
    return [*body, f"<circle cx='{x + 8}' cy='8' r='2.6'/>", text(x + 15, 12, "arrived in this step", "faint")]


def _panel(shown: ShownCollective, number: int, step: CollectiveStep | None, cell: int, row: int) -> str:
    title = "begin" if step is None else f"{number}: {'adds' if step.adds else 'replaces'}, {step.ms:.2f} ms"
    holds = shown.begin if step is None else step.holds
    arrived = {} if step is None else {(one.target, part): one.source for one in step.transfers for part in one.places}
    body = [text(16, 10, title, "bold")]
    for rank in range(shown.ranks):
        x = 16 + rank * (cell + 3)
        body.append(text(x + cell / 2, 26, str(rank), "faint", "middle"))
        for part in range(shown.ranks):
            y = _HEAD - 4 + part * row
            body.append(_cell(holds, shown.begin, rank, part, x, y, cell, row - 3))
            if (rank, part) in arrived:
                about = f"part {part} came from rank {arrived[rank, part]}"
                body.append(
                    f"<circle cx='{x + cell}' cy='{y + row / 2 - 1:.1f}' r='2.6'><title>{about}</title></circle>"
                )
    for part in range(shown.ranks):
        body.append(text(10, _HEAD + 6 + part * row, str(part), "faint", "end"))
    return "".join(body)


def _cell(holds: Holds, begin: Holds, rank: int, part: int, x: float, y: float, width: int, height: int) -> str:
    """A part of a rank's buffer: each contribution at its place."""
    slots = sorted({one for parts in begin for one in parts[part]})
    held = set(holds[rank][part])
    whole = held >= set(slots)
    about = f"rank {rank}, part {part}: " + (
        f"contributions of {', '.join(map(str, sorted(held)))}" if held else "nothing"
    )
    wide, gap = width / max(len(slots), 1), 0.6 if len(slots) > 1 else 0
    fills = "".join(
        f"<rect x='{x + place * wide:.1f}' y='{y}' width='{wide - gap:.1f}' height='{height}' fill='{_colour(one)}'/>"
        for place, one in enumerate(slots)
        if one in held
    )
    line = "#1f2328" if whole else "#c4c9ce"
    return (
        f"<g><title>{about}</title><rect x='{x}' y='{y}' width='{width}' height='{height}' fill='#f3f4f6'/>{fills}"
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='none' stroke='{line}'/></g>"
    )


def _colour(rank: int) -> str:
    return COLOURS[rank_role(rank)]
