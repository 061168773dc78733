"""The views as scenes: axes and marks from a view's numbers, one function per view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...analysis import findings
from ...analysis.findings import Finding
from ...analysis.step_metrics import Breakdown
from ...analysis.step_parts import SPANS
from ...control.collectives import ShownCollective
from ...formatting import rate, step_range
from ...timeline.summary import UNTOLD
from ...timeline.timeline import Timeline
from ..paint.palette import LABELS, PHASES, rank_role
from ..scene import Axis, Bars, Cells, Line, Panel, Rule, Scene, Table
from . import view_data
from .gradients import gradient_facts, gradients_words
from .groups import group_lanes, groups_scene
from .layout_words import BUCKETS, LayoutWords
from .overview import overview_scene
from .parameter_groups import parameter_groups_scene
from .view_data import Sync, Waiting

__all__ = [
    "SCENES",
    "collective_scene",
    "findings_scene",
    "gradients_scene",
    "overlap_scene",
    "stragglers_scene",
    "sync_scene",
    "what_if_scene",
    "what_if_words",
]

_MOST_ROWS = 50  # of a table
_MOST_LINES = 8
_NOT_WATCHED = "no step has been monitored yet; call lab.watch_gradients(), or model.watch_gradients() while training"


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
    # A few long steps (the first ones) must not flatten all others.
    top = float(min(total.max(), 1.6 * np.quantile(total, 0.95))) or 1.0
    bars = [Bars(name, key, step, parts[key]) for key, name in phases.items()]
    share = floor.sum() / total.sum() if total.sum() > 0 else float("nan")
    rows = [
        [int(found.step[i]), *(float(getattr(found, key)[i]) for key in phases), float(100 * found.efficiency[i])]
        for i in range(max(0, len(found.step) - _MOST_ROWS), len(found.step))
    ]
    return Scene(
        f"Overlap: step time breakdown; without exposed communication a step would take {share:.0%} of its time "
        f"(mean of {step_range(found.step.tolist())})",
        (
            Panel(Axis("step"), Axis("ms per step", top=top), bars, 0.75),
            Panel(
                Axis("step"), Axis("efficiency, %", top=100.0), (Line("efficiency", "line", step, efficiency),), 0.25
            ),
        ),
        Table(["step", *(f"{name}, ms" for name in phases.values()), "efficiency, %"], rows),
    )


def _binned(values: Any, firsts: Any) -> Any:
    """Medians of neighbouring values, each group from one of `firsts` to the next."""
    return np.array([np.median(part) for part in np.split(values, firsts[1:])])


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


def sync_scene(found: Sync, words: LayoutWords = BUCKETS) -> Scene:
    """Returns waiting time, time of the reduction and bandwidth of each bucket; `words`: for those.

    The bandwidth beside the bars is that of the bus for buckets, and the algorithm's for parameter groups.
    """
    if not len(found.bucket):
        return Scene("Gradient sync", empty=f"no {words.unit} has been reduced yet")
    kind, speed = ("", found.algorithm_gb_s) if words.grouped else (" (bus)", found.bus_gb_s)
    rates = [f"{rate(one)}{kind}" if one == one else "" for one in speed.tolist()]
    lane = np.arange(len(found.bucket))
    bars = (
        Bars(f"{LABELS['waiting']} (first rank)", "waiting", lane, found.late_ms),
        Bars(words.reduction, "reducing", lane, found.all_reduce_ms, rates),
    )
    buckets = found.bucket.tolist()
    columns = (map(words.cell, buckets), found.late_ms, found.all_reduce_ms, found.algorithm_gb_s)
    return Scene(
        "Gradient sync: medians over the steps",
        (Panel(Axis("ms (median)"), Axis("", [words.name(one) for one in buckets]), bars),),
        Table(
            [words.head, f"{LABELS['waiting']} (first rank), ms", f"{words.reduction}, ms", "GB/s"],
            [[bucket, *map(float, row)] for bucket, *row in zip(*columns, strict=True)],
        ),
    )


def gradients_scene(facts: Mapping[str, Any], last_steps: int = 200) -> Scene:
    """Returns norms before and after averaging, and the noise scale, for the monitored steps of `gradient_facts`."""
    steps, ranks, words = facts["steps"][-last_steps:], facts["ranks"], gradients_words(facts)
    if not steps:
        return Scene("Gradients", empty=words.rstrip(".") or _NOT_WATCHED)
    x = np.array([one["step"] for one in steps])
    before, after, noise = (np.array([one[name] for one in steps], float) for name in ("before", "after", "noise"))
    lines = [
        Line(f"rank {rank}, before", f"rank{i}", x, before[:, i], 1.2) for i, rank in enumerate(ranks[:_MOST_LINES])
    ]
    lines.append(Line("average", "line", x, after, 2.4))
    bad = [Rule("bad", one["step"], one["bad"]["kind"]) for one in steps if one["bad"]]
    return Scene(
        f"Gradients: norms of {len(ranks)} ranks before and after averaging",
        (
            Panel(Axis("step"), Axis("L2 norm"), [*lines, *bad], 0.7),
            Panel(Axis("step"), Axis("noise, batches"), (Line("noise scale", "noise", x, noise, 2.0),), 0.3),
        ),
        Table(
            ["step", "smallest norm", "largest norm", "norm of the average", "noise scale", "NaN or Inf:"],
            [_gradients_row(one) for one in steps[-_MOST_ROWS:]],
        ),
        summary=words,
    )


def _gradients_row(one: Mapping[str, Any]) -> list[object]:
    before, bad = [value for value in one["before"] if value is not None] or [np.nan], one["bad"]
    where = "" if bad is None else f"{bad['kind']} in {bad['parameter']}" if bad["parameter"] else bad["kind"]
    told = (np.nan if one[name] is None else one[name] for name in ("after", "noise"))
    return [one["step"], min(before), max(before), *told, where]


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


def findings_scene(found: Sequence[Finding], headline: str) -> Scene:
    """Returns the findings by estimated saving; `headline` sums them up in a sentence, also if there are none."""
    lane, gains = np.arange(len(found)), np.array([one.gain_percent for one in found])
    tips = [f"{one.evidence} → {one.remedy}" for one in found]
    bars = Bars("estimated saving", "good", lane, gains, [f"{gain:.1f} %" for gain in gains], tips)
    return Scene(
        "Findings: estimated saving of each change alone",
        (Panel(Axis("% of the step"), Axis("", [one.title for one in found]), (bars,)),),
        empty="" if found else headline,
    )


def what_if_scene(answer: Mapping[str, Any]) -> Scene:
    """Returns the recorded and the predicted step side by side, by phase, from `WhatIfStage.snapshot`."""
    title = what_if_words(answer)
    if answer["state"] != "ready":
        return Scene("What if", empty=title.rstrip("."))
    rows = {"recorded": answer["recorded"], "simulated": answer["same"], "what if": answer["predicted"]}
    lane, last = np.arange(len(rows)), [f"{one['step']:.2f} ms" for one in rows.values()]
    bars = [
        Bars(name, key, lane, np.array([one[key] for one in rows.values()]), last if key == "exposed" else ())
        for key, (_, name) in PHASES.items()
        if key not in SPANS  # a simulated step has them in `other`
    ]
    return Scene(title, (Panel(Axis("ms (median)"), Axis("", list(rows)), bars),))


def what_if_words(answer: Mapping[str, Any]) -> str:
    """Returns the answer in one sentence."""
    if answer["state"] != "ready":
        return str(answer["text"])
    recorded, predicted = answer["recorded"]["step"], answer["predicted"]["step"]
    return f"What if: recorded step {recorded:.2f} ms, predicted {predicted:.2f} ms ({answer['world']} ranks)"


def _findings_of(timeline: Timeline, reducer: int | None, last_steps: int | None) -> Scene:
    facts = timeline.judgement(reducer, last_steps or 100)
    found = findings.findings(facts)
    return findings_scene(found, findings.headline(facts, found))


def _overlap_of(timeline: Timeline, reducer: int | None, last_steps: int | None) -> Scene:
    found, model = view_data.breakdown(timeline, reducer, last_steps or 200), timeline.model(reducer)
    if not len(found.step) and model is not None and timeline.layouts(model.reducer):
        return Scene("Overlap", empty=f"how much of a step is exposed communication is not known: {UNTOLD}")
    return overlap_scene(found)


def _gradients_of(timeline: Timeline, reducer: int | None, last_steps: int | None) -> Scene:
    info = None if reducer is not None else next(reversed(timeline.reducers()), None)
    facts = gradient_facts(timeline, info.reducer if info is not None else reducer or 0)
    return gradients_scene(facts, last_steps or 200)


# The views of a model's newest steps. Arguments: timeline, model (None: the most recently active), number of steps
# (None: the default of the view).
SCENES: dict[str, Callable[[Timeline, int | None, int | None], Scene]] = {
    "overview": overview_scene,
    "sync": lambda timeline, reducer, last: sync_scene(
        view_data.sync(timeline, reducer, last or 100), view_data.words_of(timeline, reducer)
    ),
    "overlap": _overlap_of,
    "stragglers": lambda timeline, reducer, last: stragglers_scene(
        view_data.waiting(timeline, reducer, last or 100), view_data.words_of(timeline, reducer)
    ),
    "findings": _findings_of,
    "gradients": _gradients_of,
    "parameter_groups": parameter_groups_scene,
    "groups": lambda timeline, reducer, last: groups_scene(group_lanes(timeline, last)),
}
