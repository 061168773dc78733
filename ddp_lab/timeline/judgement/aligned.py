"""From step tables to `Steps`: the steps that all ranks have completed, as arrays with the ranks first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...analysis.steps import Steps
from ..tables import span_columns
from ..tables.span_columns import TableView
from ..tables.step_table import BUCKET_FIELDS, STEP_FIELDS

__all__ = ["aligned"]

_F, _B = {n: i for i, n in enumerate(STEP_FIELDS)}, {n: i for i, n in enumerate(BUCKET_FIELDS)}


def aligned(views: Sequence[TableView], step: npt.NDArray[np.int64], buckets: int | None = None) -> Steps:
    """Picks steps out of the tables of all ranks of one model.

    Args:
        views: one for each rank.
        step: which, ascending; all of them are in all tables (see `layouts.py`).
        buckets: how many these steps have; None: as many as the tables, which are as wide as the widest layout.
    """
    rows = [np.searchsorted(one.step, step) for one in views]
    on_device = bool(len(step)) and all(
        span_columns.device_rows(one.buckets[row]).all() for one, row in zip(views, rows, strict=True)
    )
    times = _stacked([one.buckets[row, :buckets] for one, row in zip(views, rows, strict=True)], len(step))
    of_step = {
        name: np.stack([one.steps[row, column] for one, row in zip(views, rows, strict=True)])
        if views
        else np.zeros((0, 0), np.int64)
        for name, column in _F.items()
    }
    ready, launched, reduced = ("device_begin", "device_begin", "device_end") if on_device else _HOST
    return Steps(
        ranks=tuple(one.rank for one in views),
        step=step,
        forward_begin=of_step["forward_begin"],
        forward_end=of_step["forward_end"],
        begin=of_step["backward_begin"],
        finalize=of_step["finalize"],
        end=of_step["backward_end"],
        gradients=_stacked([one.gradients[row] for one, row in zip(views, rows, strict=True)], len(step)),
        ready=times[..., _B[ready]],
        launched=times[..., _B[launched]],
        reduced=times[..., _B[reduced]],
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
