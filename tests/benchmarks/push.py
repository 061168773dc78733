"""An array to all ranks and back, on every way, and a plain copy.

Sides take turns; medians are compared. A rate counts the array's bytes once for each rank. Memory is what all
processes of the cluster and this one have more (PSS) once all ranks have read what was pushed, or this process what was
pulled, in multiples of the array: with n ranks it is n where each holds a copy, 1 where they share one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import psutil

from ddp_lab.bench.measuring.command import option
from ddp_lab.cluster.cluster import Cluster
from ddp_lab.command_line import count, positive
from ddp_lab.output.board import SilentBoard

_SWITCH = "DDP_LAB_SHARED_MEMORY"
_SETTLE_SECONDS = 5.0
_READ = "_ = float(array.sum())"


def measure(ranks: int = 2, megabytes: float = 256.0, rounds: int = 3) -> dict[str, Any]:
    """Measures every side on a cluster of its own.

    Args:
        ranks: of the cluster.
        megabytes: of the array, in MB (10^6 B).
        rounds: turns of each side.

    Returns:
        ``sides``: name -> ``seconds`` (median), ``mb_per_s`` and ``memory`` (in arrays; None for a plain copy).
    """
    array = numpy.random.default_rng(0).random(int(megabytes * 1e6 / 8))
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    with Cluster(ranks) as lab:
        for name, side in [*_sides(lab, array).items()] * rounds:
            before = _settled(lab, array.nbytes)
            begin = time.perf_counter()
            kept = side()
            seconds.setdefault(name, []).append(time.perf_counter() - begin)
            _read(lab, name, kept)
            memory.setdefault(name, []).append((_memory(lab) - before) / array.nbytes)
            del kept
            if name.startswith("pull"):  # the next side finds no array
                lab.run("del array", board=SilentBoard())
    found = {}
    for name, taken in seconds.items():
        copies = 1 if name.startswith("copy") else ranks
        rate = copies * array.nbytes / 1e6 / statistics.median(taken)
        found[name] = {"seconds": statistics.median(taken), "mb_per_s": rate, "memory": statistics.median(memory[name])}
    return {"ranks": ranks, "megabytes": megabytes, "rounds": rounds, "sides": found}


def _sides(lab: Cluster, array: Any) -> dict[str, Callable[[], Any]]:
    """What is measured; each pull follows its push."""
    view = lab.client[:]
    target = numpy.zeros_like(array)
    return {
        "push, shared memory": lambda: lab.push({"array": array}),
        "pull, shared memory": lambda: lab.pull("array"),
        "push, in messages": lambda: _in_messages(lambda: lab.push({"array": array})),
        "pull, in messages": lambda: _in_messages(lambda: lab.pull("array")),
        "push, ipyparallel": lambda: view.push({"array": array}, block=True),
        "pull, ipyparallel": lambda: view.pull("array", block=True),
        "copy, new memory": lambda: array.copy(),
        "copy, same memory": lambda: numpy.copyto(target, array),
    }


def _in_messages(side: Callable[[], Any]) -> Any:
    with _without_shared_memory():
        return side()


@contextlib.contextmanager
def _without_shared_memory() -> Iterator[None]:
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _read(lab: Cluster, name: str, kept: Any) -> None:
    """Reads what came, so that it is in memory."""
    if name.startswith("push"):
        lab.run(_READ, board=SilentBoard())
    elif name.startswith("pull"):
        for each in kept.values() if isinstance(kept, dict) else kept:
            float(each.sum())


def _settled(lab: Cluster, size: int) -> int:
    """`_memory` once what earlier sides held has been given back: two readings within a hundredth of an array."""
    gc.collect()
    last, now = -size, _memory(lab)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while abs(now - last) > size / 100 and time.monotonic() < deadline:
        time.sleep(0.05)
        last, now = now, _memory(lab)
    return now


def _memory(lab: Cluster) -> int:
    """Bytes that all processes hold; what several share counts once."""
    pids = {os.getpid(), *lab.pids().values()}
    return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids)


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{found['megabytes']:g} MB, {found['ranks']} ranks, {found['rounds']} turns",
        f"{'side':22} {'seconds':>9} {'MB/s':>9} {'memory / array':>15}",
    ]
    for name, side in found["sides"].items():
        lines.append(f"{name:22} {side['seconds']:9.3f} {side['mb_per_s']:9,.0f} {side['memory']:15.2f}")
    return "\n".join(lines)


OPTIONS = (
    option("--ranks", type=count),
    option("--megabytes", type=positive, help="size of the array (%(default)s)"),
    option("--rounds", type=count, help="turns of each side (%(default)s)"),
)
