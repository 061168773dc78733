"""From step tables to columns: one array per column of `Timeline.spans()`, `.steps()` and `.all_reduces()`.

Pure functions on arrays. Columns that end in ``_ns`` are host times (CLOCK_MONOTONIC) or, with ``device_`` in
front, device times on the same axis; 0 where it has not happened. Columns that end in ``_ms`` are milliseconds as
floats; NaN where one of both ends is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis import step_metrics
from ...analysis.step_metrics import (
    BESIDE,
    PHASES,
    Breakdown,
    Communication,
    GradientSync,
    Overlap,
    TypicalStep,
    milliseconds,
    typical_parts,
)
from ...analysis.step_parts import SPANS, RankSteps
from .activity import ActivityTable
from .step_table import BUCKET_FIELDS, STEP_FIELDS, StepTable

__all__ = ["SPAN_COLUMNS", "STEP_COLUMNS", "SYNC_COLUMNS", "Columns", "TableView", "span_columns", "step_columns"]
__all__ += ["breakdown_of", "device_rows", "joined", "known_steps", "objects", "rank_steps", "sync_columns"]
__all__ += ["typical_step", "view_of", "whole_steps"]

Columns = dict[str, npt.NDArray[Any]]

SPAN_COLUMNS = (
    *("rank", "reducer", "process_group", "step", "generation", "bucket", "bytes", "n_parameters"),
    *("backward_begin_ns", "first_ready_ns", "ready_ns", "launched_ns", "reduced_ns", "finalize_ns"),
    *("device_begin_ns", "device_end_ns", "first_ready_ms", "ready_ms", "launched_ms", "reduced_ms"),
    *("fill_ms", "all_reduce_ms", "device_ms", "hidden_ms", "exposed_ms", "clock", "complete"),
)
STEP_COLUMNS = (
    *("rank", "reducer", "step", "generation", "state", "buckets", "bytes"),
    *("forward_begin_ns", "forward_end_ns", "backward_begin_ns", "finalize_ns", "backward_end_ns"),
    *("step_ms", "forward_ms", "backward_ms", "compute_ms", "communication_ms", "hidden_ms", "exposed_ms", "clock"),
    *(f"{name}_ms" for name in SPANS),
)
SYNC_COLUMNS = (
    *("reducer", "step", "generation", "bucket", "bytes", "n_parameters", "ranks", "all_reduce_ms"),
    *("bandwidth_gb_s", "last_rank", "late_ms", "alone_ms", "wait_ms", "hidden_ms", "exposed_ms"),
)
_F, _B = {n: i for i, n in enumerate(STEP_FIELDS)}, {n: i for i, n in enumerate(BUCKET_FIELDS)}
_OUTSIDE = [_F[name] for name in ("forward_begin", "forward_end", "backward_begin")]


@dataclass(frozen=True)
class TableView:
    """A copy of some rows of one rank's `StepTable`, so that reading needs no lock."""

    rank: int
    reducer: int
    step: npt.NDArray[np.int64]
    generation: npt.NDArray[np.int64]
    process_group: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    gradients: npt.NDArray[np.int64]
    previous_end: npt.NDArray[np.int64]  # backward_end of the step before each, 0 if unknown
    spans: npt.NDArray[np.int64]  # ns of each of `SPANS` between the previous step and the backward
    communication: Communication = BESIDE

    @property
    def outside(self) -> npt.NDArray[np.int64]:
        """End of the previous step, begin and end of the last forward, begin of the backward: ``[steps, 4]``."""
        return _outside(self.previous_end, self.steps)


def _outside(previous_end: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([previous_end[:, None], steps[:, _OUTSIDE]], axis=1)


def view_of(
    rank: int, reducer: int, table: StepTable, steps: npt.NDArray[np.int64], activity: ActivityTable
) -> TableView:
    """Copies the rows of these steps, as far as they are held."""
    rows = table.find(steps)
    rows = rows[rows >= 0]
    before = table.find(table.step[rows] - 1)
    end = np.where(before >= 0, table.steps[before, _F["backward_end"]], table.previous_end[rows])
    numbers = (table.step[rows], table.generation[rows], table.process_group[rows])
    spans = activity.within(_outside(end, table.steps[rows]))
    return TableView(rank, reducer, *numbers, table.steps[rows], table.buckets[rows], table.gradients[rows], end, spans)


def device_rows(buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which steps have device spans for all of their launched buckets."""
    return step_metrics.on_device(buckets[:, :, _B["launched"]], buckets[:, :, _B["device_end"]])


def _overlap(one: TableView) -> Overlap:
    names = ("launched", "reduced", "device_begin", "device_end")
    launched, reduced, begin, end = (one.buckets[:, :, _B[name]] for name in names)
    return one.communication.overlap(launched, reduced, begin, end, one.steps[:, _F["finalize"]])


def span_columns(views: Sequence[TableView], sizes: Mapping[tuple[int, int], npt.NDArray[np.int64]]) -> Columns:
    """One row per rank, step and bucket of which at least one gradient was ready.

    Args:
        views: what to show.
        sizes: (reducer, generation) -> number of parameters by bucket.
    """
    parts = [_spans_of(one, sizes) for one in views]
    return {name: joined([part[name] for part in parts]) for name in SPAN_COLUMNS}


def _spans_of(one: TableView, sizes: Mapping[tuple[int, int], npt.NDArray[np.int64]]) -> Columns:
    row, bucket = np.nonzero((one.buckets[:, :, [_B["first_ready"], _B["ready"], _B["launched"]]] > 0).any(axis=2))
    overlap = _overlap(one)
    made: Columns = {
        "rank": np.full(len(row), one.rank),
        "reducer": np.full(len(row), one.reducer),
        "process_group": one.process_group[row],
        "step": one.step[row],
        "generation": one.generation[row],
        "bucket": bucket,
        "bytes": one.buckets[row, bucket, _B["bytes"]],
        "n_parameters": _numbers(one, row, bucket, sizes),
        **{f"{name}_ns": one.steps[row, _F[name]] for name in ("backward_begin", "finalize")},
        **{f"{name}_ns": one.buckets[row, bucket, _B[name]] for name in BUCKET_FIELDS[:-1]},
        "hidden_ms": overlap.hidden_ms[row, bucket],
        "exposed_ms": overlap.exposed_ms[row, bucket],
        "clock": overlap.clock[row],
        "complete": one.steps[row, _F["backward_end"]] > 0,
    }
    for name in ("first_ready", "ready", "launched", "reduced"):
        made[f"{name}_ms"] = milliseconds(made[f"{name}_ns"], made["backward_begin_ns"])
    lasts = {"fill": ("first_ready", "ready"), "all_reduce": ("launched", "reduced")}
    lasts["device"] = ("device_begin", "device_end")
    for name, (begin, end) in lasts.items():
        made[f"{name}_ms"] = milliseconds(made[f"{end}_ns"], made[f"{begin}_ns"])
    return made


def _numbers(
    one: TableView,
    row: npt.NDArray[np.int64],
    bucket: npt.NDArray[np.int64],
    sizes: Mapping[tuple[int, int], npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    found = np.zeros(len(row), np.int64)
    for generation in np.unique(one.generation).tolist():
        known = sizes.get((one.reducer, generation), found[:0])
        chosen = (one.generation[row] == generation) & (bucket < len(known))
        found[chosen] = known[bucket[chosen]]
    return found


def step_columns(views: Sequence[TableView]) -> Columns:
    """One row per rank and step."""
    parts = [_steps_of(one) for one in views]
    return {name: joined([part[name] for part in parts]) for name in STEP_COLUMNS}


def _steps_of(one: TableView) -> Columns:
    times = {name: one.steps[:, column] for name, column in _F.items()}
    overlap, of = _overlap(one), one.communication
    ended = times["backward_end"] > 0
    state = np.where(ended, "complete", np.where(times["abandoned"] > 0, "abandoned", "running"))
    hidden, exposed = (np.where(ended, ms, np.nan) for ms in (overlap.rank_hidden_ms, overlap.rank_exposed_ms))
    return {
        "rank": np.full(len(one.step), one.rank),
        "reducer": np.full(len(one.step), one.reducer),
        "step": one.step,
        "generation": one.generation,
        "state": state,
        "buckets": (one.buckets[:, :, _B["launched"]] > 0).sum(axis=1),
        "bytes": one.buckets[:, :, _B["bytes"]].sum(axis=1),
        **{f"{name}_ns": values for name, values in times.items()},
        "step_ms": of.step_ms(milliseconds(times["backward_end"], one.previous_end)),
        "forward_ms": of.net_ms("forward", milliseconds(times["forward_end"], times["forward_begin"])),
        "backward_ms": milliseconds(times["backward_end"], times["backward_begin"]),
        "compute_ms": of.net_ms("compute", milliseconds(times["finalize"], times["backward_begin"])),
        "communication_ms": hidden + exposed,
        "hidden_ms": hidden,
        "exposed_ms": exposed,
        "clock": np.where(of.unknown(exposed), "none", overlap.clock),
        **{f"{name}_ms": of.net_ms(name, one.spans[:, column] / 1e6) for column, name in enumerate(SPANS)},
    }


def known_steps(columns: Columns) -> Columns:
    """The rows of complete steps whose exposed communication is known, from columns of `Timeline.steps`."""
    chosen = (columns["state"] == "complete") & (columns["clock"] != "none")
    return {name: values[chosen] for name, values in columns.items()}


def rank_steps(one: TableView, activity: ActivityTable) -> RankSteps:
    """The steps of one rank, for `step_parts`."""
    columns = _steps_of(one)
    whole = milliseconds(columns["backward_end_ns"], one.previous_end)  # the host's, as its parts are
    names = ("forward", "compute", "hidden", "exposed", "backward")
    spans = np.stack([columns[f"{name}_ms"] for name in SPANS], axis=1) * 1e6
    columns["backward_ms"] = one.communication.backward_ms(columns, whole)
    return RankSteps(
        whole=np.where(
            (columns["state"] == "complete") & (columns["clock"] != "none") & (one.previous_end > 0),
            whole,
            0.0,
        )
        * 1e6,
        **{name: columns[f"{name}_ms"] * 1e6 for name in names},
        spans=spans.astype(np.int64),
        places=activity.places(one.outside),
        samples=activity.samples(one.outside),
    )


def breakdown_of(columns: Columns) -> Breakdown:
    """Returns the time breakdown of steps, from columns of `Timeline.steps` of one model."""
    number, row = np.unique(columns["step"], return_inverse=True)
    ranks, column = np.unique(columns["rank"], return_inverse=True)
    by_rank = {}
    for name in step_metrics.BREAKDOWN:
        by_rank[name] = np.full((len(number), len(ranks)), np.nan)
        by_rank[name][row, column] = columns[name]
    return step_metrics.breakdown(number.astype(np.int64), by_rank)


def typical_step(columns: Columns) -> TypicalStep:
    """Returns a typical one of the complete steps of one model, from columns of `Timeline.steps`."""
    known = known_steps(columns)
    together = breakdown_of(known)
    ranks = np.unique(known["rank"])
    usual, factor = step_metrics.usual_steps(together)
    by_rank = [
        typical_parts(breakdown_of({name: values[known["rank"] == rank] for name, values in known.items()}))
        for rank in ranks
    ]
    return TypicalStep(
        steps=together.step,
        usual=together.step[usual],
        factor=factor,
        parts_ms=typical_parts(together),
        ranks=tuple(ranks.tolist()),
        by_rank_ms=np.array(by_rank).reshape(len(ranks), len(PHASES)),
        overlapped_ms=factor * float(together.overlapped[usual].mean()) if usual.any() else float("nan"),
        is_whole=bool(np.isfinite(together.measured).any()),
    )


def whole_steps(views: Sequence[TableView]) -> tuple[Breakdown, npt.NDArray[np.int64]]:
    """Returns the time breakdown of the steps that all ranks have completed, and when the first rank began each."""
    columns = known_steps(step_columns(views))
    number, counts = np.unique(columns["step"], return_counts=True)
    chosen = np.isin(columns["step"], number[counts == len(views)])
    columns = {name: values[chosen] for name, values in columns.items()}
    number, row = np.unique(columns["step"], return_inverse=True)
    began = np.full(len(number), np.iinfo(np.int64).max)
    np.minimum.at(began, row, columns["backward_begin_ns"])
    return breakdown_of(columns), began


def sync_columns(spans: Columns, ranks_of: Mapping[int, int]) -> Columns:
    """One row per reducer, step and bucket that every rank of the reducer has reduced.

    Args:
        spans: what `span_columns` returned.
        ranks_of: reducer -> how many ranks it has.
    """
    parts = []
    for reducer, ranks in ranks_of.items():
        chosen = (spans["reducer"] == reducer) & (spans["reduced_ns"] > 0) & (spans["launched_ns"] > 0)
        part = {name: values[chosen] for name, values in spans.items()}
        order = np.lexsort((part["rank"], part["bucket"], part["step"]))
        part = {name: values[order] for name, values in part.items()}
        key = np.stack([part["step"], part["bucket"]])
        new = np.flatnonzero(np.diff(key, prepend=-1).any(axis=0)) if key.shape[1] else np.zeros(0, np.int64)
        whole = new[np.diff(new, append=key.shape[1]) == ranks]
        if len(whole):
            parts.append(_sync_of({name: values[whole[:, None] + np.arange(ranks)] for name, values in part.items()}))
    return {name: joined([part[name] for part in parts]) for name in SYNC_COLUMNS}


def _sync_of(by_rank: Columns) -> Columns:
    """Columns of shape ``[n, ranks]`` -> columns of shape ``[n]``."""
    size, rank = by_rank["bytes"].max(axis=1), by_rank["rank"]
    found: GradientSync = step_metrics.gradient_sync(by_rank["launched_ns"].T, by_rank["reduced_ns"].T, size)
    names = rank[0].tolist()
    made = {name: by_rank[name][:, 0] for name in ("reducer", "step", "generation", "bucket", "n_parameters")}
    return made | {
        "bytes": size,
        "ranks": np.full(len(rank), rank.shape[1]),
        "all_reduce_ms": found.all_reduce_ms,
        "bandwidth_gb_s": found.bandwidth_gb_s,
        "last_rank": np.take_along_axis(rank, found.last[:, None], 1)[:, 0],
        "late_ms": found.late_ms,
        "alone_ms": found.alone_ms,
        "wait_ms": objects([dict(zip(names, row, strict=True)) for row in found.wait_ms.T.tolist()]),
        "hidden_ms": by_rank["hidden_ms"].mean(axis=1),
        "exposed_ms": by_rank["exposed_ms"].mean(axis=1),
    }


def objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """A column of any objects, also of such that numpy takes for arrays."""
    made = np.empty(len(values), object)
    made[:] = values
    return made


def joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array of all."""
    return np.concatenate(arrays) if arrays else np.empty(0)
