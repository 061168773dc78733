"""How long the constructor takes, ours and torch's in turns.

Each round wraps a fresh copy of the model in each class, in changing order, all ranks beginning together; the object
is gone before the next one is made. Ratios and bounds as in `ddp_lab.bench.measuring.ratios`, one build for each set.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.bench.measuring import fresh_ranks, ratios
from ddp_lab.bench.measuring.command import aligned, option
from ddp_lab.bench.measuring.workloads import CONTESTANTS, WORKLOADS, wrappers
from ddp_lab.command_line import count


def _seconds_to_wrap(wrap: Any, module: torch.nn.Module) -> float:
    own = copy.deepcopy(module)
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    model = wrap(own)
    took = time.perf_counter() - begin
    del model
    gc.collect()
    return took


def _time(names: Sequence[str], rounds: int) -> list[list[ratios.Build]]:
    """For each workload its one build: times in ms. Runs on each rank."""
    classes = wrappers()
    found = []
    for name in names:
        torch.manual_seed(0)
        module, _ = WORKLOADS[name]()
        for wrap in classes.values():
            _seconds_to_wrap(wrap, module)
        times: ratios.Build = {who: [] for who in CONTESTANTS}
        for turn in range(rounds):
            for who in CONTESTANTS[turn % 3 :] + CONTESTANTS[: turn % 3]:
                times[who].append(1e3 * _seconds_to_wrap(classes[who], module))
        found.append([times])
    return found


def measure(
    workloads: Sequence[str] = ("small_tensors", "mlp"), *, sets: int = 5, rounds: int = 15, ranks: int = 2
) -> dict[str, Any]:
    """Measures on Gloo processes.

    Args:
        workloads: of `WORKLOADS`.
        sets: how many times all processes are started anew.
        rounds: turns of each class in a set.
        ranks: processes in a set.

    Returns:
        ``workloads``: name -> ``ms`` (median time by contestant), the ratios of `ratios.ratios`, and ``sets`` (all
        times, ms); beside it what was asked for.
    """
    measured = [fresh_ranks.run(_time, tuple(workloads), rounds, ranks=ranks) for _ in range(sets)]
    found = {}
    for i, name in enumerate(workloads):
        of_sets = [one[i] for one in measured]
        found[name] = {"ms": ratios.medians(of_sets), "sets": of_sets} | ratios.ratios(of_sets)
    return {"torch": torch.__version__, "ranks": ranks, "number of sets": sets, "rounds": rounds, "workloads": found}


def table(summary: dict[str, Any]) -> str:
    """The figures as lines."""
    about = (
        f"torch {summary['torch']}, {summary['ranks']} Gloo ranks; medians over {summary['number of sets']} fresh sets "
        f"of processes with {summary['rounds']} constructions of each"
    )
    lines = [["workload", "torch ms", "ours ms", "ours/torch", "(95 % <)", "torch/torch", "(95 % <)"]]
    for name, one in summary["workloads"].items():
        compared = [one[ratio + end] for ratio in ("ours / torch", "torch again / torch") for end in ("", " upper")]
        times = [f"{one['ms'][who]:.2f}" for who in ("torch", "ours")]
        lines.append([name, *times, *(f"{ratio:.3f}" for ratio in compared)])
    return "\n".join([about, *aligned(lines, left=1)])


OPTIONS = (
    option("--workloads", nargs="+", choices=list(WORKLOADS)),
    option("--sets", type=count, help="fresh sets of processes (%(default)s)"),
    option("--rounds", type=count, help="turns of each class in a set (%(default)s)"),
    option("--ranks", type=count),
)
