"""Stragglers: how long the others waited for each rank, by bucket and step; where its own computation falls behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...analysis.findings import Facts
from ...analysis.findings.ranks import last_most_often, varying_rank
from ...analysis.step_metrics import gradient_sync
from ...formatting import counted, ms, step_range
from ...timeline.steady_steps import ANALYSED_STEPS, WARM_UP, SideBySide
from ...timeline.timeline import LatePlace, Timeline
from ..scene import Axis, Block, Cells, Panel, Scene, Table, Values
from .layout_words import BUCKETS, LayoutWords
from .sync import words_of
from .view import Reported, Selection, View

__all__ = ["Stragglers", "StragglersFacts", "Waiting", "last_shares", "late_text", "stragglers_scene", "waiting"]
__all__ += ["waiting_of"]


@dataclass(frozen=True)
class Waiting:
    """How long the other ranks waited for each rank.

    Attributes:
        ranks: the ranks of the rows.
        cells: ms per step that all other ranks waited for this one, shape ``[ranks, buckets]``.
        share: the share of the analysed steps in which each rank was last, NaN where that is not known.
        steps: the number of steps.
        by_step: ms of each step in the bucket with the longest wait, shape ``[ranks, steps]``: the waits of a step's
            buckets overlap, so they cannot be added.
        step: the steps of the columns of `by_step`.
    """

    ranks: tuple[int, ...]
    cells: Values
    share: Values
    steps: int
    by_step: Values
    step: Sequence[int]


@dataclass(frozen=True)
class StragglersFacts:
    """The numbers of the view.

    Attributes:
        waiting: how long the others waited for each rank.
        words: for the model's buckets.
        text: the verdict, in a sentence.
        places: straggler locations, the most expensive first.
        delay: rank -> ms that the others waited in the steps in which it was last (median); NaN: never.
    """

    waiting: Waiting
    words: LayoutWords
    text: str
    places: Sequence[LatePlace]
    delay: Mapping[int, float]


class Stragglers(View):
    """How long the others waited for each rank."""

    name = "stragglers"
    title = "Stragglers"
    about = "How long the others waited for each rank, by bucket and step, and where its own computation fell behind."
    question = "Who is late"
    kept = True
    pixels = (150, 24)

    def facts(self, timeline: Timeline, chosen: Selection) -> StragglersFacts:
        model = chosen.model_in(timeline)
        judged = chosen.analysis_input_in(timeline)
        late = judged.kind.late_places(judged) if judged is not None else []
        return StragglersFacts(
            waiting_of(timeline, chosen, judged),
            words_of(timeline, model),
            late_text(judged, late),
            late,
            _delays(judged),
        )

    def scene(self, facts: StragglersFacts) -> Scene:
        return stragglers_scene(facts.waiting, facts.words)

    def blocks(self, facts: StragglersFacts) -> Sequence[Block]:
        found, words = facts.waiting, facts.words
        made: list[Block] = [facts.text]
        if facts.places:
            made.append(_places_table(facts.places))
        if not found.steps or len(found.ranks) < 2:
            return made
        below = (
            f"Below: time during which every other rank had launched a {words.unit}'s {words.reduction} and this rank "
            f"had not. A rank that falls behind stays late in the {words.unit}s that follow."
        )
        return [*made, below, _page_scene(found, words, facts.text), _last_table(facts)]

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        facts = self.facts(timeline, Selection(chosen.model))
        if not facts.waiting.steps or len(facts.waiting.ranks) < 2:
            return None
        words = facts.words
        caption = (
            f"Time per step (ms) during which every other rank had launched a {words.unit}’s {words.reduction} and "
            f"this rank had not. A rank that falls behind stays late in the {words.unit}s that follow, so look at the "
            f"{words.falls_behind}. The strongest colour is the longest wait."
        )
        return Reported("Waiting for stragglers", caption, self.scene(facts))


def waiting(timeline: Timeline, reducer: int | None = None, last_steps: int = ANALYSED_STEPS) -> Waiting:
    """Returns how long the others waited for each rank in the newest steps; arguments as for `overlap.breakdown`."""
    return waiting_of(timeline, Selection(reducer, last_steps), timeline.analysis_input(reducer))


def last_shares(facts: Facts | None) -> dict[int, float]:
    """rank -> the share of the analysed steps in which it was last; empty if none were analysed."""
    return {} if facts is None else dict(zip(facts.steps.ranks, facts.last.share.tolist(), strict=True))


def waiting_of(timeline: Timeline, chosen: Selection, judged: Facts | None) -> Waiting:
    """Returns how long the others waited for each rank in the chosen steps; `judged`: who was last, of those."""
    model, layout = chosen.model_in(timeline), chosen.layout_in(timeline)
    group = next((one.ranks for one in timeline.reducers() if one.reducer == model), ())
    steps = np.zeros(0, np.int64) if layout is None else layout.warm(WARM_UP, chosen.last_steps or ANALYSED_STEPS)
    views = timeline.views_of(model, steps)
    side = SideBySide([one for one in views if one.rank in group], steps)
    launched, reduced = side.bucket("launched"), side.bucket("reduced")
    number = launched.shape[1:]  # steps, buckets
    flat = (len(side.views), number[0] * number[1])
    known = gradient_sync(launched.reshape(flat), reduced.reshape(flat), np.full(flat[1], -1))
    last, alone, took = (one.reshape(number) for one in (known.last, known.alone_ms, known.all_reduce_ms))
    step, bucket = np.nonzero(np.isfinite(took))
    described = (layout.description or {}).get("buckets", ()) if layout is not None else ()
    ranks = tuple(sorted({*group, *(one.rank for one in views)}))
    cells = np.zeros((len(ranks), max(len(described), int(bucket.max(initial=-1)) + 1)))
    seen, column = np.unique(step, return_inverse=True)
    by_step = np.zeros((len(ranks), len(seen)))
    if len(seen) and len(side.views) > 1:
        of = np.array([one.rank for one in side.views])[last[step, bucket]]
        row = np.searchsorted(ranks, of)
        np.add.at(cells, (row, bucket), alone[step, bucket] / len(seen))
        np.maximum.at(by_step, (row, column), alone[step, bucket])
    shares = last_shares(judged)
    share = np.array([shares.get(rank, np.nan) for rank in ranks])
    return Waiting(ranks, cells, share, len(seen), by_step, steps[seen].tolist())


def stragglers_scene(found: Waiting, words: LayoutWords = BUCKETS) -> Scene:
    """Returns how long the others waited for each rank, by rank and bucket; `words`: for those."""
    if not found.cells.size or len(found.ranks) < 2:
        return Scene("Stragglers", empty="no rank has waited for another one yet")
    known = zip(found.ranks, found.share.tolist(), strict=True)
    names = [f"rank {rank}" + (f": last in {share:.0%} of steps" if share == share else "") for rank, share in known]
    buckets = range(found.cells.shape[1])
    rows = [[rank, *map(float, row), float(row.sum())] for rank, row in zip(found.ranks, found.cells, strict=True)]
    return Scene(
        f"Stragglers: time that all other ranks waited for one rank (ms per step, mean of {found.steps} steps)",
        (
            Panel(
                Axis(words.column, [words.cell(one) for one in buckets]),
                Axis("", names),
                (Cells(found.cells, "ms per step"),),
            ),
        ),
        Table(["rank", *map(words.name, buckets), "total"], rows),
    )


def _page_scene(found: Waiting, words: LayoutWords, text: str) -> Scene:
    """The waits by bucket and by step, each place of which can be chosen."""
    ranks = Axis("", [f"rank {rank}" for rank in found.ranks])
    names = [words.cell(one) for one in range(found.cells.shape[1])]
    buckets = Axis(words.column, names, chooses="bucket")
    steps = Axis("step", [str(one) for one in found.step], chooses="step")
    by_bucket = f"By {words.unit} (mean of {counted(found.steps, 'step')})"
    by_step = f"By step ({words.unit} with the longest wait)"
    return Scene(
        f"Stragglers. {text}",
        (
            Panel(buckets, ranks, (Cells(found.cells, "ms per step", "the others waited"),), heading=by_bucket),
            Panel(steps, ranks, (Cells(found.by_step, "ms", "the others waited"),), heading=by_step),
        ),
    )


def _places_table(places: Sequence[LatePlace]) -> Table:
    rows = [
        [
            one.rank,
            _where(one),
            one.delay_ms,
            f"{100 * one.share:.0f} %",
            one.pattern,
            f"{one.cost_percent:.1f} % of the step",
        ]
        for one in places
    ]
    return Table(
        ["rank", "where:", "delay ms", "in steps", "pattern:", "cost:"],
        rows,
        "Where a rank's own computation falls behind",
        notes=[
            "",
            "first place at which the rank's own computation falls behind the others'",
            "median over the steps in which it is late",
            "share of the steps in which it is late",
            "persistent: in most steps; data-dependent: when the rank's forward takes longer; random: in some steps",
            "what the steps would save without the delay",
        ],
    )


def _last_table(facts: StragglersFacts) -> Table:
    """The analysed steps in which each rank was last, and how long the others then waited: those of the sentence."""
    found = facts.waiting
    longest = found.by_step.mean(axis=1) if found.steps else np.zeros(len(found.ranks))
    rows = [
        [rank, "–" if share != share else f"{100 * share:.0f}", facts.delay.get(rank, float("nan")), float(wait)]
        for rank, share, wait in zip(found.ranks, found.share.tolist(), longest, strict=True)
    ]
    head = ["rank", "last, % of steps", "wait for it then, ms (median)", "wait for it, ms per step (longest)"]
    return Table(head, rows, "Steps in which each rank was last", folded=True)


def _delays(facts: Facts | None) -> dict[int, float]:
    """rank -> ms that the others waited in the analysed steps in which it was last."""
    if facts is None or len(facts.steps.ranks) < 2:
        return {}
    return dict(zip(facts.steps.ranks, (facts.last.delay_ns / 1e6).tolist(), strict=True))


def late_text(facts: Facts | None, late: Sequence[LatePlace]) -> str:
    """Returns a sentence about stragglers, in the same words as findings and the summary.

    Args:
        facts: None if no step is complete on every rank.
        late: the straggler locations that were found in them, the most expensive first.
    """
    if facts is None or not len(facts.steps):
        return "No step is complete on every rank yet."
    judged = f"{counted(len(facts.steps), 'step')} ({step_range(facts.steps.step.tolist())})"
    if late:
        worst = late[0]
        if worst.words:
            often = f"in {100 * worst.share:.0f} % of the steps"
            told = f"Rank {worst.rank} is late {worst.words}, by {ms(worst.delay_ms)} {often}."
        elif worst.where == "varying":
            told = varying_rank(worst.rank, worst.share, worst.delay_ms)
        else:
            told = (
                f"Rank {worst.rank} falls behind {_where(worst)}, by {ms(worst.delay_ms)} in {100 * worst.share:.0f} % "
                f"of the steps ({worst.pattern})."
            )
        return f"{told} It costs {worst.cost_percent:.1f} % of the step. Analysed: {judged}."
    if len(facts.steps.ranks) < 2:
        return "A single rank has no stragglers."
    return f"No rank is a straggler in {judged}. {last_most_often(facts)}".rstrip()


def _where(one: LatePlace) -> str:
    if one.words:
        return one.words
    if one.parameter is not None:
        return f"at the gradient of {one.parameter}" + (f" (bucket {one.bucket})" if one.bucket is not None else "")
    if one.bucket is not None:
        return f"in bucket {one.bucket}"
    if one.where == "everywhere":
        return "throughout its backward"
    if one.where == "varying":
        return "at varying places"
    return "before its backward (input data, forward, code between the steps)"
