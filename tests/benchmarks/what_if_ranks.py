"""The rank side of the benchmark `what-if`: trains one model with bucket caps in turns, and keeps all events."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ddp_lab.bench.measuring.workloads import WORKLOADS, training_step
from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.timeline import Timeline

__all__ = ["WARM_UP", "drained", "load", "save", "train"]

WARM_UP = 3  # steps after each change of the buckets that don't count
_UNLIMITED_MB = 1e9  # for a cap of infinity


def train(model: str, caps_mb: Sequence[float], rounds: int, steps: int, path: str) -> dict[str, float]:
    """Trains with every cap in every round, in shuffled order, on all ranks.

    Args:
        model: of `WORKLOADS`.
        caps_mb: bucket caps in MiB.
        rounds: how often each cap has its turn.
        steps: of each turn, beside `WARM_UP`.
        path: rank 0 saves everybody's events there, for `load`.

    Returns:
        Generation of the buckets (as text, for JSON) -> the cap that made them.
    """
    from ddp_lab import DistributedDataParallel, recording

    recording.enable()
    torch.manual_seed(0)
    module, batch = WORKLOADS[model]()
    ddp = DistributedDataParallel(module)
    step = training_step(ddp, batch)
    for _ in range(WARM_UP):
        step()
    shuffle = random.Random(0)
    cursor, parts = recording.statistics().recorded, []
    made: dict[str, float] = {}
    for _ in range(rounds):
        for cap in shuffle.sample(list(caps_mb), len(caps_mb)):
            ddp.reconfigure(bucket_cap_mb=min(cap, _UNLIMITED_MB))
            made[str(ddp.reducer.generation())] = cap
            for _ in range(WARM_UP + steps):
                step()
            taken, cursor = drained(cursor)
            parts += taken
    described = [one for one in recording.descriptions(0)[0] if one["type"] == "assignment"]
    save(np.concatenate(parts), described, path)
    return made


def drained(cursor: int) -> tuple[list[npt.NDArray[np.void]], int]:
    from ddp_lab import recording

    parts = []
    while cursor < recording.statistics().recorded:
        events, dropped, cursor = recording.drain(cursor)
        if dropped:
            raise RuntimeError(f"{dropped} events were overwritten before they were read; train fewer steps per turn")
        parts.append(events)
    return parts, cursor


def save(events: npt.NDArray[np.void], described: list[dict[str, Any]], path: str) -> None:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((events, described), of_ranks if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        held = {f"events{rank}": array for rank, (array, _) in enumerate(of_ranks)}
        np.savez(path, **held, descriptions=np.array(json.dumps([descriptions for _, descriptions in of_ranks])))


def load(path: str) -> Timeline:
    """What `train` saved, all of its steps."""
    timeline = Timeline(max_steps=1_000_000, max_events=100_000_000)
    with np.load(path) as saved:
        for rank, descriptions in enumerate(json.loads(str(saved["descriptions"]))):
            for one in descriptions:
                timeline.describe(rank, one | {"session": 1})
            events = saved[f"events{rank}"]
            timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))
    return timeline
