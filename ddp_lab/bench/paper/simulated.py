"""What the simulator makes of the paper's cluster, figure by figure; rows of numbers, JSON-able.

Where a figure needs more than `ddp_lab.bench.paper.hardware` holds, it is assumed here and named as such:

- *outliers* (figures 7 and 8): in each step each GPU is late with a probability of `LATE`, by an exponentially
  distributed time of `LATE_BY` of the step on average. All wait for the latest, so with twice as many GPUs there are
  about twice as many outliers.
- *groups that take turns* (figure 12): between two bounds. Either all groups share the bandwidth that one has
  (`shared`: only latencies overlap), or each has as much again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...simulation.simulator import Configuration, simulate
from . import hardware
from .series import EVERY, GROUPS
from .settings import PARTS

__all__ = [
    "LATE",
    "LATE_BY",
    "breakdown",
    "buckets",
    "communication",
    "readiness",
    "round_robin",
    "scaling",
    "skipping",
    "steps_of",
]

Rows = list[dict[str, Any]]

LATE, LATE_BY = 0.003, 0.15
_STEPS = 400  # of a distribution
_CAPS_MB = (0, 1, 2, 5, 10, 25, 50, 100, 200)
_WORLDS = (16, 32, 64, 128, 256)
_CALLS = (*(10**power for power in range(3, 8)), 20_000_000, 60_000_000)  # parameters


def communication(parameters: int = 60_000_000, ranks: int = 32) -> Rows:
    """Figure 2: ``seconds`` to all-reduce so many float32 in calls of ``size`` parameters, one after the other."""
    rows = []
    for backend in hardware.BACKENDS:
        link = hardware.link(backend)
        for size in _CALLS:
            seconds = float(link.time_ns(4.0 * size, ranks)) * parameters / size / 1e9
            rows.append({"backend": backend, "ranks": ranks, "size": size, "seconds": seconds})
    return rows


def readiness() -> Rows:
    """Figure 2: for each model when how many ``parameters`` are ``ready``, ms since the backward began."""
    rows = []
    for name, make in hardware.MODELS.items():
        workload = make()
        order = list(workload.order)
        counts = np.cumsum(workload.sizes[order] / 4)
        rows.append(
            {"model": name, "parameters": counts.tolist(), "ready": (workload.ready_ns[0, order] / 1e6).tolist()}
        )
    return rows


def breakdown(ranks: int = 32) -> Rows:
    """Figure 6: the parts of a step in percent of the step without overlap."""
    rows = []
    for model, backend in hardware.GAINS:
        steps = [
            simulate(
                hardware.MODELS[model](),
                Configuration(world_size=ranks, overlap=overlap),
                hardware.link(backend),
            )
            for overlap in (False, True)
        ]
        for overlap, step in zip((False, True), steps, strict=True):
            times = (step.forward_ns, step.compute_ns, step.exposed_ns, step.other_ns)
            parts = {part: 100 * ns / steps[0].step_ns for part, ns in zip(PARTS, times, strict=True)}
            rows.append({"model": model, "backend": backend, "ranks": ranks, "overlap": overlap, "parts": parts})
    return rows


def steps_of(ms: float, ranks: int, chance: np.random.Generator) -> list[float]:
    """Steps of which some are outliers, as the module says.

    Args:
        ms: a step in which nobody is late.
        ranks: GPUs.
        chance: where from.
    """
    late = chance.random((_STEPS, ranks)) < LATE
    by = chance.exponential(LATE_BY * ms, (_STEPS, ranks))
    return [round(one, 3) for one in (ms + (late * by).max(axis=1)).tolist()]


def buckets(ranks: int) -> Rows:
    """Figures 7 (16 GPUs) and 8 (32): for each size ``ms``, and the ``steps`` of a run with outliers."""
    chance, rows = np.random.default_rng(ranks), []
    for model, backend in hardware.GAINS:
        found = hardware.bucket_sweep(model, backend, _CAPS_MB, ranks).step_ns / 1e6
        for cap, ms in zip(_CAPS_MB, found.tolist(), strict=True):
            row = {"model": model, "backend": backend, "ranks": ranks, "cap_mb": cap, "ms": ms}
            rows.append(row | {"steps": steps_of(ms, ranks, chance)})
    return rows


def scaling() -> Rows:
    """Figure 9: a step in multiples of one GPU's; beyond 32 GPUs in the shared pool."""
    rows = []
    for model, backend in hardware.GAINS:
        times = [1.0, *hardware.scaling(model, backend, _WORLDS).tolist()]
        for ranks, times_as_long in zip((1, *_WORLDS), times, strict=True):
            rows.append({"model": model, "backend": backend, "ranks": ranks, "ratio": times_as_long})
    return rows


def skipping() -> Rows:
    """Figure 10: the time of a backward in percent of that with every one averaged."""
    rows = []
    for model, backend in hardware.GAINS:
        for ranks in _WORLDS:
            saved = [0.0, *hardware.skip_sync(model, backend, EVERY[1:], ranks).tolist()]
            for every, percent in zip(EVERY, saved, strict=True):
                row = {"model": model, "backend": backend, "ranks": ranks, "every": every}
                rows.append(row | {"percent": 100 - percent})
    return rows


def round_robin(ranks: int = 16) -> Rows:
    """Figure 12: the step in multiples of that with one group, at both bounds."""
    rows = []
    for model, backend in hardware.GAINS:
        link, workload = hardware.link(backend), hardware.MODELS[model]()
        asked = Configuration(world_size=ranks)
        one = simulate(workload, asked, link).step_ns
        for shared in (True, False):
            for groups in GROUPS:
                several = replace(link, lanes=groups * link.lanes, sharing=1.0 if shared or groups == 1 else 0.0)
                ratio = simulate(workload, asked, several).step_ns / one
                row = {"model": model, "backend": backend, "ranks": ranks, "groups": groups, "shared": shared}
                rows.append(row | {"ratio": ratio})
    return rows
