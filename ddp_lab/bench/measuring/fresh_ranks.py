"""Fresh sets of Gloo processes for a measurement, and alternating blocks of steps, equally many on all ranks."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .workloads import Step

__all__ = ["Prepare", "block", "rank_zeros", "run", "take_turns"]

_BLOCK_S = 0.06  # a block is as many steps as fit, at least one

Prepare = Callable[[int], None]
Side = TypeVar("Side")


def _run_rank(
    rank: int,
    size: int,
    folder: str,
    threads: int,
    device: str,
    prepare: Prepare | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    if prepare is not None:
        prepare(rank)
    from torch._C._distributed_c10d import FileStore

    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")  # what is measured is its cost
    torch.set_num_threads(threads)
    if device == "cuda":
        if size > torch.cuda.device_count():  # they share GPUs, which NCCL allows to processes of different hosts alone
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    found = function(*args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    threads: int = 1,
    device: str = "cpu",
    prepare: Prepare | None = None,
) -> Any:
    """Calls ``function(*args)`` on each of `ranks` new processes that form one Gloo group.

    Args:
        function: module-level, since processes are spawned; its result must survive JSON.
        args: its arguments.
        ranks: processes.
        threads: intra-op threads of each.
        device: ``"cuda"``: each has a GPU as its current device, in turns where there are fewer.
        prepare: is called with the rank before the process forms the group; a picklable object.

    Returns:
        What rank 0 returned.
    """
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (ranks, folder, threads, device, prepare, function, args), nprocs=ranks)
        return json.loads(Path(folder, "result.json").read_text())


def block(step: Step, count: int) -> list[float]:
    """The times of `count` steps in ms, begun together on all ranks."""
    dist.barrier()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def rank_zeros(value: int) -> int:
    """Rank 0's number, on all ranks: what depends on a clock must not differ between them."""
    told = torch.tensor([value])
    dist.broadcast(told, 0)
    return int(told.item())


def take_turns(
    steps: Mapping[Side, Step],
    warm_up: Mapping[Side, int],
    until: float,
    shuffle: random.Random,
    each: dict[Side, list[float]] | None = None,
) -> dict[Side, list[float]]:
    """Times all sides, block by block, in changing order; called on all ranks of the default group.

    Args:
        steps: what is timed.
        warm_up: for each side how many steps are taken first and not counted.
        until: about when to stop, of `time.monotonic`.
        shuffle: seeded alike on all ranks.
        each: gets every step that is counted, ms.

    Returns:
        For each side its median step in each turn (at least three), ms.
    """
    sides = list(steps)
    warm = [[statistics.median(block(steps[side], 1)) for _ in range(warm_up[side])] for side in sides]
    usual = statistics.median(times[-1] for times in warm) / 1e3
    count = rank_zeros(max(1, int(_BLOCK_S / usual)))
    times: dict[Side, list[float]] = {side: [] for side in sides}
    begin, turn, turns = time.monotonic(), 0, 2
    while turn < turns:
        shuffle.shuffle(sides)
        for side in sides:
            taken = block(steps[side], count)
            times[side].append(statistics.median(taken))
            if each is not None:
                each.setdefault(side, []).extend(taken)
        turn += 1
        if turn == 2:
            a_turn = (time.monotonic() - begin) / turn
            turns = rank_zeros(max(3, round((until - begin) / a_turn)))
    return times
