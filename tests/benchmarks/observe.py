"""A training step of torch's own DistributedDataParallel, or with `fully_shard`, observed and not.

One wrapped model takes turns, block by block: observed (recording on), not (off), and not again. So model, memory and
processes are the same in what is compared. The last two columns, not observed against itself, say how quiet the
machine was; `ddp_lab.bench.measuring.ratios` says how ratios and bounds come from the blocks.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ddp_lab.bench.measuring import fresh_ranks, ratios
from ddp_lab.bench.measuring.command import new_parser, show
from ddp_lab.bench.measuring.fresh_ranks import block, rank_zeros
from ddp_lab.bench.measuring.workloads import MODES, WORKLOADS, Step, training_step, wrappers
from ddp_lab.command_line import count, seconds

__all__ = ["main", "measure"]

# Contestants of `ratios`: "ours" is observed, "torch" and "torch again" are not.
_TURNS = ("torch", "ours", "torch again")
_SHARDED = "fully_shard"  # each child with parameters is a group
_MODES = (*MODES, _SHARDED)
_BLOCK_S = 0.06
_WARM_UP = 4


def _build(workload: str, mode: str, until: float) -> ratios.Build:
    """Lets one model take turns until about this time (of `time.monotonic`)."""
    torch.manual_seed(0)
    module, batch = WORKLOADS[workload]()
    model = _sharded(module) if mode == _SHARDED else wrappers()["torch"](module, **MODES[mode])
    step = training_step(model, batch)
    usual = [block(step, 1)[0] for _ in range(_WARM_UP)][-1] / 1e3
    count = rank_zeros(max(2, int(_BLOCK_S / usual)))
    times: ratios.Build = {who: [] for who in _TURNS}
    begin, turn, turns = time.monotonic(), 0, 2
    while turn < turns:
        for who in _TURNS[turn % 3 :] + _TURNS[: turn % 3]:
            times[who].append(_timed(model, step, count, observed=who == "ours"))
        turn += 1
        if turn == 2:
            turns = rank_zeros(max(3, round((until - begin) / ((time.monotonic() - begin) / turn))))
    return times


def _sharded(module: torch.nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(module)


def _timed(model: Any, step: Step, count: int, *, observed: bool) -> float:
    """Median of a block's steps in ms."""
    from ddp_lab import observe, recording

    with observe(model) if observed else recording.suspended():
        return statistics.median(block(step, count))


def _cells(cells: Sequence[Sequence[str]], seconds: float, builds: int) -> list[Any]:
    from ddp_lab import recording

    recording.enable()
    found = []
    for workload, mode in cells:
        begin = time.monotonic()
        found.append([_build(workload, mode, begin + seconds * (n + 1) / builds) for n in range(builds)])
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
        ``cells``: a list of dicts with ``workload``, ``mode``, ``ms`` (median step by contestant), the ratios of
        `ratios.ratios` (``"ours"`` is observed), and ``sets`` (all blocks' medians, ms).
    """
    cells = [(workload, mode) for workload in workloads for mode in modes]
    measured = [fresh_ranks.run(_cells, cells, seconds, builds, ranks=ranks, threads=threads) for _ in range(sets)]
    found = []
    for i, (workload, mode) in enumerate(cells):
        of_sets = [one[i] for one in measured]
        found.append(
            {"workload": workload, "mode": mode, "ms": ratios.medians(of_sets), "sets": of_sets}
            | ratios.ratios(of_sets)
        )
    return {"torch": torch.__version__, "ranks": ranks, "sets": sets, "builds": builds, "cells": found}


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"torch {summary['torch']}, {summary['ranks']} Gloo ranks, torch's class; medians over {summary['sets']} fresh "
        f"sets of processes with {summary['builds']} builds each",
        f"{'workload':14} {'mode':24} {'off ms':>9} {'on ms':>9} {'on/off':>8} {'(95 % <)':>9} {'off/off':>8} "
        f"{'(95 % <)':>9}",
    ]
    for cell in summary["cells"]:
        lines.append(
            f"{cell['workload']:14} {cell['mode']:24} {cell['ms']['torch']:9.2f} {cell['ms']['ours']:9.2f} "
            f"{cell['ours / torch']:8.3f} {cell['ours / torch upper']:9.3f} {cell['torch again / torch']:8.3f} "
            f"{cell['torch again / torch upper']:9.3f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("python -m tests.benchmarks observe", __doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=["plain"])
    parser.add_argument("--sets", type=count, default=5, help="fresh sets of processes (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=15.0, help="for each cell in each set (%(default)s)")
    parser.add_argument("--builds", type=count, default=3, help="of each cell in each set (%(default)s)")
    parser.add_argument("--ranks", type=count, default=2)
    given = parser.parse_args(argv)
    summary = measure(
        given.workloads,
        given.modes,
        sets=given.sets,
        seconds=given.seconds,
        builds=given.builds,
        ranks=given.ranks,
    )
    show(summary, _table(summary), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
