"""`ddp_lab.compare`: two recorded runs, per phase, rank and bucket, in words and as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..analysis.comparison import LEVEL, Difference, Key, compare_series, largest
from ..analysis.steps import Steps
from ..formatting import counted
from .model_registry import Layout
from .records import ReducerInfo
from .steady_steps import WARM_UP, SideBySide
from .timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "compare"]

_MOST_STEPS = 400
_PHASES = ("forward", "computation", "exposed", "other")
_MOST_NAMED = 3

_COLUMNS = (
    *(field.name for field in fields(Difference)),
    *("change_ms", "change_percent", "is_clear"),
)

_Series = dict[Key, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        a: name of the first run.
        b: name of the second.
        differences: one for every time that both runs have; see `Difference`.
        notes: what could not be compared, and why.
        steps: how many steps of each run were compared.
        warnings: why the runs are hard to compare: different numbers of ranks, another model.
        is_same: whether both are the same recording, with equal times.
    """

    a: str
    b: str
    differences: Sequence[Difference]
    notes: Sequence[str]
    steps: tuple[int, int]
    warnings: Sequence[str] = ()
    is_same: bool = False

    @property
    def step(self) -> Difference:
        """The whole step."""
        return next(one for one in self.differences if one.name == "step" and one.scope == "phase")

    def is_slower(self, threshold_percent: float = 0.0) -> bool:
        """Whether the second run's step is longer by at least this much, and the interval does not contain 0."""
        return self.step.low_ms > 0 and self.step.change_percent >= threshold_percent

    def frame(self) -> pd.DataFrame:
        """One row for each difference: its attributes and properties (see `Difference`)."""
        import pandas as pd  # half a second: only when a table is asked for

        rows = [{name: getattr(one, name) for name in _COLUMNS} for one in self.differences]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=list(_COLUMNS))
        return frame

    def as_dict(self, threshold_percent: float = 0.0) -> dict[str, Any]:
        """Everything as JSON-able values; infinite changes are None."""
        rows = [{name: _finite(getattr(one, name)) for name in _COLUMNS} for one in self.differences]
        return {
            "a": self.a,
            "b": self.b,
            "steps": list(self.steps),
            "threshold_percent": threshold_percent,
            "is_slower": self.is_slower(threshold_percent),
            "step": rows[list(self.differences).index(self.step)],
            "differences": rows,
            "notes": [*self.warnings, *self.notes],
            "is_same": self.is_same,
        }

    def __str__(self) -> str:
        return "\n".join(self._sentences())

    def _sentences(self) -> list[str]:
        step = self.step
        counts = f"medians of {self.steps[0]} and {self.steps[1]} steps"
        if self.is_same:
            times = f"{step.a_ms:.2f} ms per step, median of {self.steps[0]} steps"
            return [f"{self.a} and {self.b} are the same recording ({times}), so there is nothing to compare."]
        verdict = f"{self.b} is {'slower' if step.change_ms > 0 else 'faster'} than {self.a}"
        told = verdict if step.is_clear else f"No clear difference between {self.a} and {self.b}"
        lines = [*self.warnings, f"{told}: {_change(step)} per step ({counts})."]
        phases = [one for one in largest(self.differences, "phase", 10) if one.name in _PHASES]
        if phases:
            lines.append("By phase: " + "; ".join(f"{one.name} {_change(one)}" for one in phases) + ".")
        for one in largest(self.differences, "rank", _MOST_NAMED):
            lines.append(f"Rank {one.rank}, {one.name}: {_change(one)}.")
        for one in largest(self.differences, "bucket", _MOST_NAMED):
            lines.append(f"Bucket {one.bucket}, {one.name}: {_change(one)}.")
        return [*lines, *self.notes]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _change(one: Difference) -> str:
    """Both times, the change and its interval."""
    times = f"{one.a_ms:.2f} → {one.b_ms:.2f} ms"
    if not np.isfinite([one.change_percent, one.high_percent]).all():
        return f"{times} ({LEVEL} %: {one.low_ms:+.2f} to {one.high_ms:+.2f} ms)"
    return f"{times}, {one.change_percent:+.1f} % ({LEVEL} %: {one.low_percent:+.1f} to {one.high_percent:+.1f} %)"


def compare(
    run_a: Timeline | str | os.PathLike[str],
    run_b: Timeline | str | os.PathLike[str],
    *,
    models: tuple[int | None, int | None] = (None, None),
) -> Comparison:
    """Compares two recorded runs of a model: which phases, ranks and buckets are slower or faster, with intervals.

    The comparison uses the steps of each run with its last bucket layout, without the first three, and at most the
    newest 400.

    Args:
        run_a: a timeline, a file of `Timeline.save`, or a folder of `ddp-lab run`.
        run_b: the other one; changes are reported from the first to this one.
        models: which model of each; None for the most recently active.

    Raises:
        ValueError: a run has no model, or fewer than 5 complete steps, or the runs have nothing in common.
        FileNotFoundError: there is no such file.
    """
    names = _names(run_a, run_b)
    loaded = [run if isinstance(run, Timeline) else Timeline.load(run) for run in (run_a, run_b)]
    infos = [_model(*three) for three in zip(loaded, models, names, strict=True)]
    known = [_steps(*three) for three in zip(loaded, infos, names, strict=True)]
    steps, layouts = zip(*known, strict=True)
    common = [rank for rank in steps[0].ranks if rank in steps[1].ranks]
    warnings = _warnings(infos, names)
    held = [_buckets(one) for one in layouts]
    alike, notes = held[0] == held[1] and bool(held[0]), []
    if not alike:
        counts = f"{len(held[0])} in {names[0]}, {len(held[1])} in {names[1]}"
        notes = [f"The bucket layouts differ ({counts}), so buckets are not compared one by one."]
    series = [_series(one, common, with_buckets=alike) for one in steps]
    differences = compare_series(series[0], series[1])
    if not any(one.name == "step" for one in differences):
        raise ValueError(f"{names[0]} and {names[1]} have no rank in common: {steps[0].ranks} and {steps[1].ranks}")
    same = steps[0].ranks == steps[1].ranks and np.array_equal(steps[0].end, steps[1].end)
    return Comparison(names[0], names[1], differences, notes, (len(steps[0]), len(steps[1])), warnings, same)


def _names(a: object, b: object) -> tuple[str, str]:
    told = [Path(run).stem if isinstance(run, str | os.PathLike) else "" for run in (a, b)]
    made = (told[0] or "the first run", told[1] or "the second run")
    return made if made[0] != made[1] else (str(a), str(b))


def _model(timeline: Timeline, reducer: int | None, name: str) -> ReducerInfo:
    found = timeline.model(reducer)
    if found is None:
        raise ValueError(f"{name} contains no steps" + ("" if reducer is None else f" of model {reducer}"))
    return found


def _steps(timeline: Timeline, info: ReducerInfo, name: str) -> tuple[Steps, Layout]:
    """The steps of a run that are compared, and their buckets."""
    layout = timeline.analysis_layout(info.reducer)
    if layout is None:
        raise ValueError(f"{name} contains no step that all ranks have completed")
    chosen = layout.warm(WARM_UP, _MOST_STEPS)
    buckets = len(layout.description["buckets"]) if layout.description else None
    return SideBySide(timeline.views_of(info.reducer, chosen), chosen).steps(buckets), layout


def _warnings(infos: Sequence[ReducerInfo], names: Sequence[str]) -> list[str]:
    """Sentences about why two runs are hard to compare."""
    a, b = infos
    made = []
    if len(a.ranks) != len(b.ranks):
        made.append(
            f"{names[0]} ran on {counted(len(a.ranks), 'rank')}, {names[1]} on {counted(len(b.ranks), 'rank')}: their "
            "steps do different work, and only the ranks that both have are compared."
        )
    elif a.ranks != b.ranks:
        made.append(f"{names[0]} and {names[1]} ran on different ranks: only the ranks that both have are compared.")
    if a.module != b.module:
        made.append(f"The models differ: {a.module} in {names[0]}, {b.module} in {names[1]}.")
    return made


def _buckets(layout: Layout) -> list[list[str]]:
    """Names of the parameters of each bucket; empty if they are not known."""
    if layout.description is None:
        return []
    of_index = {one["index"]: one["name"] for one in layout.description["parameters"]}
    return [[of_index[index] for index in bucket["parameters"]] for bucket in layout.description["buckets"]]


def _series(steps: Steps, ranks: Sequence[int], *, with_buckets: bool) -> _Series:
    """Milliseconds by step: of all these ranks together (means), of each, and of each bucket."""
    rows = [steps.ranks.index(rank) for rank in ranks]
    if not rows:
        return {}
    by_rank = _phases(steps)
    made: _Series = {("phase", name, None, None): values[rows].mean(axis=0) for name, values in by_rank.items()}
    for row, rank in zip(rows, ranks, strict=True):
        made |= {("rank", name, rank, None): values[row] for name, values in by_rank.items() if name != "step"}
    if with_buckets:
        made |= _of_buckets(steps)
    return made


def _phases(steps: Steps) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds by phase, each of shape ``[ranks, steps]``; without whole steps, those of the backward."""
    whole, forward = steps.step_ns() / 1e6, steps.forward_ns() / 1e6
    if not np.isfinite(whole).any():
        whole = (steps.end - steps.begin) / 1e6
        forward = np.zeros_like(whole)
    computation = (steps.finalize - steps.begin) / 1e6
    exposed = (steps.end - steps.finalize) / 1e6
    other = whole - np.nan_to_num(forward) - computation - exposed
    return {"step": whole, "forward": forward, "computation": computation, "exposed": exposed, "other": other}


def _of_buckets(steps: Steps) -> _Series:
    made: _Series = {}
    zero = steps.begin.min(axis=0)
    for bucket in range(steps.ready.shape[2]):
        launched, reduced = steps.launched[:, :, bucket], steps.reduced[:, :, bucket]
        times = {
            "ready": steps.ready[:, :, bucket].max(axis=0) - zero,
            "waiting": launched.max(axis=0) - launched.min(axis=0),
            "all-reduce": reduced.max(axis=0) - launched.max(axis=0),
        }
        known = (launched > 0).all(axis=0) & (reduced > 0).all(axis=0)
        made |= {("bucket", name, None, bucket): np.where(known, ns / 1e6, np.nan) for name, ns in times.items()}
    return made
