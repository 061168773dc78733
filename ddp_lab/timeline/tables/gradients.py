"""Gradients on the client: when each was computed, and the results of gradient monitoring: norms, noise, drift.

[Note: gradient noise scale]
Each rank's gradient g_i is a mean over its own batch of b samples; their mean ḡ is one over n·b. McCandlish et al.
2018, "An Empirical Model of Large-Batch Training", appendix A.1, take norms at two batch sizes to get unbiased
estimates of the true gradient's squared norm and of the noise (B in batches of a rank: B_small = 1, B_big = n):
    |G|² = (n·|ḡ|² - mean|g_i|²) / (n - 1)        S = (mean|g_i|² - |ḡ|²) / (1 - 1/n)
The simple noise scale S / |G|² is then in batches of a rank; times b, in samples. A much smaller batch learns about as
much per sample as a tiny one; a much larger one wastes samples. Single steps are too noisy, and |G|² may be negative:
average S and |G|² over steps first, then divide. With a lossy comm hook ḡ is not the mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..records import DriftRecord
from .span_columns import Columns, TableView, objects
from .step_table import STEP_FIELDS

__all__ = ["ALL_BUCKETS", "GRADIENT_COLUMNS", "GradientLog", "drift_columns", "gradient_columns"]
__all__ += ["drift_record", "gradient_norm_columns", "noise_scale", "signal_and_noise"]

GRADIENT_COLUMNS = ("rank", "reducer", "step", "bucket", "parameter", "begin_ns", "end_ns", "completes")
_BEGIN = STEP_FIELDS.index("backward_begin")
_Int64 = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

ALL_BUCKETS = -1
_MOST_STEPS = 20_000


class GradientLog:
    """Descriptions of types "gradients" and "drift", by model: the newest 20,000 steps of each."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], dict[int, tuple[int, dict[str, Any]]]] = {}  # (type, reducer) -> step
        self.arrived: Counter[tuple[str, int]] = Counter()  # (type, reducer) -> how many came in all

    def add(self, rank: int, description: dict[str, Any]) -> None:
        """Takes one; a second one of the same step replaces the first."""
        kept = self._kept.setdefault((description["type"], description["reducer"]), {})
        self.arrived[description["type"], description["reducer"]] += 1
        kept.pop(description["step"], None)
        kept[description["step"]] = (rank, description)
        if len(kept) > _MOST_STEPS:
            del kept[next(iter(kept))]

    def everything(self) -> list[tuple[int, dict[str, Any]]]:
        """(rank, description) of all that is kept."""
        return [one for kept in self._kept.values() for one in kept.values()]

    def described(self, wanted: str, reducer: int | None, last_steps: int | None) -> list[dict[str, Any]]:
        """Descriptions of a type, by model and step."""
        found = []
        for (kind, of), kept in sorted(self._kept.items()):
            if kind == wanted and reducer in (None, of):
                steps = sorted(kept)[-last_steps:] if last_steps else sorted(kept)
                found += [kept[step][1] for step in steps]
        return found


def drift_columns(records: list[DriftRecord]) -> Columns:
    """See `Timeline.drift`."""
    made: dict[str, npt.NDArray[Any]] = {}
    for one in fields(DriftRecord):
        values = [getattr(record, one.name) for record in records]
        if one.name in ("groups", "first", "error"):
            made[one.name] = objects(["" if value is None else value for value in values])
        else:
            made[one.name] = np.array(values)
    return made


def drift_record(one: dict[str, Any]) -> DriftRecord:
    """A description of type "drift" as a record; those of older versions lack some fields."""
    return DriftRecord(
        reducer=one["reducer"],
        step=one["step"],
        ok=bool(one["ok"]),
        first=one["first"],
        groups=tuple(tuple(ranks) for ranks in one["groups"]),
        **{name: int(one.get(name, 0)) for name in ("differing", "tensors", "bytes")},
        cost_ms=1e3 * one["seconds"],
        error=one.get("error", ""),
    )


def gradient_norm_columns(described: list[dict[str, Any]]) -> Columns:
    """One row for each step and bucket, and one for all buckets together, see `Timeline.gradients`."""
    rows = [row for one in described for row in _rows(one)]
    names = (
        "reducer", "step", "generation", "bucket", "ranks", "before", "before_mean", "before_min", "before_max",
        "after", "signal", "noise", "nonfinite", "nonfinite_rank", "nonfinite_parameter", "cost_ms",
    )  # fmt: skip
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    texts = ("before", "nonfinite", "nonfinite_parameter")
    return {name: objects(values) if name in texts else np.array(values) for name, values in columns.items()}


def _rows(one: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    before = np.array(one["before"], float)  # [ranks, buckets]; null becomes NaN
    after = np.array(one["after"], float)
    idle = np.isnan(before).all(axis=1)
    together = np.sqrt((before**2).sum(axis=1, keepdims=True))
    before = np.concatenate([together, before], axis=1)
    after = np.concatenate([[np.sqrt((after**2).sum())], after])
    signal, noise = signal_and_noise(before.T, after)
    bad = one["nonfinite"] or {"kind": "", "rank": -1, "parameter": ""}
    for place, norm in enumerate(after):
        column = before[:, place]
        known = column[~np.isnan(column)]
        yield (
            one["reducer"],
            one["step"],
            one["generation"],
            place - 1,
            int((~idle).sum()),
            {rank: float(value) for rank, value in zip(one["ranks"], column, strict=True) if not np.isnan(value)},
            *((float(known.mean()), float(known.min()), float(known.max())) if len(known) else (np.nan,) * 3),
            float(norm),
            float(signal[place]),
            float(noise[place]),
            bad["kind"],
            bad["rank"],
            bad["parameter"] or "",
            1e3 * one["seconds"],
        )


def signal_and_noise(before: _Floats, after: _Floats) -> tuple[_Floats, _Floats]:
    """|G|² and S of each step; NaN with fewer than two ranks.

    Args:
        before: norms of the ranks' gradients, shape [..., ranks]; NaN for ranks that had none.
        after: norms of their average, shape [...].
    """
    known = np.isfinite(before)
    ranks = known.sum(axis=-1)
    n = np.where(ranks > 1, ranks, np.nan)
    small = np.where(known, before, 0.0) ** 2
    mean = small.sum(axis=-1) / n
    big = after**2
    return (n * big - mean) / (n - 1), (mean - big) / (1 - 1 / n)


def noise_scale(signal: _Floats, noise: _Floats) -> float:
    """S / |G|² of averages over steps, in batches of a rank; NaN if the noise hides the gradient."""
    usable = np.isfinite(signal) & np.isfinite(noise)
    if not usable.any():
        return float("nan")
    mean = float(signal[usable].mean())
    return float(noise[usable].mean()) / mean if mean > 0 else float("nan")


def gradient_columns(
    views: Sequence[TableView], bucket_of: Mapping[tuple[int, int], _Int64], *, completing: bool = False
) -> Columns:
    """Rows in the order of time within each rank and step.

    Columns: ``rank``, ``reducer``, ``step``, ``bucket``, ``parameter`` (index), ``begin_ns`` (the gradient before it,
    or the backward's begin) and ``end_ns`` (it was accumulated), ``completes`` (it was the last of its bucket).

    Args:
        views: what to show.
        bucket_of: (reducer, generation) -> bucket by parameter; steps of other generations are ignored.
        completing: only those that were the last of their bucket.
    """
    nothing = dict.fromkeys(GRADIENT_COLUMNS, np.empty(0, np.int64))
    parts = [nothing | {"completes": np.empty(0, bool)}]
    for one in views:
        for generation in np.unique(one.generation).tolist():
            if (one.reducer, generation) in bucket_of:
                of_view = _completing if completing else _of_view
                parts.append(of_view(one, bucket_of[one.reducer, generation], generation))
    return {name: np.concatenate([part[name] for part in parts]) for name in GRADIENT_COLUMNS}


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
    """The rows of `_of_view` for the last gradient of each bucket, in any order, without computing the rows of the
    others, of which there may be hundreds of times as many.
    """
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
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.empty(0, np.int64)] * 5
    told = dict(zip(("step", "bucket", "parameter", "begin_ns", "end_ns"), columns, strict=True))
    count = len(told["step"])
    return {
        "rank": np.full(count, one.rank),
        "reducer": np.full(count, one.reducer),
        "completes": np.ones(count, bool),
        **told,
    }
