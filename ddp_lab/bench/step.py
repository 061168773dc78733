"""`ddp-lab bench step`: one training step under our DistributedDataParallel, under torch's, and under torch's again.

Each cell of the table is a workload in a mode (an argument of the wrapper's constructor), recording on. Within fresh
processes the three contestants are built anew several times and take turns, block by block, in changing order;
`ddp_lab.bench.ratios` says how ratios and bounds come from that. The whole table (16 cells, 5 sets) takes about 22
minutes on 2 cores; `--workloads`, `--modes`, `--sets` and `--seconds` make less of it. Run it on a quiet machine: the
last two columns, torch's class against itself, say how quiet it was.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import fresh_ranks, ratios, recording_cost
from .workloads import CONTESTANTS, MODES, WORKLOADS, Step, training_step, wrappers

__all__ = ["main", "measure"]

_BLOCK_S = 0.06  # a block is as many steps as fit, at least one
_WARM_UP = 4  # steps: the first bucket assignment, the rebuild, and two as all others


def _block(step: Step, count: int) -> float:
    """Median of `count` steps in ms."""
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def rank_zeros(value: int) -> int:
    """Rank 0's number, on all ranks: what depends on a clock must not differ between them."""
    told = torch.tensor([value])
    dist.broadcast(told, 0)
    return int(told.item())


def _build(module: torch.nn.Module, batch: torch.Tensor, mode: str, order: Sequence[str]) -> dict[str, Step]:
    classes = wrappers()
    return {who: training_step(classes[who](copy.deepcopy(module), **MODES[mode]), batch) for who in order}


def _compare(steps: dict[str, Step], until: float) -> ratios.Build:
    """Lets the contestants take turns until about this time (of `time.monotonic`)."""
    warm = {who: [_block(step, 1) for _ in range(_WARM_UP)] for who, step in steps.items()}
    usual = statistics.median(times[-1] for times in warm.values()) / 1e3
    count = rank_zeros(max(1, int(_BLOCK_S / usual)))
    names = list(steps)
    times: ratios.Build = {who: [] for who in CONTESTANTS}
    begin, turn, turns = time.monotonic(), 0, 2
    while turn < turns:
        for who in names[turn % 3 :] + names[: turn % 3]:
            times[who].append(_block(steps[who], count))
        turn += 1
        if turn == 2:
            a_turn = (time.monotonic() - begin) / turn
            turns = rank_zeros(max(3, round((until - begin) / a_turn)))
    return times


def _cell(workload: str, mode: str, seconds: float, builds: int, seed: int) -> list[ratios.Build]:
    """All builds of one cell, in about this time. Runs on each rank."""
    torch.manual_seed(0)
    module, batch = WORKLOADS[workload]()
    shuffle = random.Random(seed)
    begin = time.monotonic()
    found = []
    for number in range(builds):
        order = list(CONTESTANTS)
        shuffle.shuffle(order)
        steps = _build(module, batch, mode, order)
        found.append(_compare(steps, begin + seconds * (number + 1) / builds))
        del steps
        gc.collect()
    return found


def _cells(cells: Sequence[Sequence[str]], seconds: float, builds: int, seed: int) -> list[Any]:
    from ddp_lab import recording

    recording.enable()
    return [_cell(workload, mode, seconds, builds, seed + i) for i, (workload, mode) in enumerate(cells)]


def measure(
    workloads: Sequence[str] = tuple(WORKLOADS),
    modes: Sequence[str] = tuple(MODES),
    *,
    sets: int = 5,
    seconds: float = 15.0,
    builds: int = 3,
    ranks: int = 2,
    threads: int = 1,
) -> dict[str, Any]:
    """Measures on Gloo processes.

    Args:
        workloads: of `WORKLOADS`.
        modes: of `MODES`.
        sets: how many times all processes are started anew.
        seconds: for each cell in each set.
        builds: how many times the contestants are built anew in a cell of a set.
        ranks: processes in a set.
        threads: intra-op threads of each rank.

    Returns:
        ``cells``: a list of dicts with ``workload``, ``mode``, ``ms`` (median step by contestant), the ratios of
        `ratios.ratios`, and ``sets`` (all blocks' medians, ms); beside it what was asked for.
    """
    cells = [(workload, mode) for workload in workloads for mode in modes]
    measured: list[list[list[ratios.Build]]] = []
    for number in range(sets):
        seed = 1000 * number
        measured.append(fresh_ranks.run(_cells, cells, seconds, builds, seed, ranks=ranks, threads=threads))
    found = []
    for i, (workload, mode) in enumerate(cells):
        of_sets = [one[i] for one in measured]
        found.append(
            {"workload": workload, "mode": mode, "ms": ratios.medians(of_sets), "sets": of_sets}
            | ratios.ratios(of_sets)
        )
    return {
        "torch": torch.__version__,
        "ranks": ranks,
        "threads": threads,
        "number of sets": sets,
        "seconds": seconds,
        "builds": builds,
        "cells": found,
    }


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"torch {summary['torch']}, {summary['ranks']} Gloo ranks with {summary['threads']} thread each, recording on; "
        f"medians over {summary['number of sets']} fresh sets of processes with {summary['builds']} builds each",
        ratios.header(f"{'workload':14} {'mode':24}", "ms"),
    ]
    for cell in summary["cells"]:
        lines.append(ratios.row(f"{cell['workload']:14} {cell['mode']:24}", cell["ms"], cell))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="ddp-lab bench step", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--sets", type=int, default=5, help="fresh sets of processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each cell in each set (%(default)s)")
    parser.add_argument("--builds", type=int, default=3, help="of each cell in each set (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of each rank")
    parser.add_argument("--recording", action="store_true", help="also what recording costs: on, off and on again")
    parser.add_argument("--json", type=Path, help="write the full result here")
    given = parser.parse_args(argv)
    summary = measure(
        given.workloads,
        given.modes,
        sets=given.sets,
        seconds=given.seconds,
        builds=given.builds,
        ranks=given.ranks,
        threads=given.threads,
    )
    sys.stdout.write(_table(summary) + "\n")
    if given.recording:
        summary["recording"] = recording_cost.measure(given.workloads, ranks=given.ranks, threads=given.threads)
        sys.stdout.write(recording_cost.table(summary["recording"]) + "\n")
    if given.json:
        given.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
