"""A change between two steps that a cell asks for: for tuning while nothing else trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..monitoring.inspection import live_models

__all__ = ["apply"]


def apply(reducer: int, change: Mapping[str, Any]) -> None:
    """Gives the model with this number, on this rank, what `change` says. All of its ranks call it alike.

    Args:
        reducer: what this rank calls the model.
        change: arguments of `DistributedDataParallel.reconfigure`; empty: nothing happens.
    """
    if not change:
        return
    for model in live_models():
        if model.reducer_id == reducer:
            model.reconfigure(**change)  # type: ignore[operator]
            return
    raise KeyError(f"no living model of ddp_lab's class has reducer id {reducer}")
