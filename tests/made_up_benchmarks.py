"""Results of benchmarks as a quiet machine would give them, made up."""

from __future__ import annotations

from functools import partial
from typing import Any

from ddp_lab.bench.measuring import noise, ratios
from ddp_lab.bench.measuring.collectives import LIMITS

QUIET = [0.01] * 5
JUDGE = partial(noise.figure, others=QUIET)


def spread(middle: float, part: float = 0.02) -> list[float]:
    """Five sets' values around a middle one."""
    return [middle * (1 + part * step) for step in (-2, 1, 0, -1, 2)]


def collectives(sizes: list[int], operations: tuple[str, ...] = ("all_reduce",), worlds: tuple[int, ...] = (2,)) -> Any:
    """What `all_reduce.measure` returns; the last row's Gloo is too noisy."""
    sides = {"shm": 3.0, "shm shared": 2.0, "gloo": 200.0} | dict.fromkeys(LIMITS, 1.0)
    rows = [
        {
            "operation": operation,
            "ranks": ranks,
            "bytes": size,
            "sides": {
                name: noise.figure(spread(base * ranks * (1 + size / 1e4)), QUIET) for name, base in sides.items()
            },
            "ratios": {},
            "missing": {},
        }
        for operation in operations
        for ranks in worlds
        for size in sizes
    ]
    rows[-1]["sides"]["gloo"] = noise.figure(spread(500.0, 0.3), QUIET)
    return {"torch": "2.13.0", "backends": ["shm", "gloo"], "dtype": "float32", "number of sets": 5, "rows": rows}


def builds(times: dict[str, float]) -> list[list[ratios.Build]]:
    """Five sets of two builds with three turns each."""
    return [[{who: [ms * turn] * 3 for who, ms in times.items()} for _ in range(2)] for turn in spread(1.0, 0.01)]


def step_cells(models: tuple[str, ...]) -> Any:
    """What `step.measure` returns: torch's class waits 10 ms on Gloo, ours 2 on shm, both compute for 20."""
    floors = builds({"torch": 20.0, "ours": 20.0})
    of_backends = {
        "gloo": (builds({"torch": 30.0, "ours": 28.0, "torch again": 30.0}), floors),
        "shm": (builds({"torch": 23.0, "ours": 22.0, "torch again": 23.0}), floors),
    }
    classes = ratios.exposed(of_backends, JUDGE)
    cells = [
        {"workload": model, "mode": "plain", "backend": backend, "classes": classes[backend]}
        for model in models
        for backend in of_backends
    ]
    return {"ranks": 2, "threads": 1, "number of sets": 5, "cells": cells}
