"""Gradient sync: waits, times and bandwidths of each bucket. Its table in a page is painted from the steps' feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...analysis import step_metrics
from ...timeline.steady_steps import ANALYSED_STEPS, WARM_UP
from ...timeline.tables import span_columns
from ...timeline.tables.span_columns import Columns
from ...timeline.timeline import Timeline
from ..paint.palette import LABELS
from ..scene import Axis, Bars, Panel, Scene, Table, Values
from .layout_words import BUCKETS, LayoutWords, layout_words
from .view import Reported, Selection, View

__all__ = ["GradientSync", "Sync", "sync", "sync_columns", "sync_of", "sync_scene", "words_of"]


@dataclass(frozen=True)
class Sync:
    """Gradient sync of each bucket: medians over the steps, shape ``[buckets]``; bandwidths in GB/s."""

    bucket: npt.NDArray[np.int64]
    late_ms: Values
    all_reduce_ms: Values
    algorithm_gb_s: Values
    bus_gb_s: Values


class GradientSync(View):
    """The synchronisation of each bucket."""

    name = "sync"
    title = "Gradient sync"
    about = "The synchronisation of each bucket: bytes, bandwidths, waits, compared with the measured link."
    question = "How fast"
    beside = "timeline"
    fed = True
    pixels = (170, 22)

    def facts(self, timeline: Timeline, chosen: Selection) -> tuple[Sync, LayoutWords]:
        last = chosen.last_steps or ANALYSED_STEPS
        return sync(timeline, chosen.model, last), words_of(timeline, chosen.model)

    def scene(self, facts: tuple[Sync, LayoutWords]) -> Scene:
        return sync_scene(*facts)

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        columns, ranks = sync_columns(timeline, Selection(chosen.model))
        if not len(columns["step"]) or len(ranks) < 2:
            return None
        words = words_of(timeline, chosen.model)
        return Reported(
            f"Gradient synchronisation by {words.unit}",
            f"Medians over the steps, with {words.speed}.",
            sync_scene(sync_of(columns, ranks), words),
        )


def sync(timeline: Timeline, reducer: int | None = None, last_steps: int = ANALYSED_STEPS) -> Sync:
    """Returns the gradient sync of each bucket; arguments as for `overlap.breakdown`."""
    return sync_of(*sync_columns(timeline, Selection(reducer, last_steps)))


def sync_of(columns: Columns, ranks: Sequence[int]) -> Sync:
    """Returns the gradient sync of each bucket, from columns of `Timeline.all_reduces` of one model."""
    bucket = np.unique(columns["bucket"]).astype(np.int64)
    late, reduce, speed = (
        np.array([step_metrics.median(columns[name][columns["bucket"] == one]) for one in bucket])
        for name in ("late_ms", "all_reduce_ms", "bandwidth_gb_s")
    )
    return Sync(bucket, late, reduce, speed, speed * step_metrics.bus_factor(len(ranks)))


def sync_scene(found: Sync, words: LayoutWords = BUCKETS) -> Scene:
    """Returns waiting time, time of the reduction and bandwidth of each bucket; `words`: for those.

    The bandwidth beside the bars is that of the bus for buckets, and the algorithm's for parameter groups.
    """
    if not len(found.bucket):
        return Scene("Gradient sync", empty=f"no {words.unit} has been reduced yet")
    rates = words.rates(found.algorithm_gb_s.tolist(), found.bus_gb_s.tolist())
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


def words_of(timeline: Timeline, reducer: int | None = None) -> LayoutWords:
    """Returns the words for the bucket layout of a model that is analysed; None: of the most recently active one."""
    layout = timeline.analysis_layout(Selection(reducer).model_in(timeline))
    return layout_words(layout.description if layout is not None else None)


def sync_columns(timeline: Timeline, chosen: Selection) -> tuple[Columns, tuple[int, ...]]:
    """Returns gradient sync of the steps that are analysed, as columns of `Timeline.all_reduces`, and their ranks."""
    model, layout = chosen.model_in(timeline), chosen.layout_in(timeline)
    info = next((one for one in timeline.reducers() if one.reducer == model), None)
    ranks = info.ranks if info is not None else ()
    last_steps = chosen.last_steps or ANALYSED_STEPS
    views = timeline.views_of(model, layout.warm(WARM_UP, last_steps)) if layout is not None else []
    columns = span_columns.sync_columns(span_columns.span_columns(views, {}), {model: len(ranks)})
    return columns, tuple(sorted({*ranks, *(one.rank for one in views)}))
