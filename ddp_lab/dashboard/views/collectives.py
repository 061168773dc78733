"""Collectives: what each rank holds after each step of one, the bytes and the time of each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...analysis.collectives import CollectiveStep, Holds
from ...control.collectives import ShownCollective
from ...formatting import counted, size
from ...timeline.timeline import Timeline
from ..paint.palette import COLOURS, rank_role
from ..paint.scene_json import blocks_json
from ..paint.scene_svg import INK, WIDTH, drawing, empty_svg, text, tile
from ..scene import Axis, Bars, Panel, Scene, Table
from .view import View

__all__ = ["Collectives", "collective_page", "collective_scene", "collective_svg"]

_NONE = "No collective has been run yet. Run one on the ranks with lab.animate_collective()."
_TOP, _PAD, _HEAD, _FOOT = 24, 14, 34, 8


class Collectives(View):
    """A collective step by step; its facts are the `ShownCollective` that was run last, or None."""

    name = "collectives"
    title = "Collectives"
    about = "A collective step by step: the parts on each rank, the data sent, the time of each step."
    question = "Look inside"
    steps = model = False
    ranks = fed = True
    also = ()
    pixels = None

    def scene(self, facts: ShownCollective | None) -> Scene:
        return collective_scene(facts)

    def svg(self, facts: ShownCollective | None) -> str:
        return collective_svg(facts)

    def words(self, timeline: Timeline, facts: ShownCollective | None) -> str:
        return str(facts or _NONE)


def collective_scene(shown: ShownCollective | None) -> Scene:
    """Returns the time and the bytes of each step of a collective."""
    if shown is None or not shown.steps:
        return Scene(
            "Collective", empty="no collective has been run yet; run one on the ranks with lab.animate_collective()"
        )
    numbers = np.arange(1, len(shown.steps) + 1)
    times, adds = (np.array([getattr(step, name) for step in shown.steps]) for name in ("ms", "adds"))
    kinds = (("adds the received data", "adds", adds), ("replaces the old data", "replaces", ~adds))
    bars = [Bars(name, role, numbers[chosen], times[chosen]) for name, role, chosen in kinds if chosen.any()]
    sent = [
        Bars(f"rank {rank}", rank_role(rank), numbers, np.array([step.sent(rank) / 1024 for step in shown.steps]))
        for rank in range(shown.ranks)
    ]
    return Scene(
        str(shown).split(":")[0],
        (
            Panel(Axis("step"), Axis("ms (slowest rank)"), bars, 0.5),
            Panel(Axis("step"), Axis("KiB sent, by rank"), sent, 0.5),
        ),
    )


def collective_page(shown: ShownCollective) -> dict[str, Any]:
    """Returns what a page shows of a collective besides the parts that move: ``text``, a sentence about all of it;
    ``words`` about the state before the first step, then about each step; ``tips`` of the steps; ``blocks``."""
    return {
        "text": _page_words(shown),
        "words": ["Before the first step: the initial data of each rank.", *_step_words(shown)],
        "tips": ["\n".join(_tip(shown, number, step)) for number, step in enumerate(shown.steps, 1)],
        "blocks": blocks_json([_holds_table(shown)]),
    }


def _page_words(shown: ShownCollective) -> str:
    title = f"{shown.collective} by {shown.algorithm} over {counted(shown.ranks, 'rank')}, {size(shown.bytes)} on each"
    if not shown.steps:
        return f"{title}: a single rank has nothing to send. Start a cluster with two or more ranks."
    sent = shown.busiest_bytes
    return (
        f"{title}: {counted(len(shown.steps), 'step')} in {shown.ms:.2f} ms. Cost: {len(shown.steps)} α + "
        f"{sent / shown.bytes:.3g} × buffer × β ({size(sent)} from the busiest ranks). α: latency of a message; "
        "β: time per byte."
    )


def _busiest(shown: ShownCollective, step: CollectiveStep) -> str:
    """The bytes that the busiest rank of a step sends."""
    return size(max(step.sent(rank) for rank in range(shown.ranks)))


def _received(step: CollectiveStep) -> str:
    return "is added" if step.adds else "replaces the old data"


def _step_words(shown: ShownCollective) -> Iterator[str]:
    for number, step in enumerate(shown.steps, 1):
        most, senders = _busiest(shown, step), {one.source for one in step.transfers}
        messages = (
            f"{len(senders)} ranks send at once, {f'up to {most}' if len(set(step.bytes)) > 1 else f'{most} each'}"
        )
        if len(senders) == 1:
            (first, *others) = step.transfers
            targets = f"{len(step.transfers)} ranks" if others else f"rank {first.target}"
            messages = f"rank {first.source} sends {most} to {targets}"
        yield (
            f"Step {number} of {len(shown.steps)}: {messages}; received data {_received(step)}. It took "
            f"{step.ms:.2f} ms."
        )


def _tip(shown: ShownCollective, number: int, step: CollectiveStep) -> Iterator[str]:
    yield f"step {number} of {len(shown.steps)}"
    yield f"messages\t{len(step.transfers)}"
    yield f"busiest rank sends\t{_busiest(shown, step)}"
    yield f"received data\t{_received(step)}"
    yield f"time\t{step.ms:.2f} ms"


def _holds_table(shown: ShownCollective) -> Table:
    rows: list[list[object]] = []
    for number, step in enumerate((None, *shown.steps)):
        for rank, parts in enumerate(shown.begin if step is None else step.holds):
            sent = 0 if step is None else step.sent(rank)
            held = (f"part {part} of {'+'.join(map(str, found))}" for part, found in enumerate(parts) if found)
            took = "–" if step is None else f"{step.ms:.2f}"
            rows.append([number or "start", rank, size(sent) if sent else "–", took, "; ".join(held) or "nothing"])
    head = ["after step", "rank", "sent", "ms", "holds:"]
    return Table(head, rows, "Parts on each rank after each step", folded=True)


def collective_svg(shown: ShownCollective | None) -> str:
    """Returns what each rank held after each step as a self-contained SVG, one small picture per step."""
    if shown is None:
        return empty_svg(_NONE)
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
    return drawing(WIDTH, total, body, title, cost)


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
    edge = INK if held >= set(slots) else "#c4c9ce"
    yield tile(x, y, width, height, edge=(edge, 1), tip=f"rank {rank}, part {part}: {what}")
