"""The cost of recording in a training step: on, off and on again, in alternating blocks (without a client)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from . import command, fresh_ranks
from .workloads import WORKLOADS, training_step

__all__ = ["in_turns", "measure", "paired", "table"]

# Steps of a block, by workload.
_BLOCK = {"mlp": 4, "transformer": 4, "conv_net": 12, "small_tensors": 20}


def in_turns(name: str, rounds: int) -> dict[str, float]:
    """Trains a workload under our class. Runs on each rank.

    Args:
        name: of `WORKLOADS`.
        rounds: blocks of each kind.

    Returns:
        Median step time in ms of each kind of block, ``events`` a step, and ``ns`` an event.
    """
    times, events, ns = _alternating(name, rounds, ("on", "off", "on again"))
    return {kind: statistics.median(time for one in of for time in one) for kind, of in times.items()} | {
        "events": events,
        "ns": ns,
    }


def paired(name: str, rounds: int) -> dict[str, Any]:
    """The same with blocks on, off and off again.

    Returns:
        ``on``, ``off`` and ``off again``: median step time in ms of each block, shape ``[rounds]``; ``events``, ``ns``.
    """
    times, events, ns = _alternating(name, rounds, ("on", "off", "off again"))
    medians = {kind: [statistics.median(one) for one in of] for kind, of in times.items()}
    return {**medians, "events": events, "ns": ns}


def _alternating(name: str, rounds: int, kinds: tuple[str, ...]) -> tuple[dict[str, list[list[float]]], float, float]:
    """Step times of each block by kind, events a step, and ns an event."""
    from ddp_lab import DistributedDataParallel, recording

    torch.manual_seed(0)
    module, batch = WORKLOADS[name]()
    step, count = training_step(DistributedDataParallel(module), batch), _BLOCK[name]
    fresh_ranks.block(step, max(4, count // 2))
    before = recording.statistics().recorded
    fresh_ranks.block(step, count)
    events = (recording.statistics().recorded - before) / count
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
            (recording.disable if kind.startswith("off") else recording.enable)()
            times[kind].append(fresh_ranks.block(step, count))
    recording.enable()
    return times, events, recording.statistics(measure=True).ns_per_event or 0.0


def _all(names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    return {name: in_turns(name, rounds) for name in names}


def measure(names: Sequence[str], *, rounds: int = 12, ranks: int = 2, threads: int = 1) -> dict[str, Any]:
    """Measures each workload in one set of processes; for each the dict of `in_turns`."""
    found: dict[str, Any] = fresh_ranks.run(_all, tuple(names), rounds, ranks=ranks, threads=threads)
    return found


def table(found: dict[str, Any]) -> str:
    """One line for each workload."""
    lines = [["workload", "on ms", "on/off", "on/on", "events per step", "ns per event", "share"]]
    for name, one in found.items():
        on, events, ns = (one[what] for what in ("on", "events", "ns"))
        ratios = [f"{on / one[kind]:.3f}" for kind in ("off", "on again")]
        lines.append([name, f"{on:.2f}", *ratios, f"{events:.0f}", f"{ns:.1f}", f"{events * ns / (on * 1e6):.3%}"])
    return "\n".join(command.aligned(lines, left=1))
