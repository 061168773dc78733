"""One training step under our DistributedDataParallel and torch's, on every backend.

Each row of the table is a model in a mode (an argument of the wrapper's constructor) on a backend, recording on. Within
fresh processes the contestants (torch's class twice) are built anew several times on each backend, and all of them take
turns, block by block, in changing order; ours and torch's also under ``no_sync``, which is the floor: what is above it
is exposed communication. `ddp_lab.bench.telling.ratios` says how ratios and bounds come from that,
`ddp_lab.bench.telling.exposed` how the floor is taken off, `ddp_lab.bench.telling.noise` which figures are too noisy to
show. The four models in plain mode on both backends (5 sets) take about 9 minutes on 2 cores; `--models`, `--backends`,
`--sets` and `--seconds` make less of it, `--modes` more. Run it on a quiet machine: the last two columns, torch's class
against itself, say how quiet it was. ``--device cuda`` does the same on GPUs with NCCL; a step then ends when its last
kernel has. Ranks that have to share a GPU take turns on it: ratios of more ranks than GPUs say little about speed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..command_line import count, seconds
from .measuring import backends, fresh_ranks, recording_cost
from .measuring.command import add_noise, add_picture, new_parser, show_sound
from .measuring.turns import take_turns
from .measuring.workloads import CONTESTANTS, MODES, WORKLOADS, Step, training_step, wrappers
from .telling import exposed, noise, ratios, step_tables

__all__ = ["main", "measure"]

_BACKENDS = {"cpu": ("gloo", "shm"), "cuda": ("nccl",)}
_WARM_UP = 4  # steps: the first bucket assignment, the rebuild, and two as all others

_Side = tuple[str, str, bool]  # backend, contestant, under no_sync
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
        if who in exposed.CLASSES:
            steps[backend, who, True] = training_step(model, batch, alone=True)
    return steps


def _compare(steps: dict[_Side, Step], until: float, shuffle: random.Random) -> _Contest:
    """Lets all sides take turns until about this time (of `time.monotonic`)."""
    # No model's first step may be one without communication.
    sides = {side: steps[side] for side in sorted(steps, key=lambda side: side[2])}
    times = take_turns(sides, {side: 2 if side[2] else _WARM_UP for side in sides}, until, shuffle)
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
    groups = backends.groups(names)
    return [
        _cell(workload, mode, groups, device, seconds * len(groups), builds, random.Random(seed + i))
        for i, (workload, mode) in enumerate(cells)
    ]


def measure(
    workloads: Sequence[str] = tuple(WORKLOADS),
    modes: Sequence[str] = ("plain",),
    *,
    compared: Sequence[str] | None = None,
    device: str = "cpu",
    sets: int = 5,
    seconds: float = 12.0,
    builds: int = 2,
    ranks: int = 2,
    threads: int = 1,
    tolerance: float = noise.TOLERANCE,
) -> dict[str, Any]:
    """Measures it in fresh processes.

    Args:
        workloads: of `WORKLOADS`.
        modes: of `MODES`.
        compared: names of backends (default: Gloo and ours on CPUs, NCCL on GPUs).
        device: ``"cpu"`` or ``"cuda"``.
        sets: how many times all processes are started anew.
        seconds: for each workload, mode and backend in each set.
        builds: how many times the contestants are built anew in a set.
        ranks: processes in a set.
        threads: intra-op threads of each rank.
        tolerance: see `noise.figure`.

    Returns:
        ``cells``: a dict for each workload, mode and backend with ``ms`` (median step by contestant), the ratios of
        `ratios.ratios`, ``ratio`` (ours over torch's as a `noise.Figure`), ``classes`` (of `exposed.figures`), ``sets``
        and ``floors`` (all blocks' medians, ms). ``exposed``: what `exposed.against` says of ours on each backend
        against torch's on Gloo, or on the first one. ``others``: what other programs took, by set. Beside it what was
        asked for.
    """
    asked = [(workload, mode) for workload in workloads for mode in modes]
    compared = list(compared or _BACKENDS[device])
    measured: list[list[list[_Contest]]] = []
    others: list[float | None] = []
    for number in range(sets):
        with noise.Watch() as watch:
            call = (asked, compared, device, seconds, builds, 1000 * number)
            measured.append(fresh_ranks.run(_set, *call, ranks=ranks, threads=threads, device=device))
        others.append(watch.others)
    cells, left = _by_workload(asked, measured, others, tolerance)
    return {
        "torch": torch.__version__,
        "ranks": ranks,
        "threads": threads,
        "device": device,
        "backends": compared,
        "number of sets": sets,
        "seconds": seconds,
        "builds": builds,
        "others": others,
        "cells": cells,
        "exposed": left,
    }


def _by_workload(
    asked: Sequence[tuple[str, str]],
    measured: Sequence[Sequence[list[_Contest]]],
    others: Sequence[float | None],
    tolerance: float,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Cells, and what is left exposed; each says its workload and mode."""
    cells, left = [], []
    for i, (workload, mode) in enumerate(asked):
        about = {"workload": workload, "mode": mode}
        of_cell, of_classes = _judged([one[i] for one in measured], others, tolerance)
        cells += [about | one for one in of_cell]
        left += [about | one for one in of_classes]
    return cells, left


def _judged(
    sets: list[list[_Contest]], others: Sequence[float | None], tolerance: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures of one workload in one mode: a dict for each backend, and one for each backend against torch's."""
    of_backends = {backend: (_each(sets, backend, "build"), _each(sets, backend, "floor")) for backend in sets[0][0]}
    classes = exposed.figures(of_backends, others, tolerance)
    cells = [
        {"backend": backend, "ms": ratios.medians(builds)}
        | ratios.ratios(builds)
        | {
            "ratio": noise.figure(ratios.by_set(builds), others, tolerance=tolerance),
            "classes": classes[backend],
            "sets": builds,
            "floors": floors,
        }
        for backend, (builds, floors) in of_backends.items()
    ]
    usual = "gloo" if "gloo" in of_backends else next(iter(of_backends))
    left = [
        {"ours on": backend, "torch on": usual}
        | exposed.against(
            of_backends[backend],
            of_backends[usual],
            (classes[backend]["ours"]["exposed"], classes[usual]["torch"]["exposed"]),
        )
        for backend in of_backends
    ]
    return cells, left


def _each(sets: list[list[_Contest]], backend: str, what: str) -> list[list[ratios.Build]]:
    return [[contest[backend][what] for contest in contests] for contests in sets]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = new_parser("ddp-lab bench step", __doc__)
    names = list(WORKLOADS)
    parser.add_argument(
        "--models",
        "--workloads",
        nargs="+",
        choices=names,
        default=names,
        dest="workloads",
        metavar="NAME",
        help=", ".join(names),
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["plain"], help="(default: plain)")
    parser.add_argument("--device", choices=list(_BACKENDS), default="cpu", help="what the ranks train on (cpu)")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="(default: gloo shm; nccl on GPUs)")
    parser.add_argument("--sets", type=count, default=5, help="fresh sets of processes (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=12.0, help="for each row of the table in each set (12)")
    parser.add_argument("--builds", type=count, default=2, help="of each model in each set (%(default)s)")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--threads", type=count, default=1, help="intra-op threads of each rank")
    parser.add_argument("--recording", action="store_true", help="also what recording costs: on, off and on again")
    add_noise(parser)
    add_picture(parser)
    given = parser.parse_args(argv)
    _check(parser, given)
    summary = measure(
        given.workloads,
        given.modes,
        compared=given.backends,
        device=given.device,
        sets=given.sets,
        seconds=given.seconds,
        builds=given.builds,
        ranks=given.ranks,
        threads=given.threads,
        tolerance=given.tolerance,
    )
    table = step_tables.text(summary, given.keep_noise)
    if given.recording:
        summary["recording"] = recording_cost.measure(given.workloads, ranks=given.ranks, threads=given.threads)
        table += "\n\n" + recording_cost.table(summary["recording"])
    _draw(summary, given.picture, given.keep_noise)
    return show_sound(summary, table, given.json, given.keep_noise)


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no GPU on this machine")
        if given.recording:
            parser.error("--recording is measured on CPUs: leave out --device cuda")
    for name in given.backends or ():
        if name not in backends.available(given.device):
            usable = ", ".join(backends.available(given.device))
            parser.error(f"--backends {name}: not for {given.device} tensors here; there are {usable}")


def _draw(summary: dict[str, Any], path: Path | None, keep: bool) -> None:
    if path is not None:
        from .telling import pictures

        pictures.write(pictures.steps(summary, keep=keep), path)


if __name__ == "__main__":
    sys.exit(main())
