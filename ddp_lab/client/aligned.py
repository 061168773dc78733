"""From step tables to `Steps`: the steps that all ranks have completed, as arrays with the ranks first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..insight.steps import Steps
from . import span_columns
from .span_columns import TableView
from .step_table import BUCKET_FIELDS, STEP_FIELDS

__all__ = ["aligned"]

_F, _B = {n: i for i, n in enumerate(STEP_FIELDS)}, {n: i for i, n in enumerate(BUCKET_FIELDS)}


def aligned(
    views: Sequence[TableView], last_steps: int | None = None, *, generation: int | None = None, warm_up: int = 0
) -> Steps:
    """Picks the common steps out of the tables of all ranks of one reducer.

    Args:
        views: one for each rank.
        last_steps: only so many newest ones.
        generation: only those of this assignment of buckets.
        warm_up: leave so many first steps out where there are at least twice as many.
    """
    common: npt.NDArray[np.int64] | None = None
    for one in views:
        done = one.steps[:, _F["backward_end"]] > 0
        if generation is not None:
            done &= one.generation == generation
        common = one.step[done] if common is None else np.intersect1d(common, one.step[done])
    if common is None:
        common = np.zeros(0, np.int64)
    if len(common) >= 2 * warm_up:
        common = common[warm_up:]
    common = common[-last_steps:] if last_steps is not None else common
    rows = [np.searchsorted(one.step, common) for one in views]
    on_device = bool(len(common)) and all(
        span_columns.device_rows(one.buckets[row]).all() for one, row in zip(views, rows, strict=True)
    )
    buckets = _stacked([one.buckets[row] for one, row in zip(views, rows, strict=True)], len(common))
    of_step = {
        name: np.stack([one.steps[row, column] for one, row in zip(views, rows, strict=True)])
        if views
        else np.zeros((0, 0), np.int64)
        for name, column in _F.items()
    }
    ready, launched, reduced = ("device_begin", "device_begin", "device_end") if on_device else _HOST
    return Steps(
        ranks=tuple(one.rank for one in views),
        step=common,
        forward_begin=of_step["forward_begin"],
        forward_end=of_step["forward_end"],
        begin=of_step["backward_begin"],
        finalize=of_step["finalize"],
        end=of_step["backward_end"],
        gradients=_stacked([one.gradients[row] for one, row in zip(views, rows, strict=True)], len(common)),
        ready=buckets[..., _B[ready]],
        launched=buckets[..., _B[launched]],
        reduced=buckets[..., _B[reduced]],
        on_device=on_device,
    )


_HOST = ("ready", "launched", "reduced")


def _stacked(parts: Sequence[npt.NDArray[np.int64]], steps: int) -> npt.NDArray[np.int64]:
    """Stacks arrays whose second axis may differ, filled up with 0."""
    if not parts:
        return np.zeros((0, steps, 0, len(BUCKET_FIELDS)), np.int64)
    most = max(part.shape[1] for part in parts)
    made = np.zeros((len(parts), steps, most, *parts[0].shape[2:]), np.int64)
    for index, part in enumerate(parts):
        made[index, :, : part.shape[1]] = part
    return made
