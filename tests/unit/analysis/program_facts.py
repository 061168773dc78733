"""Made-up facts about the program around a model, and about the dimensions of a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddp_lab.analysis.findings import Facts, MeshDimension
from ddp_lab.analysis.step_parts import Place, PlaceTime, StepParts
from tests.unit.step_model import StepModel

# 16 gradients of 1 MB, each 1 ms; collectives of 0.1 ms + 0.4 ms a MB: hidden.
MODEL = StepModel(
    gradients=[1.0] * 16,
    sizes=[1_000_000] * 16,
    buckets=[[one] for one in range(16)],
    per_mb=0.4,
    options={"gradient_as_bucket_view": True},
)
CPU = {"host": "here", "cores": 4, "threads": 2}


def facts(parts: dict[str, float], *lines: PlaceTime, **fields: Any) -> Facts:
    """Facts about two ranks whose mean step has these parts (ms)."""
    known = MODEL.record(20).analysis_input()
    seconds = {name: ms / 1e3 for name, ms in parts.items()}
    told = StepParts(20, dict.fromkeys((0, 1), seconds), dict.fromkeys((0, 1), lines), {0: 50, 1: 50})
    return replace(known, **{"parts": told, "processes": {0: CPU, 1: CPU}, **fields})


def on_gpu(made: Facts) -> Facts:
    return replace(made, keys=[(dtype, "cuda:0") for dtype, _ in made.keys])


def at(part: str, text: str = "", ms: float = 2.0, **fields: Any) -> PlaceTime:
    return PlaceTime(Place(part, "train.py:7", text, **fields), ms / 1e3)


SMALL = StepModel(
    gradients=[1.0] * 4, sizes=[1_000_000] * 4, buckets=[[0, 1], [2, 3]], options={"gradient_as_bucket_view": True}
)
SHARD = MeshDimension("shard", between_hosts=True, bytes=3e6, ns=3e6, waited_ns=2e6)  # 1 GB/s
REPLICATE = MeshDimension("replicate", between_hosts=False, bytes=1e6, ns=1e5, waited_ns=1e5)  # 10 GB/s
