"""Times of all-reduces on a process group, for a model of its network (`ddp_lab.simulation.link_model.CommModel`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DEFAULT_SIZES", "measure"]

DEFAULT_SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
_SHARED_BYTES = 4 * 1024 * 1024


def measure(
    group: dist.ProcessGroup | None = None,
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = 7,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Measures all-reduces of float32 buffers; every rank of the group must call it.

    Sizes are measured in turn, so that a disturbance affects not only one of them. A time counts from a barrier to the
    end of the collective on the slowest rank.

    Args:
        group: the ranks; None for the default group.
        sizes: bytes of the buffers; None for `DEFAULT_SIZES`. On the default 2 CPU ranks those take about a second.
        repeats: measurements of each size, after one that does not count.
        device: of the buffers; None for the CPU.

    Returns:
        ``points``: (bytes, nanoseconds) of each measurement, the same on all ranks; ``ranks``; ``backend``;
        ``sharing``: 1 if two collectives at once take as long as one after the other, 0 if as long as one;
        ``launch_ns``: until a rank that has started one can continue.
    """
    where = torch.device(device or "cpu")
    wanted = list(sizes or DEFAULT_SIZES)
    buffers = [torch.zeros(max(1, size // 4), device=where) for size in wanted]
    points: list[tuple[int, float]] = []
    for turn in range(repeats + 1):
        for buffer in buffers:
            taken = _slowest(_time([buffer], group), group, where)
            if turn:
                points.append((buffer.numel() * 4, taken))
    return {
        "points": points,
        "ranks": dist.get_world_size(group),
        "backend": str(dist.get_backend(group)),
        "sharing": _sharing(group, where, repeats),
        "launch_ns": _launch(group or dist.group.WORLD, where, repeats),
    }


def _time(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> float:
    """ns of all-reduces that are in flight at the same time."""
    dist.barrier(group)
    _synchronize(buffers[0])
    begin = time.perf_counter_ns()
    works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
    for work in works:
        work.wait()
    _synchronize(buffers[0])
    return float(time.perf_counter_ns() - begin)


def _synchronize(buffer: torch.Tensor) -> None:
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def _slowest(taken: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The longest of the ranks' times."""
    told = torch.tensor([taken], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group)
    return float(told.item())


def _launch(group: Any, device: torch.device, repeats: int) -> float:
    """Median over the repetitions; without the Python code of `torch.distributed`, which a reducer does not use."""
    buffer, times = torch.zeros(256, device=device), []
    for _ in range(repeats + 1):
        begin = time.perf_counter_ns()
        work = group.allreduce([buffer])
        times.append(time.perf_counter_ns() - begin)
        work.wait()
    return _slowest(float(statistics.median(times)), group, device)


def _sharing(group: dist.ProcessGroup | None, device: torch.device, repeats: int) -> float:
    pair = [torch.zeros(_SHARED_BYTES // 4, device=device) for _ in range(2)]
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats + 1):
        for count in (1, 2):
            times[count].append(_slowest(_time(pair[:count], group), group, device))
    one, two = min(times[1][1:]), min(times[2][1:])
    return min(1.0, max(0.0, two / one - 1))
