"""The numbers behind the views: what steps consist of, for whom the others waited, when parameters are ready."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..timeline.tables import span_columns
from ..timeline.tables.span_columns import Columns, TableView
from ..timeline.tables.step_table import STEP_FIELDS
from ..timeline.timeline import Timeline

__all__ = ["Breakdown", "Sync", "Waiting", "breakdown", "readiness", "sync", "unused", "waiting"]

_Values = npt.NDArray[np.float64]
_MOST_STEPS = 200
_UNUSED_STEPS = 100
_READINESS_STEPS = 20
_BEGIN, _END = STEP_FIELDS.index("backward_begin"), STEP_FIELDS.index("backward_end")


@dataclass(frozen=True)
class Breakdown:
    """What each step consists of: milliseconds, medians over the ranks, shape ``[steps]``.

    Attributes:
        step: numbers of the steps.
        other: optimizer, input data and the rest, from the end of the step before.
        forward: the last forward before the backward.
        alone, hidden: the backward's computation without and with collectives under way behind it.
        exposed: communication after it.
    """

    step: npt.NDArray[np.int64]
    other: _Values
    forward: _Values
    alone: _Values
    hidden: _Values
    exposed: _Values

    @property
    def total(self) -> _Values:
        """Milliseconds of the step."""
        return self.floor + self.exposed

    @property
    def floor(self) -> _Values:
        """What the step would take without exposed communication."""
        return self.other + self.forward + self.alone + self.hidden

    @property
    def efficiency(self) -> _Values:
        """The floor's share of the step, 0 to 1; NaN for a step that takes no time."""
        share = np.full(len(self.step), np.nan)
        np.divide(self.floor, self.total, out=share, where=self.total > 0)
        return share


@dataclass(frozen=True)
class Waiting:
    """For whom the others waited.

    Attributes:
        ranks: of the rows.
        cells: ms a step that all other ranks waited for this one alone, shape ``[ranks, buckets]``.
        share: in what share of the collectives each rank was the last.
        steps: over how many steps.
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
    """Returns what the complete steps of a model consist of.

    Args:
        timeline: where they are.
        reducer: which model; None for the most recently active.
        last_steps: only so many newest ones.
    """
    found = _model(timeline, reducer)
    columns = timeline.step_columns(found, last_steps)
    chosen = columns["state"] == "complete"
    columns = {name: values[chosen] for name, values in columns.items()}
    number = np.unique(columns["step"]).astype(np.int64)
    of = np.searchsorted(number, columns["step"])
    # Each rank's own: a device times collectives on another clock than the host its computation.
    columns["hidden_ms"] = np.minimum(columns["hidden_ms"], columns["compute_ms"])
    middle = {name: _medians(columns[f"{name}_ms"], of, len(number)) for name in _PARTS}
    told = {name: np.nan_to_num(values) for name, values in middle.items()}
    sum_ = told["forward"] + told["compute"] + told["exposed"]
    other = np.maximum(told["step"] - sum_, 0.0)
    return Breakdown(number, other, told["forward"], told["compute"] - told["hidden"], told["hidden"], told["exposed"])


_PARTS = ("step", "forward", "compute", "hidden", "exposed")


def waiting(timeline: Timeline, reducer: int | None = None, last_steps: int = 100) -> Waiting:
    """Returns for whom the others waited in the newest steps; arguments as those of `breakdown`."""
    columns, ranks = _sync_columns(timeline, reducer, last_steps)
    buckets = int(columns["bucket"].max()) + 1 if len(columns["bucket"]) else 0
    cells, share = np.zeros((len(ranks), buckets)), np.zeros(len(ranks))
    steps = len(np.unique(columns["step"]))
    if buckets and len(ranks) > 1:
        waits = np.array([[one[rank] for rank in ranks] for one in columns["wait_ms"]])
        row = np.searchsorted(ranks, columns["last_rank"])
        # The last waits 0; the one before it as long as only the last was missing.
        np.add.at(cells, (row, columns["bucket"].astype(int)), np.sort(waits, axis=1)[:, 1])
        share = np.bincount(row, minlength=len(ranks)) / len(row)
    return Waiting(ranks, cells / max(steps, 1), share, steps)


def sync(timeline: Timeline, reducer: int | None = None, last_steps: int = 100) -> Sync:
    """Returns the gradient sync of each bucket; arguments as those of `breakdown`."""
    columns, ranks = _sync_columns(timeline, reducer, last_steps)
    bucket = np.unique(columns["bucket"]).astype(np.int64)
    of = np.searchsorted(bucket, columns["bucket"])
    late, reduce, speed = (
        _medians(columns[name].astype(float), of, len(bucket))
        for name in ("late_ms", "all_reduce_ms", "bandwidth_gb_s")
    )
    return Sync(bucket, late, reduce, speed, speed * 2 * (len(ranks) - 1) / max(len(ranks), 1))


def _sync_columns(timeline: Timeline, reducer: int | None, last_steps: int) -> tuple[Columns, tuple[int, ...]]:
    """Gradient sync of the layout that is judged, and the ranks of the model."""
    found = _model(timeline, reducer)
    info = next((one for one in timeline.reducers() if one.reducer == found), None)
    ranks = info.ranks if info is not None else ()
    layout = timeline.judged(found)
    views = timeline.views_of(found, layout.step[-last_steps:]) if layout is not None else []
    return span_columns.sync_columns(span_columns.span_columns(views, {}), {found: len(ranks)}), ranks


def _model(timeline: Timeline, reducer: int | None) -> int:
    known = [one.reducer for one in timeline.reducers() if one.last_step >= 0]
    return reducer if reducer is not None else known[-1] if known else -1


def _medians(values: _Values, groups: npt.NDArray[np.int64], count: int) -> _Values:
    """Median of each group, NaN where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group of NaN alone
        return np.array(
            [np.nanmedian(values[groups == one]) if (groups == one).any() else np.nan for one in range(count)]
        )


def readiness(views: Sequence[TableView], parameters: int = 0) -> dict[str, Any]:
    """Returns when each parameter's gradient was ready: medians over ranks and steps, and in what share of them it was.

    Args:
        views: tables of the ranks of one model; its newest steps under the newest assignment count, if they have ended.
        parameters: how many the model has: a table ends with the last one that ever got a gradient.

    Returns:
        ``generation``, -1 if no step has ended: then nothing is known; ``ready``: ms since the rank's backward began,
        None for none; ``used``: 0 to 1.
    """
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
    """Returns the indices of the parameters without a gradient in the newest steps that have ended.

    Args:
        timeline: where the steps are.
        assignment: the one that is shown; of steps under another one nothing is told.
    """
    parameters = len(assignment["parameters"])
    found = readiness(timeline.views(assignment["reducer"], _UNUSED_STEPS), parameters)
    if found["generation"] != assignment["generation"]:
        return set()
    return {index for index, share in enumerate(found["used"]) if share == 0}
