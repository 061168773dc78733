"""A collective as a picture that stays: every step side by side."""

from __future__ import annotations

from html import escape

from ..analysis.collective_runs import CollectiveStep, Holds
from ..control.collectives import ShownCollective
from .paint.palette import COLOURS, rank_role
from .paint.svg import empty_svg

__all__ = ["NOTHING", "picture"]

NOTHING = "No collective has been run yet: lab.show_collective() runs one on the ranks."
_WIDTH = 920
_FONT = "font-family='system-ui,-apple-system,Segoe UI,sans-serif'"
_TOP, _PAD, _HEAD, _FOOT = 72, 14, 34, 8


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
    body = [_text(_PAD, 20, title, size=13, weight=600), _text(_PAD, 38, cost), *_legend(ranks)]
    for number in range(count):
        x = _PAD + number % per_row * (panel + _PAD)
        y = _TOP + number // per_row * height
        step = shown.steps[number - 1] if number else None
        inner = _panel(shown, number, step, cell, row)
        body.append(f"<g transform='translate({x} {y})'>{inner}</g>")
    total = _TOP + -(-count // per_row) * height + 6
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{total}' viewBox='0 0 {_WIDTH} {total}' "
        f"role='img' aria-label='{escape(str(shown), quote=True)}' {_FONT}>"
        f"<rect width='100%' height='100%' rx='4' fill='#fff'/>{''.join(body)}</svg>"
    )


def _legend(ranks: int) -> list[str]:
    body, x = [_text(_PAD, 58, "contributions:", fill="#59636e")], _PAD + 84
    for rank in range(ranks):
        body.append(f"<rect x='{x}' y='49' width='10' height='10' fill='{_colour(rank)}'/>")
        body.append(_text(x + 14, 58, f"rank {rank}" if ranks <= 8 else str(rank), fill="#59636e"))
        x += 62 if ranks <= 8 else 34
    return [*body, f"<circle cx='{x + 8}' cy='54' r='2.6'/>", _text(x + 15, 58, "arrived in this step", fill="#59636e")]


def _panel(shown: ShownCollective, number: int, step: CollectiveStep | None, cell: int, row: int) -> str:
    title = "begin" if step is None else f"{number}: {'adds' if step.adds else 'replaces'}, {step.ms:.2f} ms"
    holds = shown.begin if step is None else step.holds
    arrived = {} if step is None else {(one.target, part): one.source for one in step.transfers for part in one.places}
    body = [_text(16, 10, title, weight=600)]
    for rank in range(shown.ranks):
        x = 16 + rank * (cell + 3)
        body.append(_text(x + cell / 2, 26, str(rank), fill="#59636e", anchor="middle"))
        for part in range(shown.ranks):
            y = _HEAD - 4 + part * row
            body.append(_cell(holds, shown.begin, rank, part, x, y, cell, row - 3))
            if (rank, part) in arrived:
                about = f"part {part} came from rank {arrived[rank, part]}"
                body.append(
                    f"<circle cx='{x + cell}' cy='{y + row / 2 - 1:.1f}' r='2.6'><title>{about}</title></circle>"
                )
    for part in range(shown.ranks):
        body.append(_text(10, _HEAD + 6 + part * row, str(part), fill="#59636e", anchor="end"))
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


def _text(x: float, y: float, text: str, **style: object) -> str:
    look = {"size": 11, "weight": 400, "fill": "#1f2328", "anchor": "start", **style}
    font = f"font-size='{look['size']}' font-weight='{look['weight']}' fill='{look['fill']}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {font} text-anchor='{look['anchor']}'>{escape(text)}</text>"
