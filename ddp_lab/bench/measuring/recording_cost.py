"""The cost of recording (without a client): of a training step, on, off and on again in alternating blocks; and of a
collective, on a group that communicates nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import command, fresh_ranks
from .workloads import WORKLOADS, training_step

__all__ = ["collective_table", "collectives", "in_turns", "measure", "paired", "table"]

# Steps of a block, by workload.
_CALLS = 2_000  # collectives of a block
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


def _per_collective(rounds: int) -> dict[str, dict[str, float]]:
    """ns that recording adds to a collective: off and on. Runs on each rank, in a process that has not recorded any."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from ddp_lab import recording
    from ddp_lab.parallel.monitoring import group_collectives

    small, large = torch.ones(16), torch.ones(16 * dist.get_world_size())
    group: Any = dist.new_group(backend="fake")
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(small, group=group),
        "all_gather": lambda: group._allgather_base(large, small),
        "reduce_scatter": lambda: group._reduce_scatter_base(small, large),
        "broadcast": lambda: dist.broadcast(small, group_src=0, group=group),
    }
    never = {name: min(_block_ns(call) for _ in range(rounds + 1)) for name, call in calls.items()}
    group_collectives.record()
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        _block_ns(call)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * rounds):
            (recording.disable if turn % 2 else recording.enable)()
            times[turn % 2 == 0].append(_block_ns(call))
        off, on = (min(times[kind]) - never[name] for kind in (False, True))
        found[name] = {"call": never[name], "off": off, "on": on}
    recording.enable()
    return found


def _block_ns(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter_ns() - begin) / _CALLS


def collectives(*, rounds: int = 12) -> dict[str, dict[str, float]]:
    """What recording adds to a collective; the best of several blocks, of one rank of torch's backend "fake".

    Returns:
        operation -> ``call``: ns of a call that nobody records; ``off`` and ``on``: ns that are added to it while the
        recorder is off and on.
    """
    found: dict[str, dict[str, float]] = fresh_ranks.run(_per_collective, rounds, ranks=1)
    return found


def collective_table(found: dict[str, dict[str, float]]) -> str:
    """One line for each operation."""
    lines = [["collective", "call ns", "recorder off adds ns", "on adds ns"]]
    lines += [[name, *(f"{one[what]:.0f}" for what in ("call", "off", "on"))] for name, one in found.items()]
    return "\n".join(command.aligned(lines, left=1))
