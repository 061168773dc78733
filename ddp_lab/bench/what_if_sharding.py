"""Compares predicted with measured steps of models with sharded parameters: `ddp-lab bench what-if --sharding`.

Two ranks or more train each model as DistributedDataParallel, with ZeRO-1, and with `fully_shard` and `replicate` in
several groupings, in turns; an even number of at least four also with `fully_shard` on two replicas (HSDP). What
sharding costs is measured before, without the models. ZeRO-1 and `fully_shard` are predicted from the recorded steps of
DDP; of `fully_shard`, HSDP and `replicate` each the other groupings from those with a group for each layer. No step of
what is predicted is used.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..parallel.monitoring.sharding_cost import measure as measure_sharding
from ..simulation.sharding import ShardingCosts
from . import sharding_ranks, what_if_ranks
from .measuring import command, fresh_ranks
from .sharding_ranks import LAYERS, Way

__all__ = ["measure", "table"]

_SEVERAL = 2  # groups in one
_FROM = {"DDP": "ddp", "fully_shard": "each", "replicate": "copies", "HSDP": "hsdp"}
"""What is predicted from: the recorded way."""


def _ways(model: str, ranks: int) -> dict[str, Way]:
    """What is trained: each layer a group, two in one, the whole model; without resharding, and with prefetching;
    replicated, and on two replicas."""
    each = LAYERS[model]
    merged = tuple(
        tuple(name for group in each[first : first + _SEVERAL] for name in group)
        for first in range(0, len(each), _SEVERAL)
    )
    two_replicas = {
        "hsdp": Way("fully_shard", each, replicas=2),
        "hsdp merged": Way("fully_shard", merged, replicas=2),
    }
    return {
        "ddp": Way("ddp"),
        "zero-1": Way("zero-1"),
        "each": Way("fully_shard", each),
        "merged": Way("fully_shard", merged),
        "whole": Way("fully_shard"),
        "kept": Way("fully_shard", each, reshard=False),
        "ahead": Way("fully_shard", each, ahead=True),
        "copies": Way("replicate", each),
        "copies merged": Way("replicate", merged),
        **(two_replicas if ranks > 2 and ranks % 2 == 0 else {}),
    }


def measure(models: Sequence[str], ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Trains, predicts and scores; see the module.

    Args:
        models: of `WORKLOADS`.
        ranks: world size.
        rounds: turns of each way.
        steps: of each turn.

    Returns:
        ``ways`` (model, way, source: of `_FROM`, measured and predicted ms, error), ``errors`` (by source and way:
        cells, median, worst), ``best`` (by model: the grouping with `fully_shard` that is predicted to be the
        fastest from another one, and how much longer it takes than the one that was measured to be), ``seconds``.
    """
    began = time.monotonic()
    cells: list[dict[str, Any]] = []
    for model in models:
        costs = ShardingCosts.measured(fresh_ranks.run(measure_sharding, ranks=ranks))
        cells += _predicted(model, costs, ranks, rounds, steps)
    return {
        "ways": cells,
        "errors": {
            source: _errors([one for one in cells if one["source"] == source])
            for source in _FROM
            if any(one["source"] == source for one in cells)
        },
        "best": [_best(model, [one for one in cells if one["model"] == model]) for model in models],
        "ranks": ranks,
        "rounds": rounds,
        "steps": steps,
        "seconds": time.monotonic() - began,
    }


def _predicted(model: str, costs: ShardingCosts, ranks: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    ways = _ways(model, ranks)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "run.npz"))
        found = fresh_ranks.run(sharding_ranks.train, model, ways, rounds, steps, path, ranks=ranks)
        timeline = what_if_ranks.load(path)
    cells = []
    for name, way in ways.items():
        measured = statistics.median(statistics.median(turn) for turn in found["ms"][name])
        for source, recorded in _FROM.items():
            known = ways.get(recorded)
            if known is None or name == recorded or not _follows(known, way):
                continue
            options: dict[str, Any] = {"sharding": way.kind}
            if way.kind in ("fully_shard", "replicate"):
                options["groups"] = way.groups
            if way.kind == "fully_shard":
                options |= {"reshard_after_forward": way.reshard, "prefetch": int(way.ahead)}
            value = timeline.simulate(costs, model=found["models"][recorded], **options).step_ms
            cells.append(
                {"model": model, "way": name, "source": source, "measured": measured, "predicted": value}
                | {"error": value / measured - 1}
            )
    return cells


def _follows(recorded: Way, way: Way) -> bool:
    """Whether one can be predicted from the other."""
    kinds = ("zero-1", "fully_shard") if recorded.kind == "ddp" else (recorded.kind,)
    return way.kind in kinds and way.replicas == recorded.replicas


def _errors(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for way in ("all", *dict.fromkeys(one["way"] for one in cells)):
        errors = [abs(one["error"]) for one in cells if way in ("all", one["way"])]
        found[way] = {"cells": len(errors), "median": float(np.median(errors)), "worst": max(errors)}
    return found


def _best(model: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the ways that are predicted from a step with `fully_shard`."""
    tried = [one for one in cells if one["source"] == "fully_shard"]
    chosen, fastest = (min(tried, key=lambda one: float(one[what])) for what in ("predicted", "measured"))
    cost = chosen["measured"] / fastest["measured"] - 1
    return {"model": model, "way": chosen["way"], "measured_best": fastest["way"], "cost": cost}


def table(found: dict[str, Any]) -> str:
    """What `measure` returned, as text."""
    cells = [["model", "way", "predicted from", "measured", "predicted", "error"]]
    for one in found["ways"]:
        times = [f"{one[what]:.1f}" for what in ("measured", "predicted")]
        cells.append([one["model"], one["way"], one["source"], *times, f"{100 * one['error']:+.1f}%"])
    about = f"{found['ranks']} Gloo ranks, {found['rounds']} rounds of {found['steps']} steps, {found['seconds']:.0f} s"
    lines = [about, *command.aligned(cells, left=3)]
    for source, ways in found["errors"].items():
        for way, values in ways.items():
            lines.append(
                f"from {source}: {way:13} {values['cells']:3.0f} steps: error {100 * values['median']:.1f} % median, "
                f"{100 * values['worst']:.1f} % worst"
            )
    for one in found["best"]:
        lines.append(
            f"best way for {one['model']}: predicted {one['way']}, measured {one['measured_best']}: "
            f"{100 * one['cost']:+.1f} % of its step"
        )
    return "\n".join(lines)
