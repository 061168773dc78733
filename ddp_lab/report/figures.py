"""The figures of a report: what they show, their captions, and the numbers behind them as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..timeline.timeline import Timeline
from ..views.gradients import gradient_facts, gradients_svg
from ..views.paint import charts
from ..views.paint.charts import Series
from ..views.paint.svg import step_svg
from ..views.timeline_figure import find_step
from ..views.view_data import breakdown_of, sync_of, waiting_of
from .data import ReportData

__all__ = ["Figure", "figures"]


@dataclass(frozen=True)
class Figure:
    """A picture (SVG) with its title, caption and legend (HTML), and its table twin: column names and rows."""

    title: str
    caption: str
    picture: str
    legend: str = ""
    style: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


def figures(timeline: Timeline, found: ReportData) -> Iterator[Figure]:
    """All figures that the recorded steps allow."""
    yield _step(timeline, found)
    yield _breakdown(found)
    if len(found.sync["step"]) and len(found.ranks) > 1:
        yield _waiting(found)
        yield _sync(found)
    gradients = gradient_facts(timeline, found.reducer)
    if gradients["steps"]:
        yield _gradients(timeline, found, gradients)


def _step(timeline: Timeline, found: ReportData) -> Figure:
    try:
        frame, _ = find_step(timeline, None, found.reducer)
    except ValueError as error:  # the other figures come from tables that reach further back
        return Figure("Every bucket of a step", f"Not drawn: {error}.", "")
    return Figure(
        title=f"Every bucket of step {frame.step}",
        caption="A row for each bucket on each rank. Filling: its gradients come; queued: it waits for its turn; "
        "waiting: launched, but not on every rank; reducing: under way; exposed (thin line): after the rank’s own "
        "computation, so that it costs time.",
        picture=step_svg(frame, ""),
        style="step",
    )


def _breakdown(found: ReportData) -> Figure:
    """Forward, computation, waiting and the rest of each step: medians over the ranks."""
    parts = breakdown_of(found.steps)
    numbers = parts.step
    series = [
        Series("forward", "forward", parts.forward),
        Series("backward’s computation", "compute", parts.alone + parts.hidden),
        Series("waiting for gradients (exposed)", "exposed", parts.exposed),
        Series("optimizer and the rest", "other", parts.other),
    ]
    lines = [
        [int(numbers[i]), *(float(one.values[i]) for one in series), float(parts.hidden[i])]
        for i in range(max(0, len(numbers) - 50), len(numbers))
    ]
    return Figure(
        title="What a step consists of",
        caption="Medians over the ranks. The table holds the newest 50 steps, and how much communication was hidden.",
        picture=charts.stacked(numbers, series, "Milliseconds of each step by what they were spent on", "step"),
        legend=charts.legend(series),
        table=(["step", *(f"{one.name}, ms" for one in series), "hidden, ms"], lines),
    )


def _waiting(found: ReportData) -> Figure:
    alone = waiting_of(found.sync, found.ranks, found.buckets).cells
    head = ["rank", *(f"bucket {number}" for number in range(found.buckets)), "all"]
    lines = [
        [rank, *(float(value) for value in row), float(row.sum())] for rank, row in zip(found.ranks, alone, strict=True)
    ]
    return Figure(
        title="For whom the others waited",
        caption="Milliseconds a step during which every other rank had launched a bucket’s collective, and this rank "
        "had not. A rank that is late once is late in the buckets that follow, too: the first cell of its row with "
        "a strong colour is where to look. The strongest colour is the longest wait.",
        picture=charts.heat(alone, [f"rank {rank}" for rank in found.ranks], "Waiting by rank and bucket", "bucket"),
        table=(head, lines),
    )


def _sync(found: ReportData) -> Figure:
    sync = sync_of(found.sync, found.ranks)
    buckets, late, reduce, speed = sync.bucket.tolist(), sync.late_ms, sync.all_reduce_ms, sync.algorithm_gb_s
    series = [
        Series("the first rank waits for the last one", "waiting", late),
        Series("all-reduce, once all have launched", "reducing", reduce),
    ]
    rates = [f"{value:.2g} GB/s" if value == value else "" for value in speed.tolist()]
    lines = [[b, float(late[i]), float(reduce[i]), float(speed[i])] for i, b in enumerate(buckets)]
    return Figure(
        title="What synchronising each bucket took",
        caption="Medians over the steps; beside each bar the bucket’s bytes over the time of its all-reduce.",
        picture=charts.rows([f"bucket {b}" for b in buckets], series, rates, "Waiting and all-reduce by bucket"),
        legend=charts.legend(series),
        table=(["bucket", "first waits for last, ms", "all-reduce, ms", "GB/s"], lines),
    )


def _gradients(timeline: Timeline, found: ReportData, known: dict[str, Any]) -> Figure:
    lines = []
    for one in known["steps"][-50:]:
        before = [value for value in one["before"] if value is not None] or [float("nan")]
        bad = one["bad"]
        where = "" if bad is None else f"{bad['kind']} in {bad['parameter']}" if bad["parameter"] else bad["kind"]
        lines.append([one["step"], min(before), max(before), _number(one["after"]), _number(one["noise"]), where])
    return Figure(
        title="Gradients before and after averaging",
        caption="Norms of each rank’s own gradients and of their average. The table holds the newest 50 watched steps, "
        "and the noise scale in batches of a rank.",
        picture=gradients_svg(timeline, found.reducer),
        style="gradients",
        table=(["step", "smallest norm", "largest norm", "norm of the average", "noise scale", "NaN or Inf:"], lines),
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
