"""The numbers behind the views: step time breakdown, waiting for stragglers, readiness of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis import step_metrics
from ...analysis.findings import Facts
from ...analysis.step_metrics import Breakdown
from ...analysis.step_parts import PARTS, StepParts
from ...formatting import counted, enumeration
from ...timeline.judged_steps import ANALYSED_STEPS, WARM_UP
from ...timeline.tables import span_columns
from ...timeline.tables.span_columns import Columns, TableView, breakdown_of
from ...timeline.tables.step_table import STEP_FIELDS
from ...timeline.timeline import Timeline
from .layout_words import LayoutWords, layout_words

__all__ = [
    "Sync",
    "Waiting",
    "breakdown",
    "parts_table",
    "parts_words",
    "readiness",
    "sync",
    "sync_of",
    "unused",
    "waiting",
]
__all__ += ["last_shares", "waiting_of", "words_of"]

_Values = npt.NDArray[np.float64]
_MOST_STEPS = 200
_UNUSED_STEPS = 100
_MOST_RANKS, _MOST_LINES, _LARGEST = 8, 3, 4  # of a table of parts
_READINESS_STEPS = 20
_BEGIN, _END = STEP_FIELDS.index("backward_begin"), STEP_FIELDS.index("backward_end")


@dataclass(frozen=True)
class Waiting:
    """How long the other ranks waited for each rank.

    Attributes:
        ranks: the ranks of the rows.
        cells: ms per step that all other ranks waited for this one, shape ``[ranks, buckets]``.
        share: the share of the analysed steps in which each rank was last, NaN where that is not known.
        steps: the number of steps.
    """

    ranks: tuple[int, ...]
    cells: _Values
    share: _Values
    steps: int


@dataclass(frozen=True)
class Sync:
    """Gradient sync of each bucket: medians over the steps, shape ``[buckets]``; bandwidths in GB/s."""

    bucket: npt.NDArray[np.int64]
    late_ms: _Values
    all_reduce_ms: _Values
    algorithm_gb_s: _Values
    bus_gb_s: _Values


def breakdown(timeline: Timeline, reducer: int | None = None, last_steps: int = _MOST_STEPS) -> Breakdown:
    """Returns the time breakdown of the complete steps of a model.

    Args:
        timeline: the source of the steps.
        reducer: which model; None for the most recently active.
        last_steps: how many of the newest ones.
    """
    return breakdown_of(span_columns.known_steps(timeline.step_columns(_model(timeline, reducer), last_steps)))


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


def waiting(timeline: Timeline, reducer: int | None = None, last_steps: int = ANALYSED_STEPS) -> Waiting:
    """Returns how long the others waited for each rank in the newest steps; arguments as for `breakdown`."""
    columns, ranks = _sync_columns(timeline, reducer, last_steps)
    return waiting_of(columns, ranks, last_shares(timeline.judgement(_model(timeline, reducer))))


def last_shares(facts: Facts | None) -> dict[int, float]:
    """rank -> the share of the analysed steps in which it was last; empty if none were analysed."""
    return {} if facts is None else dict(zip(facts.steps.ranks, facts.last.share.tolist(), strict=True))


def waiting_of(columns: Columns, ranks: Sequence[int], last: Mapping[int, float], buckets: int = 0) -> Waiting:
    """Returns how long the others waited for each rank, from columns of `Timeline.all_reduces`.

    Args:
        columns: of one model.
        ranks: its ranks.
        last: of `last_shares`.
        buckets: the fewest to return.
    """
    buckets = max(buckets, int(columns["bucket"].max(initial=-1)) + 1)
    cells = np.zeros((len(ranks), buckets))
    steps = len(np.unique(columns["step"]))
    if steps and len(ranks) > 1:
        row = np.searchsorted(ranks, columns["last_rank"])
        np.add.at(cells, (row, columns["bucket"].astype(int)), columns["alone_ms"] / steps)
    return Waiting(tuple(ranks), cells, np.array([last.get(rank, np.nan) for rank in ranks]), steps)


def sync(timeline: Timeline, reducer: int | None = None, last_steps: int = ANALYSED_STEPS) -> Sync:
    """Returns the gradient sync of each bucket; arguments as for `breakdown`."""
    return sync_of(*_sync_columns(timeline, reducer, last_steps))


def sync_of(columns: Columns, ranks: Sequence[int]) -> Sync:
    """Returns the gradient sync of each bucket, from columns of `Timeline.all_reduces` of one model."""
    bucket = np.unique(columns["bucket"]).astype(np.int64)
    late, reduce, speed = (
        np.array([step_metrics.median(columns[name][columns["bucket"] == one]) for one in bucket])
        for name in ("late_ms", "all_reduce_ms", "bandwidth_gb_s")
    )
    return Sync(bucket, late, reduce, speed, speed * step_metrics.bus_factor(len(ranks)))


def words_of(timeline: Timeline, reducer: int | None = None) -> LayoutWords:
    """Returns the words for the bucket layout of a model that is analysed; arguments as for `breakdown`."""
    layout = timeline.judged(_model(timeline, reducer))
    return layout_words(layout.description if layout is not None else None)


def _sync_columns(timeline: Timeline, reducer: int | None, last_steps: int) -> tuple[Columns, tuple[int, ...]]:
    """Gradient sync of the layout that is analysed, and the ranks of the model."""
    found = _model(timeline, reducer)
    info = next((one for one in timeline.reducers() if one.reducer == found), None)
    ranks = info.ranks if info is not None else ()
    layout = timeline.judged(found)
    views = timeline.views_of(found, layout.warm(WARM_UP, last_steps)) if layout is not None else []
    return span_columns.sync_columns(span_columns.span_columns(views, {}), {found: len(ranks)}), ranks


def _model(timeline: Timeline, reducer: int | None) -> int:
    known = [one.reducer for one in timeline.reducers() if one.last_step >= 0]
    return reducer if reducer is not None else known[-1] if known else -1


def readiness(views: Sequence[TableView], parameters: int = 0) -> dict[str, Any]:
    """Returns when each parameter's gradient was ready (median over ranks and steps), and how often it was.

    Args:
        views: tables of the ranks of one model; the newest complete steps with the newest bucket layout are used.
        parameters: how many the model has: a table ends with the last one that ever got a gradient.

    Returns:
        ``generation``: of the layout, -1 if no step is complete, or with `fully_shard` or `replicate`; ``ready``: ms
        since the rank's backward began, None without a gradient; ``used``: 0 to 1.
    """
    views = [one for one in views if one.waits is None]  # else parameter groups are gathered, and no gradient is told
    ended = [one.steps[:, _END] > 0 for one in views]
    known = [int(one.generation[done].max()) for one, done in zip(views, ended, strict=True) if done.any()]
    newest = max(known, default=-1)
    parts = []
    for one, done in zip(views, ended, strict=True):
        rows = np.flatnonzero((one.generation == newest) & done)[-_READINESS_STEPS:]
        since = one.gradients[rows] - one.steps[rows, _BEGIN][:, None]
        parts.append(np.where(one.gradients[rows] > 0, since / 1e6, np.nan))
    most = max((part.shape[1] for part in parts), default=0)
    most = max(most, parameters) if parts else 0
    filled = [np.pad(part, ((0, 0), (0, most - part.shape[1])), constant_values=np.nan) for part in parts]
    values = np.concatenate(filled) if filled else np.zeros((0, 0))
    used = np.isfinite(values).mean(axis=0) if len(values) else np.zeros(most)
    ready: list[float | None] = [
        float(np.nanmedian(column)) if share > 0 else None for column, share in zip(values.T, used, strict=True)
    ]
    return {"generation": newest, "ready": ready, "used": used.tolist()}


def unused(timeline: Timeline, assignment: dict[str, Any]) -> set[int]:
    """Returns the indices of the parameters without a gradient in the newest complete steps.

    Args:
        timeline: the source of the steps.
        assignment: the bucket layout that is shown; steps with another one are ignored.
    """
    parameters = len(assignment["parameters"])
    found = readiness(timeline.views(assignment["reducer"], _UNUSED_STEPS), parameters)
    if found["generation"] != assignment["generation"]:
        return set()
    return {index for index, share in enumerate(found["used"]) if share == 0}
