"""Watched gradients on the client: what ranks describe of them, bounded, and as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analysis import gradient_noise
from ..records import DriftRecord
from .span_columns import Columns

__all__ = ["ALL_BUCKETS", "GradientBook", "drift_columns", "gradient_norm_columns"]

ALL_BUCKETS = -1
_MOST_STEPS = 20_000


class GradientBook:
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

    def gradients(self, reducer: int | None, last_steps: int | None) -> list[dict[str, Any]]:
        """Descriptions of type "gradients", by model and step."""
        return self._of("gradients", reducer, last_steps)

    def drift(self, reducer: int | None, last_steps: int | None = None) -> list[DriftRecord]:
        """Comparisons of replicas, by model and step."""
        return [drift_record(one) for one in self._of("drift", reducer, last_steps)]

    def _of(self, wanted: str, reducer: int | None, last_steps: int | None) -> list[dict[str, Any]]:
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
            made[one.name] = np.empty(len(values), object)
            made[one.name][:] = ["" if value is None else value for value in values]
        else:
            made[one.name] = np.array(values)
    return made


def drift_record(one: dict[str, Any]) -> DriftRecord:
    """A description of type "drift" as a record; those of older versions lack some fields."""
    groups = tuple(tuple(ranks) for ranks in one["groups"])
    differing, tensors, read = (int(one.get(name, 0)) for name in ("differing", "tensors", "bytes"))
    return DriftRecord(
        reducer=one["reducer"],
        step=one["step"],
        ok=bool(one["ok"]),
        first=one["first"],
        groups=groups,
        differing=differing,
        tensors=tensors,
        bytes=read,
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
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    objects = ("before", "nonfinite", "nonfinite_parameter")
    made: dict[str, npt.NDArray[Any]] = {}
    for name, values in columns.items():
        if name in objects:
            made[name] = np.empty(len(values), object)
            made[name][:] = values
        else:
            made[name] = np.array(values, np.int64 if all(isinstance(v, int) for v in values) and values else None)
    return made


def _rows(one: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    before = np.array(one["before"], float)  # [ranks, buckets]; null becomes NaN
    after = np.array(one["after"], float)
    idle = np.isnan(before).all(axis=1)
    together = np.sqrt((before**2).sum(axis=1, keepdims=True))
    before = np.concatenate([together, before], axis=1)
    after = np.concatenate([[np.sqrt((after**2).sum())], after])
    signal, noise = gradient_noise.signal_and_noise(before.T, after)
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
