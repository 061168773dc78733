"""Compares a training step with our DistributedDataParallel and torch's, on every backend.

Each row of the table is a model in a mode (an argument of the wrapper's constructor) on a backend, with recording on.
Within fresh processes the contestants (torch's class twice) are built several times on each backend, and alternate
block by block in changing order; ours and torch's also under ``no_sync``, the no-communication baseline: the time above
it is exposed communication. On CPUs, ``limit`` is what is exposed if the ranks only meet (an all-reduce of one element)
after the backward and each of them reads and writes its gradients once, all at the same time: no all-reduce that does
not overlap the backward can do less. `ddp_lab.bench.measuring.ratios` explains how ratios, bounds and exposed
communication are computed, `ddp_lab.bench.measuring.noise` which results are too noisy to show. The four models in
plain mode on both backends (5 sets) take about 9 minutes on 2 cores; use `--models`, `--backends`, `--sets` and
`--seconds` for less, `--modes` for more. Run it on a quiet machine: the last two columns, torch's class against itself,
show how quiet it was. ``--device cuda`` does the same on GPUs with NCCL; a step then ends when its last kernel has.
Ranks that share a GPU take turns on it: with more ranks than GPUs, ratios say little about speed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import command_line
from .measuring import collectives, command, fresh_ranks, noise, ratios, recording_cost
from .measuring.command import option
from .measuring.workloads import CONTESTANTS, MODES, WORKLOADS, Step, training_step, wrappers

__all__ = ["main", "measure"]

_BACKENDS = {"cpu": ("gloo", "shm"), "cuda": ("nccl",)}
_WARM_UP = 4  # steps: the first bucket assignment, the rebuild, and two as all others

_Side = tuple[str, str, bool]  # backend, contestant or `ratios.LIMIT`, under no_sync
_Contest = dict[str, dict[str, ratios.Build]]  # backend -> "build" and "floor"


def _build(
    module: torch.nn.Module, batch: torch.Tensor, mode: str, groups: dict[str, Any], shuffle: random.Random
) -> dict[_Side, Step]:
    """Builds the contestants anew on every backend, in changing order; those without communication share the model."""
    classes = wrappers()
    order = [(backend, who) for backend in groups for who in CONTESTANTS]
    shuffle.shuffle(order)
    steps: dict[_Side, Step] = {}
    for backend, who in order:
        model = classes[who](copy.deepcopy(module), process_group=groups[backend], **MODES[mode])
        steps[backend, who, False] = training_step(model, batch)
        if who in ratios.CLASSES:
            steps[backend, who, True] = training_step(model, batch, alone=True)
        if who == "ours" and not batch.is_cuda:
            least = partial(_meet_and_touch, list(model.parameters()), groups[backend], torch.zeros(1))
            steps[backend, ratios.LIMIT, True] = training_step(model, batch, alone=True, after=least)
    return steps


def _meet_and_touch(parameters: Sequence[torch.Tensor], group: Any, one: torch.Tensor) -> None:
    dist.all_reduce(one, group=group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)


def _compare(steps: dict[_Side, Step], until: float, shuffle: random.Random) -> _Contest:
    """Lets all sides take turns until about this time (of `time.monotonic`)."""
    # No model's first step may be one without communication.
    sides = {side: steps[side] for side in sorted(steps, key=lambda side: side[2])}
    times = fresh_ranks.take_turns(sides, {side: 2 if side[2] else _WARM_UP for side in sides}, until, shuffle)
    found: _Contest = {}
    for (backend, who, alone), taken in sorted(times.items()):
        found.setdefault(backend, {"build": {}, "floor": {}})["floor" if alone else "build"][who] = taken
    return found


def _cell(
    workload: str, mode: str, groups: dict[str, Any], device: str, seconds: float, builds: int, shuffle: random.Random
) -> list[_Contest]:
    """All builds of one model in one mode, in about this time. Runs on each rank."""
    torch.manual_seed(0)
    module, batch = WORKLOADS[workload]()
    module, batch = module.to(device), batch.to(device)
    begin = time.monotonic()
    found = []
    for number in range(builds):
        steps = _build(module, batch, mode, groups, shuffle)
        found.append(_compare(steps, begin + seconds * (number + 1) / builds, shuffle))
        del steps
        gc.collect()
    return found


def _set(
    cells: Sequence[Sequence[str]], names: Sequence[str], device: str, seconds: float, builds: int, seed: int
) -> list[Any]:
    from ddp_lab import recording

    recording.enable()
    groups = collectives.groups(names)
    return [
        _cell(workload, mode, groups, device, seconds * len(groups), builds, random.Random(seed + i))
        for i, (workload, mode) in enumerate(cells)
    ]


def measure(
    workloads: Sequence[str] = tuple(WORKLOADS),
    modes: Sequence[str] = ("plain",),
    *,
    backends: Sequence[str] | None = None,
    device: str = "cpu",
    sets: int = 5,
    seconds: float = 12.0,
    builds: int = 2,
    ranks: int = 2,
    threads: int = 1,
    recording: bool = False,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures it in fresh processes.

    Args:
        workloads: of `WORKLOADS`.
        modes: of `MODES`.
        backends: their names (default: Gloo and ours on CPUs, NCCL on GPUs).
        device: ``"cpu"`` or ``"cuda"``.
        sets: how many times all processes are started anew.
        seconds: for each workload, mode and backend in each set.
        builds: how many times the contestants are built anew in a set.
        ranks: processes in a set.
        threads: intra-op threads of each rank.
        recording: also what recording costs.
        tolerance: see `noise.figure`.

    Returns:
        ``cells``: a dict for each workload, mode and backend with ``ms`` (median step by contestant), the ratios of
        `ratios.ratios`, ``ratio`` (ours over torch's as a `noise.Figure`), ``classes`` (of `ratios.exposed`), ``sets``
        and ``floors`` (all blocks' medians, ms). ``exposed``: what `ratios.exposed_left` says of ours on each backend
        against torch's on Gloo, or on the first one. ``others``: what other programs took, by set. ``recording``: of
        `recording_cost.measure`; ``recording_collectives``: of `recording_cost.collectives`. Beside it what was asked.
    """
    asked = [(workload, mode) for workload in workloads for mode in modes]
    compared = list(backends or _BACKENDS[device])

    def start(number: int) -> Any:
        call = (asked, compared, device, seconds, builds, 1000 * number)
        return fresh_ranks.run(_set, *call, ranks=ranks, threads=threads, device=device)

    measured, others = noise.of_sets(sets, start)
    found = {
        "torch": torch.__version__,
        "ranks": ranks,
        "threads": threads,
        "device": device,
        "backends": compared,
        "number of sets": sets,
        "seconds": seconds,
        "builds": builds,
        "others": others,
        **_by_workload(asked, measured, partial(noise.figure, others=others, tolerance=tolerance)),
    }
    if recording:
        found["recording"] = recording_cost.measure(workloads, ranks=ranks, threads=threads)
        found["recording_collectives"] = recording_cost.collectives()
    return found


def _by_workload(
    asked: Sequence[tuple[str, str]], measured: Sequence[Sequence[list[_Contest]]], judge: noise.Judge
) -> dict[str, list[dict[str, Any]]]:
    """``cells``, and what is left ``exposed``; each says its workload and mode."""
    cells: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    for i, (workload, mode) in enumerate(asked):
        about = {"workload": workload, "mode": mode}
        of_cell, of_classes = _judged([one[i] for one in measured], judge)
        cells += [about | one for one in of_cell]
        left += [about | one for one in of_classes]
    return {"cells": cells, "exposed": left}


def _judged(sets: Sequence[list[_Contest]], judge: noise.Judge) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures of one workload in one mode: a dict for each backend, and one for each backend against torch's."""
    of_backends: dict[str, tuple[ratios.Sets, ratios.Sets]] = {}
    for backend in sets[0][0]:
        builds, floors = ([[of[backend][what] for of in one] for one in sets] for what in ("build", "floor"))
        of_backends[backend] = builds, floors
    classes = ratios.exposed(of_backends, judge)
    cells = [
        {"backend": backend, "ms": ratios.medians(builds)}
        | ratios.ratios(builds)
        | {"ratio": judge(ratios.by_set(builds)), "classes": classes[backend], "sets": builds, "floors": floors}
        for backend, (builds, floors) in of_backends.items()
    ]
    usual = "gloo" if "gloo" in of_backends else next(iter(of_backends))
    left = []
    for backend, measured in of_backends.items():
        parts = classes[backend]["ours"]["exposed"], classes[usual]["torch"]["exposed"]
        about = {"ours on": backend, "torch on": usual}
        left.append(about | ratios.exposed_left(measured, of_backends[usual], parts))
    return cells, left


def _table(found: dict[str, Any], keep: bool) -> str:
    """Steps, exposed communication, and ours against torch's on Gloo."""
    steps = [["model", "mode", "backend", "torch ms", "ours ms", "ours/torch", "(95 % <)", "torch/torch", "(95 % <)"]]
    names = [f"{who} {what} ms" for who in ratios.CLASSES for what in ("no_sync", "exposed")]
    exposed = [["model", "mode", "backend", *names, "limit ms"]]
    for cell in found["cells"]:
        first, classes = [cell[name] for name in ("workload", "mode", "backend")], cell["classes"]
        ratio = noise.shown(cell["ratio"], f"{cell['ours / torch']:.3f}", keep)
        upper = f"{cell['ours / torch upper']:.3f}" if keep or not cell["ratio"]["noisy"] else "-"
        again = [f"{cell[name]:.3f}" for name in ("torch again / torch", "torch again / torch upper")]
        both = [noise.told(classes[who]["step"], 2, keep) for who in ratios.CLASSES]
        steps.append([*first, *both, ratio, upper, *again])
        parts = [classes[who][what] for who in ratios.CLASSES for what in ("floor", "exposed")]
        least = noise.told(classes[ratios.LIMIT]["exposed"], 2, keep) if ratios.LIMIT in classes else "-"
        exposed.append([*first, *(noise.told(one, 2, keep) for one in parts), least])
    against = [["model", "mode", "ours on", "ratio", "(95 % <)", "limit"]]
    for one in found["exposed"]:
        ratio, upper = ("-", "-") if one["ratio"] is None else (f"{one['ratio']:.3f}", f"{one['upper']:.3f}")
        told = [noise.shown(one, ratio, keep), upper if keep or not one["noisy"] else "-"]
        told.append("-" if one["limit"] is None else f"{one['limit']:.3f}")
        against.append([one["workload"], one["mode"], one["ours on"], *told])
    about = (
        f"torch {found['torch']}, {found['ranks']} ranks with {found['threads']} thread each, recording on; "
        f"medians (from .. to) over {noise.fresh_sets(found['number of sets'])}, builds in each: {found['builds']}"
    )
    tables = {
        "step": steps,
        "exposed communication (step time minus the step time under no_sync)": exposed,
        f"exposed communication of ours / of torch's on {found['exposed'][0]['torch on']}": against,
    }
    texts = ["\n".join([f"{title}:", *command.aligned(lines, left=3)]) for title, lines in tables.items()]
    if "recording" in found:
        texts.append(recording_cost.table(found["recording"]))
        texts.append(recording_cost.collective_table(found["recording_collectives"]))
    return "\n\n".join([about, *texts])


_OPTIONS = (
    option(
        "--models",
        "--workloads",
        nargs="+",
        choices=list(WORKLOADS),
        dest="workloads",
        metavar="NAME",
        help=", ".join(WORKLOADS),
    ),
    option("--modes", nargs="+", choices=list(MODES)),
    option("--device", choices=list(_BACKENDS), help="device of the ranks"),
    option("--backends", nargs="+", metavar="NAME", help="backends (default: gloo shm; nccl on GPUs)"),
    command.SETS,
    option("--seconds", type=command_line.seconds, help="time for each row of the table in each set"),
    option("--builds", type=command_line.count, help="builds of each model in each set"),
    command.RANKS,
    command.THREADS,
    option("--recording", action="store_true", help="also measure the cost of recording (on, off, on again)"),
)


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no GPU on this machine")
        if given.recording:
            parser.error("--recording is measured on CPUs only; remove --device cuda")
    usable = collectives.available(given.device)
    for name in given.backends or ():
        if name not in usable:
            parser.error(f"--backends {name}: not usable for {given.device} tensors; choose from {', '.join(usable)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    return command.run("ddp-lab bench step", __doc__, measure, _table, _OPTIONS, argv, check=_check)
