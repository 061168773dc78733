"""The table of predicted memory: from the descriptions of measured steps (`ddp_lab.measure_memory`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ...simulation.memory import (
    Mark,
    MemoryPart,
    ModuleUse,
    ParameterMemory,
    PredictedMemory,
    RecordedMemory,
    predict,
)
from ...simulation.parameter_groups import Sharding
from .span_columns import Columns, objects

__all__ = ["STRATEGIES", "predicted_columns", "recorded_memory"]

STRATEGIES = ("ddp", "ddp, views", "zero-1", "fully_shard")
_PARTS = ("parameters", "gradients", "buckets", "optimizer", "communication", "activations")


def recorded_memory(description: Mapping[str, Any]) -> RecordedMemory:
    """A step from its description, which was checked."""
    known = {one.name for one in fields(RecordedMemory)}
    marks = description["marks"]
    names = [one.name for one in fields(Mark)]
    rows = zip(*(marks[name] for name in names), strict=True)
    parameters = [{**one, "shape": tuple(one["shape"])} for one in description["parameters"]]
    taken = {name: value for name, value in description.items() if name in known} | {
        "parameters": tuple(_made(ParameterMemory, one) for one in parameters),
        "modules": tuple(_made(ModuleUse, one) for one in description["modules"]),
        "marks": tuple(Mark(MemoryPart(part), *rest) for part, *rest in rows),
    }
    return RecordedMemory(**taken)


def _made(kind: Any, found: Mapping[str, Any]) -> Any:
    return kind(**{one.name: found[one.name] for one in fields(kind)})


def predicted_columns(by_rank: Iterable[RecordedMemory], ranks: int | None, sharding: Sharding | None) -> Columns:
    """A row for each of `STRATEGIES`: of the rank that would hold most.

    Raises:
        ValueError: see `predict`.
    """
    steps = list(by_rank)
    found = [
        max((predict(one, strategy, ranks=ranks, sharding=sharding) for one in steps), key=lambda made: made.peak)
        for strategy in STRATEGIES
    ]
    return {
        "strategy": objects([one.strategy for one in found]),
        "peak_bytes": _integers(found, "peak"),
        **{f"{part}_bytes": _integers(found, part) for part in _PARTS},
        "where": objects([one.where for one in found]),
    }


def _integers(found: Sequence[PredictedMemory], name: str) -> Any:
    return np.array([getattr(one, name) for one in found], np.int64)
