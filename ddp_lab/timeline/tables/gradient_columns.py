"""When each gradient was computed: one array per column, one row per rank, step and gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .span_columns import Columns, TableView
from .step_table import STEP_FIELDS

__all__ = ["GRADIENT_COLUMNS", "gradient_columns"]

GRADIENT_COLUMNS = ("rank", "reducer", "step", "bucket", "parameter", "begin_ns", "end_ns", "completes")
_BEGIN = STEP_FIELDS.index("backward_begin")

_Int64 = npt.NDArray[np.int64]


def gradient_columns(
    views: Sequence[TableView], bucket_of: Mapping[tuple[int, int], _Int64], *, completing: bool = False
) -> Columns:
    """Rows in the order of time within each rank and step.

    Columns: ``rank``, ``reducer``, ``step``, ``bucket``, ``parameter`` (index), ``begin_ns`` (the gradient before it,
    or the backward's begin) and ``end_ns`` (it was accumulated), ``completes`` (it was the last of its bucket).

    Args:
        views: what to show.
        bucket_of: (reducer, generation) -> bucket by parameter; steps under other assignments are left out.
        completing: only those that were the last of their bucket.
    """
    of_view = _completing if completing else _of_view
    parts = [of_view(one, buckets, generation) for one in views for generation, buckets in _known(one, bucket_of)]
    return {
        name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0, np.int64)
        for name in GRADIENT_COLUMNS
    }


def _known(one: TableView, bucket_of: Mapping[tuple[int, int], _Int64]) -> list[tuple[int, _Int64]]:
    generations = np.unique(one.generation).tolist()
    return [(g, bucket_of[one.reducer, g]) for g in generations if (one.reducer, g) in bucket_of]


def _of_view(one: TableView, buckets: _Int64, generation: int) -> Columns:
    rows = np.flatnonzero((one.generation == generation) & (one.steps[:, _BEGIN] > 0))
    known = min(one.gradients.shape[1], len(buckets))
    times = one.gradients[rows, :known]
    order = np.argsort(times, axis=1, kind="stable")
    ends = np.take_along_axis(times, order, 1)
    begins = np.concatenate([one.steps[rows, _BEGIN][:, None], ends[:, :-1]], axis=1)[:, :known]
    begins = np.where(begins > 0, begins, one.steps[rows, _BEGIN][:, None])
    row, place = np.nonzero(ends > 0)
    bucket = buckets[order[row, place]]
    # The last row of each (step, bucket) in the order of time.
    key = row * (int(buckets.max(initial=0)) + 1) + bucket
    completes = np.zeros(len(row), bool)
    completes[len(key) - 1 - np.unique(key[::-1], return_index=True)[1]] = True
    return {
        "rank": np.full(len(row), one.rank),
        "reducer": np.full(len(row), one.reducer),
        "step": one.step[rows][row],
        "bucket": bucket,
        "parameter": order[row, place],
        "begin_ns": begins[row, place],
        "end_ns": ends[row, place],
        "completes": completes,
    }


def _completing(one: TableView, buckets: _Int64, generation: int) -> Columns:
    """What `_of_view` says of the gradients that were the last of their bucket, in any order."""
    rows = np.flatnonzero((one.generation == generation) & (one.steps[:, _BEGIN] > 0))
    known = min(one.gradients.shape[1], len(buckets))
    times = one.gradients[rows, :known]
    ordered = np.sort(times, axis=1)
    parts: list[tuple[_Int64, ...]] = []
    for bucket in np.unique(buckets[:known]).tolist():
        members = np.flatnonzero(buckets[:known] == bucket)
        last = members[times[:, members].argmax(axis=1)]
        end = times[np.arange(len(rows)), last]
        before = (ordered < end[:, None]).sum(axis=1) - 1
        begin = np.where(before >= 0, np.take_along_axis(ordered, np.maximum(before, 0)[:, None], 1)[:, 0], 0)
        begin = np.where(begin > 0, begin, one.steps[rows, _BEGIN])
        held = end > 0
        parts.append((one.step[rows][held], np.full(int(held.sum()), bucket), last[held], begin[held], end[held]))
    step, bucket_, parameter, begin_, end_ = (
        (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else [np.empty(0, np.int64)] * 5
    )
    return {
        "rank": np.full(len(step), one.rank),
        "reducer": np.full(len(step), one.reducer),
        "step": step,
        "bucket": bucket_,
        "parameter": parameter,
        "begin_ns": begin_,
        "end_ns": end_,
        "completes": np.ones(len(step), bool),
    }
