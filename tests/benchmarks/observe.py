"""A training step of torch's own DistributedDataParallel, `fully_shard` or HSDP, observed and not.

One wrapped model takes turns, block by block: observed (recording on), not (off), and not again. So model, memory and
processes are the same in what is compared. `ddp_lab.bench.measuring.ratios` says how ratios and bounds come from the
blocks. Not observed against itself says how quiet the machine was; nothing is subtracted for it.

"CPU" is the time of the processor, user's and system's, that all threads of rank 0's process took for a step: what a
step costs where ranks fill all cores. Waits are not in it; on a small machine it is no steadier than the duration.

What happens once is not measured: the first step of a block, in which places of the program are met for the first time,
and the first seconds of a process, in which its stack is looked at more often (see `activity`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab import observe, recording
from ddp_lab.bench.measuring import fresh_ranks, ratios
from ddp_lab.bench.measuring.command import option
from ddp_lab.bench.measuring.fresh_ranks import block, rank_zeros
from ddp_lab.bench.measuring.workloads import MODES, WORKLOADS, Step, training_step, wrappers
from ddp_lab.command_line import count, seconds
from ddp_lab.errors import DdpLabError

# Contestants of `ratios`: "ours" is observed, "torch" and "torch again" are not.
_TURNS = ("torch", "ours", "torch again")
_SHARDED = "fully_shard"  # each child with parameters is a group
_HYBRID = "hsdp"  # the same, on a mesh of 2 × ranks / 2: sharded in one dimension, replicated in the other
_MODES = (*MODES, _SHARDED, _HYBRID)
_BLOCK_S = 0.06
_WARM_UP = 4
_FIRST_S = 5.0

Observing = Callable[[], AbstractContextManager[object]]
Builds = dict[str, ratios.Build]  # "wall" and "cpu", ms


def _model(workload: str, mode: str) -> tuple[Observing, Step]:
    torch.manual_seed(0)
    module, batch = WORKLOADS[workload]()
    if mode not in (_SHARDED, _HYBRID):
        wrapped = wrappers()["torch"](module, **MODES[mode])
        return lambda: observe(wrapped), training_step(wrapped, batch)
    sharded = _sharded(module, hybrid=mode == _HYBRID)
    step = training_step(sharded, batch)
    observation = observe(sharded)
    observation.remove()

    def again() -> AbstractContextManager[object]:
        observation.start(sharded)  # with its number: a new one would have to be described in each block
        return observation

    return again, step


def _sharded(module: torch.nn.Module, *, hybrid: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")) if hybrid else None
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _build(observing: Observing, step: Step, until: float) -> Builds:
    """Lets one model take turns until about this time (of `time.monotonic`)."""
    usual = [block(step, 1)[0] for _ in range(_WARM_UP)][-1] / 1e3
    count = rank_zeros(max(2, int(_BLOCK_S / usual)))
    found: Builds = {kind: {who: [] for who in _TURNS} for kind in ("wall", "cpu")}
    begin, turn, turns = time.monotonic(), 0, 2
    while turn < turns:
        for who in _TURNS[turn % 3 :] + _TURNS[: turn % 3]:
            with observing() if who == "ours" else recording.suspended():
                wall, cpu = _timed(step, count)
            found["wall"][who].append(wall)
            found["cpu"][who].append(cpu)
        turn += 1
        if turn == 2:
            turns = rank_zeros(max(3, round((until - begin) / ((time.monotonic() - begin) / turn))))
    return found


def _timed(step: Step, count: int) -> tuple[float, float]:
    """Of a block's steps: the median duration, and the mean time of the processor, in ms."""
    step()
    begin = time.process_time()
    times = block(step, count)
    return statistics.median(times), (time.process_time() - begin) / count * 1e3


def _pass_first_seconds(workload: str, mode: str) -> None:
    observing, step = _model(workload, mode)
    with observing():
        begin = time.monotonic()
        while rank_zeros(int(time.monotonic() - begin < _FIRST_S)):
            step()


def _cells(cells: Sequence[Sequence[str]], seconds: float, builds: int) -> list[Any]:
    recording.enable()
    _pass_first_seconds(*cells[0])
    found = []
    for workload, mode in cells:
        begin = time.monotonic()
        found.append([_build(*_model(workload, mode), begin + seconds * (n + 1) / builds) for n in range(builds)])
        gc.collect()
    return found


def measure(
    workloads: Sequence[str] = tuple(WORKLOADS),
    modes: Sequence[str] = ("plain",),
    *,
    sets: int = 5,
    seconds: float = 15.0,
    builds: int = 3,
    ranks: int = 2,
    threads: int = 1,
) -> dict[str, Any]:
    """Measures on Gloo processes; the arguments are those of `ddp_lab.bench.step.measure`.

    Returns:
        ``cells``: a list of dicts with ``workload``, ``mode``, and of ``"wall"`` and ``"cpu"`` each a dict: ``ms``
        (median step by contestant), the ratios of `ratios.ratios` (``"ours"`` is observed), and ``sets`` (all blocks).
    """
    if _HYBRID in modes and (ranks < 4 or ranks % 2):
        raise DdpLabError(f"{_HYBRID} needs an even number of ranks, at least 4; give --ranks 4")
    cells = [(workload, mode) for workload in workloads for mode in modes]
    measured = [fresh_ranks.run(_cells, cells, seconds, builds, ranks=ranks, threads=threads) for _ in range(sets)]
    found = []
    for i, (workload, mode) in enumerate(cells):
        cell: dict[str, Any] = {"workload": workload, "mode": mode}
        for kind in ("wall", "cpu"):
            sets_of = [[build[kind] for build in one[i]] for one in measured]
            cell[kind] = {"ms": ratios.medians(sets_of), "sets": sets_of} | ratios.ratios(sets_of)
        found.append(cell)
    return {"torch": torch.__version__, "ranks": ranks, "sets": sets, "builds": builds, "cells": found}


def table(summary: dict[str, Any]) -> str:
    """The figures as lines."""
    columns = f"{'off':>9} {'on':>9} {'on/off':>8} {'(95 % <)':>9} {'off/off':>8} {'(95 % <)':>9}"
    lines = [
        f"torch {summary['torch']}, {summary['ranks']} Gloo ranks, torch's classes; medians over {summary['sets']} "
        f"fresh sets of processes with {summary['builds']} builds each",
        f"{'workload':14} {'mode':24} {'ms':5} {columns}",
    ]
    for cell in summary["cells"]:
        for kind, unit in (("wall", ""), ("cpu", "CPU")):
            one = cell[kind]
            lines.append(
                f"{cell['workload']:14} {cell['mode']:24} {unit:5} {one['ms']['torch']:9.2f} {one['ms']['ours']:9.2f} "
                f"{one['ours / torch']:8.3f} {one['ours / torch upper']:9.3f} {one['torch again / torch']:8.3f} "
                f"{one['torch again / torch upper']:9.3f}"
            )
    return "\n".join(lines)


OPTIONS = (
    option("--workloads", nargs="+", choices=list(WORKLOADS)),
    option("--modes", nargs="+", choices=_MODES),
    option("--sets", type=count, help="fresh sets of processes (%(default)s)"),
    option("--seconds", type=seconds, help="for each cell in each set (%(default)s)"),
    option("--builds", type=count, help="of each cell in each set (%(default)s)"),
    option("--ranks", type=count),
)
