"""`ddp-lab bench step`: one training step under our DistributedDataParallel, under torch's, and under torch's again.

Two identical classes compared within one set of processes differ by up to 17 %, so the figure that counts is the
median of the ratios over several fresh sets (``--sets 5``), with torch's against itself beside it. Within a set the
contestants take turns, block by block. A last part switches recording on and off in alternating blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

__all__ = ["MODELS", "main", "measure"]

Step = Callable[[], None]
CONTESTANTS = ("torch", "ours", "torch again")


def _mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    width = 2048
    layers: list[torch.nn.Module] = []
    for _ in range(6):  # 6 * 2048 * 2049 = 25.2 million parameters
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), torch.randn(32, width)


def _small_tensors() -> tuple[torch.nn.Module, torch.Tensor]:
    layers: list[torch.nn.Module] = []
    for _ in range(200):  # weight and bias each: 400 tensors
        layers += [torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers), torch.randn(32, 16)


def _conv_net() -> tuple[torch.nn.Module, torch.Tensor]:
    nn = torch.nn
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    return net, torch.randn(16, 3, 32, 32)


# name -> (builder, steps of one block)
MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, torch.Tensor]], int]] = {
    "mlp": (_mlp, 4),
    "small_tensors": (_small_tensors, 20),
    "conv_net": (_conv_net, 12),
}


def _training_step(wrap: Callable[[torch.nn.Module], torch.nn.Module], name: str) -> Step:
    torch.manual_seed(0)
    module, batch = MODELS[name][0]()
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _milliseconds(step: Step, count: int) -> list[float]:
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def _compare(name: str, rounds: int) -> dict[str, Any]:
    """Median step time of each contestant, taking turns in changing order, and the ratios to torch's."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from ddp_lab import DistributedDataParallel

    wraps = (TorchDDP, DistributedDataParallel, TorchDDP)
    steps = {who: _training_step(wrap, name) for who, wrap in zip(CONTESTANTS, wraps, strict=True)}
    count = MODELS[name][1]
    for step in steps.values():
        _milliseconds(step, max(4, count // 2))
    times: dict[str, list[float]] = {who: [] for who in CONTESTANTS}
    for turn in range(rounds):
        shift = turn % len(CONTESTANTS)
        for who in CONTESTANTS[shift:] + CONTESTANTS[:shift]:
            times[who] += _milliseconds(steps[who], count)
    medians = {who: statistics.median(values) for who, values in times.items()}
    return {
        "ms": medians,
        "ours / torch": medians["ours"] / medians["torch"],
        "torch again / torch": medians["torch again"] / medians["torch"],
    }


def _recording_cost(name: str, rounds: int) -> dict[str, float]:
    """The same model with recording on, off and on again, in alternating blocks; and what its events cost."""
    from ddp_lab import DistributedDataParallel, recording

    step = _training_step(DistributedDataParallel, name)
    count = MODELS[name][1]
    _milliseconds(step, max(4, count // 2))
    before = recording.statistics().recorded
    _milliseconds(step, count)
    events = (recording.statistics().recorded - before) / count
    times: dict[str, list[float]] = {"on": [], "off": [], "on again": []}
    for turn in range(rounds):
        order = ["on", "off", "on again"]
        for what in order[turn % 3 :] + order[: turn % 3]:
            if what == "off":
                recording.disable()
            times[what] += _milliseconds(step, count)
            recording.enable()
    medians = {what: statistics.median(values) for what, values in times.items()}
    ns = recording.statistics(measure=True).ns_per_event or 0.0
    return {
        "on / off": medians["on"] / medians["off"],
        "on / on again": medians["on"] / medians["on again"],
        "events a step": events,
        "ns an event": ns,
        "share of the step": events * ns / (medians["on"] * 1e6),
    }


def _run_rank(rank: int, size: int, folder: str, names: Sequence[str], rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    found = {name: {"step": _compare(name, rounds), "recording": _recording_cost(name, rounds)} for name in names}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    names: Sequence[str] = tuple(MODELS), *, ranks: int = 2, sets: int = 1, rounds: int = 12, threads: int = 1
) -> dict[str, Any]:
    """Measures on `ranks` Gloo processes, in `sets` fresh sets of them.

    Args:
        names: of `MODELS`.
        ranks: processes in a set.
        sets: how many times all processes are started anew.
        rounds: turns of each contestant in a set.
        threads: intra-op threads of each rank.

    Returns:
        For each model ``"ours / torch"`` and ``"torch again / torch"`` (medians over the sets) and ``"sets"``:
        what each set measured, times in milliseconds.
    """
    results = []
    for _ in range(sets):
        with tempfile.TemporaryDirectory() as folder:
            spawn(_run_rank, (ranks, folder, tuple(names), rounds, threads), nprocs=ranks)
            results.append(json.loads(Path(folder, "result.json").read_text()))
    summary: dict[str, Any] = {"ranks": ranks, "threads": threads, "torch": torch.__version__, "models": {}}
    for name in names:
        of_sets = [result[name] for result in results]
        summary["models"][name] = {
            ratio: statistics.median(found["step"][ratio] for found in of_sets)
            for ratio in ("ours / torch", "torch again / torch")
        } | {"sets": of_sets}
    return summary


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"{'model':15} {'torch ms':>9} {'ours ms':>9} {'ours/torch':>11} {'torch/torch':>12} {'on/off':>8} {'on/on':>8}"
    ]
    for name, found in summary["models"].items():
        ms = {who: statistics.median(one["step"]["ms"][who] for one in found["sets"]) for who in CONTESTANTS}
        on = {
            key: statistics.median(one["recording"][key] for one in found["sets"])
            for key in ("on / off", "on / on again")
        }
        lines.append(
            f"{name:15} {ms['torch']:9.2f} {ms['ours']:9.2f} {found['ours / torch']:11.3f} "
            f"{found['torch again / torch']:12.3f} {on['on / off']:8.3f} {on['on / on again']:8.3f}"
        )
        one = found["sets"][-1]["recording"]
        lines.append(
            f"{'':15} recording: {one['events a step']:.0f} events a step, {one['ns an event']:.0f} ns each, "
            f"{one['share of the step']:.3%} of the step"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="ddp-lab bench step", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sets", type=int, default=1, help="fresh sets of processes; 5 for a figure to quote")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contestant in a set")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of each rank")
    parser.add_argument("--json", type=Path, help="write the full result here")
    given = parser.parse_args(argv)
    summary = measure(given.models, ranks=given.ranks, sets=given.sets, rounds=given.rounds, threads=given.threads)
    sys.stdout.write(_table(summary) + "\n")
    if given.json:
        given.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
