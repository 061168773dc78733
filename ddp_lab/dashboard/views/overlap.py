"""Overlap: the time breakdown of each step, its efficiency, and the named parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analysis.step_metrics import Breakdown
from ...analysis.step_parts import PARTS, SPANS, StepParts
from ...formatting import counted, enumeration, ms, step_range
from ...timeline.steady_steps import ANALYSED_STEPS
from ...timeline.summary import UNTOLD
from ...timeline.tables import span_columns
from ...timeline.tables.span_columns import breakdown_of, known_steps
from ...timeline.timeline import Timeline
from ..paint.palette import PHASES, TITLES
from ..scene import Axis, Bars, Block, Line, Panel, Scene, Table, robust_top
from .view import Reported, Selection, View

__all__ = ["Overlap", "OverlapFacts", "breakdown", "overlap_scene", "parts_table", "parts_words"]

_STEPS = 200
_PAGE_STEPS, _PAGE_COLUMNS, _PAGE_ROWS = 500, 250, 100  # as many steps as a page keeps
_MOST_ROWS = 50  # of a table
_MOST_RANKS, _MOST_LINES, _LARGEST = 8, 3, 4  # of a table of parts
_NONE = "No step is complete on every rank yet."


@dataclass(frozen=True)
class OverlapFacts:
    """The numbers of the view.

    Attributes:
        found: the steps.
        words: the typical step of those that are analysed, in a sentence.
        parts: where the time of a step goes.
        untold: the steps are known, but not how much of them is exposed communication.
    """

    found: Breakdown
    words: str
    parts: StepParts | None = None
    untold: bool = False


class Overlap(View):
    """The time breakdown of each step."""

    name = "overlap"
    title = "Overlap"
    about = "The time breakdown of each step, and its efficiency: the share that is not exposed communication."
    question = "How fast"
    kept = True
    pixels = (480, 0)

    def facts(self, timeline: Timeline, chosen: Selection) -> OverlapFacts:
        model = chosen.model_in(timeline)
        if chosen.between is not None:
            held = timeline.held_steps(model)
            held = held[(held >= chosen.between[0]) & (held <= chosen.between[1])][-_PAGE_STEPS:]
            found = breakdown_of(known_steps(span_columns.step_columns(timeline.views_of(model, held))))
        else:
            found = breakdown(timeline, chosen.model, chosen.last_steps or _STEPS)
        layout = chosen.layout_in(timeline)
        judged = found.step[:0] if layout is None else layout.step
        return OverlapFacts(
            found,
            overlap_words(found, np.isin(found.step, judged)),
            timeline.parts(model) if model >= 0 else None,
            untold=not len(found.step) and layout is not None,
        )

    def scene(self, facts: OverlapFacts) -> Scene:
        if facts.untold:
            return Scene(self.title, empty=f"how much of a step is exposed communication is not known: {UNTOLD}")
        return overlap_scene(facts.found)

    def blocks(self, facts: OverlapFacts) -> Sequence[Block]:
        scene = overlap_scene(facts.found, _PAGE_COLUMNS)
        if scene.empty:
            return super().blocks(facts)
        made: list[Block] = [facts.words, scene, _page_table(facts.found)]
        if facts.parts is not None and facts.parts.total:
            head, rows = parts_table(facts.parts)
            made += [parts_words(facts.parts), Table([f"{head[0]}:", *head[1:]], rows, "Parts of a step (ms, means)")]
        return made

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported:
        layout = timeline.analysis_layout(chosen.model_in(timeline))
        steps = np.zeros(0, np.int64) if layout is None else layout.step[-(chosen.last_steps or _STEPS) :]
        views = timeline.views_of(chosen.model_in(timeline), steps)
        caption = "Means over the ranks. Overlapped communication runs during the backward’s computation. The table "
        scene = overlap_scene(breakdown_of(known_steps(span_columns.step_columns(views))))
        return Reported("Step time breakdown", f"{caption}holds the newest 50 steps.", scene)


def breakdown(timeline: Timeline, reducer: int | None = None, last_steps: int = _STEPS) -> Breakdown:
    """Returns the time breakdown of the complete steps of a model.

    Args:
        timeline: the source of the steps.
        reducer: which model; None for the most recently active.
        last_steps: how many of the newest ones.
    """
    return breakdown_of(
        span_columns.known_steps(timeline.step_columns(Selection(reducer).model_in(timeline), last_steps))
    )


def _page_table(found: Breakdown) -> Table:
    """The newest steps, the last one first, with all phases."""
    rows = [
        [int(found.step[at]), found.total[at], *(getattr(found, key)[at] for key in PHASES), f"{share:.0f} %"]
        for at, share in list(enumerate((100 * found.efficiency).tolist()))[-_PAGE_ROWS:][::-1]
    ]
    caption = "Time breakdown of the newest steps (ms, means over the ranks)"
    return Table(["step", "ms", *(name for _, name in PHASES.values()), "efficiency"], rows, caption, folded=True)


def overlap_words(found: Breakdown, judged: Any, most: int = ANALYSED_STEPS) -> str:
    """Returns the medians of the newest steps in a sentence.

    Args:
        found: the steps.
        judged: which of them have the bucket layout that is analysed.
        most: how many of those to use.
    """
    chosen = np.flatnonzero(judged)[-most:]
    if not len(chosen):
        return _NONE
    total, floor, exposed, hidden, share = (
        float(np.median(values[chosen]))
        for values in (found.total, found.floor, found.exposed, found.hidden, found.efficiency)
    )
    steps = "one step" if len(chosen) == 1 else f"the last {len(chosen)} steps"
    what = "a step takes" if np.isfinite(found.measured[chosen[-1]]) else "forward and backward take"
    both = hidden + exposed
    overlapped = f"; {100 * hidden / both:.0f} % of the communication is overlapped" if both > 0 else ""
    return (
        f"Medians of {steps} ({found.step[chosen[0]]}–{found.step[chosen[-1]]}): {what} {ms(total)}, of which "
        f"{ms(exposed)} are exposed communication. No-communication baseline: {ms(floor)}, efficiency "
        f"{100 * share:.0f} %{overlapped}."
    )


def overlap_scene(found: Breakdown, most: int = 400) -> Scene:
    """Returns the time breakdown of each step as columns, and its efficiency.

    Args:
        found: the steps.
        most: the most columns; if there are more steps, each column is the median of neighbouring steps.
    """
    if not len(found.step):
        return Scene("Overlap", empty="no step is complete on every rank yet")
    firsts = np.arange(0, len(found.step), -(-len(found.step) // most))
    phases = {key: name for key, (_, name) in PHASES.items() if key not in SPANS or getattr(found, key).any()}
    step, parts = found.step[firsts], {key: _binned(getattr(found, key), firsts) for key in phases}
    total = np.sum([*parts.values()], axis=0)
    floor = total - parts["exposed"]
    efficiency = np.divide(100 * floor, total, out=np.full(len(total), np.nan), where=total > 0)
    top = robust_top(total)
    bars = [Bars(name, key, step, parts[key], about=TITLES[key]) for key, name in phases.items()]
    ends = found.step[np.append(firsts[1:], len(found.step)) - 1].tolist() if len(firsts) < len(found.step) else ()
    x = Axis("step", ends=ends, chooses="step")
    share = floor.sum() / total.sum() if total.sum() > 0 else float("nan")
    rows = [
        [int(found.step[i]), *(float(getattr(found, key)[i]) for key in phases), float(100 * found.efficiency[i])]
        for i in range(max(0, len(found.step) - _MOST_ROWS), len(found.step))
    ]
    return Scene(
        f"Overlap: step time breakdown; without exposed communication a step would take {share:.0%} of its time "
        f"(mean of {step_range(found.step.tolist())})",
        (
            Panel(x, Axis("ms per step", top=top, unit="ms"), bars, 0.75, total="step"),
            Panel(
                x,
                Axis("efficiency, %", top=100.0, unit="%"),
                (Line("efficiency", "line", step, efficiency),),
                0.25,
            ),
        ),
        Table(["step", *(f"{name}, ms" for name in phases.values()), "efficiency, %"], rows),
    )


def _binned(values: Any, firsts: Any) -> Any:
    """Medians of neighbouring values: of equally many, from one of `firsts` to the next."""
    if len(firsts) == len(values):
        return values
    each = int(firsts[1]) if len(firsts) > 1 else len(values)
    whole = len(values) // each * each
    medians = np.median(values[:whole].reshape(-1, each), axis=1)
    return np.append(medians, np.median(values[whole:])) if whole < len(values) else medians


def parts_table(found: StepParts) -> tuple[list[str], list[list[Any]]]:
    """Returns the named parts of a step as a table: its columns, and a row for each part and each of its lines.

    Columns: part, ms (mean over the ranks), its share of the step in percent, then ms by rank; with more than
    `_MOST_RANKS` ranks the largest and its rank instead. Rows of lines begin with two spaces.
    """
    ranks, mean = list(found.by_rank), found.mean
    total = found.total
    few = len(ranks) <= _MOST_RANKS
    head = ["part", "ms", "%", *([f"rank {rank}" for rank in ranks] if few else ["most", "on rank"])]
    rows: list[list[Any]] = []
    for part in mean:
        lines = [(PARTS[part], found.seconds(part))]
        lines += [(f"  {place}", by_rank) for place, by_rank in found.lines(part)[:_MOST_LINES]]
        for name, by_rank in lines:
            own = [1e3 * by_rank.get(rank, 0.0) for rank in ranks]
            worst = max(range(len(own)), key=own.__getitem__)
            last = own if few else [own[worst], str(ranks[worst])]
            of_all = sum(own) / len(own)
            rows.append([name, of_all, 100 * of_all / (1e3 * total), *last])
    return head, rows


def parts_words(found: StepParts) -> str:
    """Returns where the time of a step goes in one sentence; "" without steps."""
    mean, total = found.mean, found.total
    if not total:
        return ""
    named = sorted(((part, one) for part, one in mean.items() if part != "unnamed"), key=lambda one: -one[1])
    largest = [f"{PARTS[part]} {100 * one / total:.0f} %" for part, one in named[:_LARGEST]]
    seen = sum(found.samples.values())
    return (
        f"Means of {counted(found.steps, 'step')}: {enumeration(largest)}. {100 * found.named:.0f} % of the step is "
        f"accounted for; lines are estimates from {counted(seen, 'sample')} of the ranks' stacks."
    )
