"""A user's change of a model's buckets or hook during training, and the steps before and after it.

[Note: what is a change]
Buckets are also rebuilt for other reasons: once after the first step, and after a rejoin, which first restores the
initial layout. These are not changes of the user: at most the order of the gradients differs. A change has other
options (size limits, hook), or another order that no rebuild explains. Faults make steps longer or shorter, so only
steps between the last fault that began or ended before the change and the next one after it are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import means_by_step
from ..faults import mark_kind
from .event_tables import TimelineModel
from .model_registry import alike
from .steady_steps import ANALYSED_STEPS, WARM_UP
from .tables.span_columns import Columns, step_columns

__all__ = ["BucketChange", "last_change"]

_Rows = npt.NDArray[np.bool_]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class BucketChange:
    """A change of a model's buckets or hook.

    Attributes:
        before: description of the bucket layout before it.
        after: description of the layout after it.
        steps: numbers of the steps on both sides.
        times: times of these steps in milliseconds, the mean over the ranks.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    steps: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    times: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

    @property
    def keeps_buckets(self) -> bool:
        """Whether buckets, their order and the hook are the same as before."""
        one, other = self.before, self.after
        members = [[bucket["parameters"] for bucket in side["buckets"]] for side in (one, other)]
        return members[0] == members[1] and _hook(one) == _hook(other)


def last_change(
    timeline: TimelineModel,
    reducer: int,
    what: str = "step_ms",
    last_steps: int = ANALYSED_STEPS,
    generation: int | None = None,
) -> BucketChange:
    """The last change of a model, see [Note: what is a change].

    Args:
        timeline: where the steps are.
        reducer: which model.
        what: a column of `Timeline.steps` in ms.
        last_steps: so many steps on each side at most, the newest.
        generation: of an assignment: the change that led to it; None for the last change.

    Raises:
        ValueError: nothing was changed.
    """
    info = next((one for one in timeline.reducers() if one.reducer == reducer), None)
    described = [timeline.assignment(reducer, number) for number in info.generations] if info else []
    periods = _periods(described)
    if generation is not None:
        periods = periods[: 1 + next((n for n, one in enumerate(periods) if generation in _numbers(one)), -1)]
    if len(periods) < 2:
        raise ValueError("the bucket layout and the comm hook have not changed, so there is nothing to compare")
    columns = step_columns(timeline.views(reducer))  # without pandas, which takes a second to load
    complete = columns["state"] == "complete"
    columns = {name: values[complete] for name, values in columns.items()}
    faults = np.array([at for _, at, name in timeline.marks() if mark_kind(name) in ("begin", "end")], np.int64)
    before, after = (np.isin(columns["generation"], _numbers(one)) for one in periods[-2:])
    rows = _undisturbed(columns, before, after, faults)
    sides = [_by_step(columns["step"][one], columns[what][one], last_steps) for one in rows]
    return BucketChange(periods[-2][-1], periods[-1][-1], (sides[0][0], sides[1][0]), (sides[0][1], sides[1][1]))


def _periods(described: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Assignments, oldest first, in groups between which something was changed."""
    made: list[list[dict[str, Any]]] = []
    rebuilds = False  # the first assignment is back, and is rebuilt after a step
    for one in described:
        if not made or not _is_changed(made[-1][-1], one, rebuilds):
            made[-1:] = [[*(made[-1] if made else []), one]]
        else:
            made.append([one])
        options = one.get("options") or {}
        searches = options.get("find_unused_parameters") and not options.get("static_graph")
        rebuilds = not one["rebuilt"] and not searches
    return made


def _is_changed(before: dict[str, Any], after: dict[str, Any], rebuilds: bool) -> bool:
    """Whether the user changed something between two assignments; `rebuilds`: `before` is to be rebuilt anyway."""
    if alike(before, after):
        return False
    same = before.get("options") == after.get("options")
    return not (same and (rebuilds or not after["rebuilt"]))


def _numbers(period: list[dict[str, Any]]) -> list[int]:
    return [one["generation"] for one in period]


def _hook(assignment: dict[str, Any]) -> Any:
    return (assignment.get("options") or {}).get("comm_hook")


def _undisturbed(columns: Columns, before: _Rows, after: _Rows, faults: npt.NDArray[np.int64]) -> list[_Rows]:
    """Which of these rows lie between the last fault before the change and the next one after it.

    Args:
        columns: of `Timeline.steps`.
        before: which rows are before the change.
        after: which are after it.
        faults: when one began or ended.
    """
    if not after.any() or not len(faults):
        return [before, after]
    begin, end = columns["backward_begin_ns"], columns["backward_end_ns"]
    changed = begin[after].min()
    first, last = faults[faults < changed].max(initial=0), faults[faults >= changed].min(initial=_NEVER)
    disturbed = np.unique(columns["step"][(begin <= first) | (end >= last)])
    kept = ~np.isin(columns["step"], disturbed)
    return [before & kept, after & kept]


def _by_step(
    step: npt.NDArray[np.int64], ms: npt.NDArray[np.float64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The newest steps and the mean of each over its rows, without the first ones and those of unknown time."""
    numbers, means = means_by_step(step, ms)
    known = np.isfinite(means) & (np.arange(len(means)) >= WARM_UP)
    return numbers[known][-most:], means[known][-most:]
