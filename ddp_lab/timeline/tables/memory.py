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
from ...simulation.parameter_groups import Sharding, groups_by_name, numbered_modules
from .span_columns import Columns, objects

__all__ = ["STRATEGIES", "newest_measured", "predicted_columns", "sharding_of"]

STRATEGIES = ("ddp", "ddp, views", "zero-1", "fully_shard")
_PARTS = ("parameters", "gradients", "buckets", "optimizer", "communication", "activations")


def _recorded(description: Mapping[str, Any]) -> RecordedMemory:
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


def newest_measured(measured: Mapping[int, Sequence[Mapping[str, Any]]], models: Sequence[int]) -> list[RecordedMemory]:
    """The measured step of each rank of the last of these models that has one.

    Args:
        measured: model -> the description of each rank's step.
        models: which may be taken, the best one last.

    Raises:
        ValueError: none has one.
    """
    found = next((measured[model] for model in reversed(models) if model in measured), None)
    if found is None:
        raise ValueError(
            "the memory of no step was measured; train one on all ranks with "
            "`ddp_lab.measure_memory(training_step, model, optimizer)`"
        )
    return [_recorded(one) for one in found]


def sharding_of(
    steps: Sequence[RecordedMemory],
    groups: str | Sequence[str | Sequence[str]] | None,
    reshard_after_forward: bool,
    prefetch: int | None,
) -> Sharding:
    """How `fully_shard` would hold the parameters of a measured step; arguments as of `Timeline.predicted_memory`."""
    names = [one.name for one in steps[0].parameters]
    ahead = None if prefetch is True else prefetch  # as torch does it, in releases that took a flag
    return Sharding(
        groups_by_name(names, numbered_modules(names) if groups is None else groups), reshard_after_forward, ahead
    )


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
