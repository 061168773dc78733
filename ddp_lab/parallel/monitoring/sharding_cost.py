"""Times of what sharding adds to a step on a process group, for `ddp_lab.simulation.sharding.ShardingCosts`.

[Note: what a parameter group costs]
A parameter group costs more than its collectives: memory that is new in each step, copies into and out of flat
buffers, and Python. So a group is trained with torch's own `fully_shard`. Its module notes when torch begins and ends
to call it: what torch does before is the gathering, what it does afterwards is the reduction. Between them each rank
computes on memory of its own, as a model does: it comes a little earlier or later than the others, and its caches are
cold. That makes small groups take about twice as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ... import recording
from ..observe_shards import unobserved
from .link import slowest

__all__ = ["GROUPS", "measure"]

_MIB: Final = 1 << 20
GROUPS: Final = (  # number of tensors, bytes; the C library gets memory anew for more than 32 MiB
    *((2, 1 << 10), (2, 1 << 16), (2, _MIB), (2, 4 * _MIB), (2, 16 * _MIB), (2, 30 * _MIB), (2, 48 * _MIB)),
    *((12, 1 << 16), (12, _MIB), (12, 8 * _MIB), (48, 1 << 16), (48, _MIB), (200, 1 << 16)),
)
_BESIDE: Final = 4 << 20
_LARGE, _FEW = 8 * _MIB, 4  # of large groups fewer measurements
_SMALL, _MANY = 1 << 8, 32
_WORK: Final = 4 << 20  # numbers: a few milliseconds, and more than caches hold


def measure(optimizer: str = "AdamW", *, repeats: int = 8, device: torch.device | str | None = None) -> dict[str, Any]:
    """Measures on all ranks of the default group, which must call it together.

    Args:
        optimizer: class in `torch.optim` that updates the parameters; "": none of them.
        repeats: measurements of each group, after two that don't count.
        device: of the parameters; None for the CPU.

    Returns:
        Lists of (bytes, tensors, ns): ``gather`` (all that comes before a forward), ``all_gather`` (that
        alone), ``reduce`` (all that follows a backward), ``reduce_scatter``, ``all_reduce``,
        ``broadcast`` (of ZeRO-1: until all ranks have all updates). ``optimizer_ns``: by how much longer an update
        takes for each sharded tensor; ``contention``: 0 if a collective and a computation beside it take as long as
        the longer one of them, 1 if as long as both; ``ranks``.

    Raises:
        ValueError: there is no such optimizer.
    """
    kind = getattr(torch.optim, optimizer, None) if optimizer else torch.optim.Optimizer
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {optimizer!r}; name a class in it, such as 'AdamW'")
    with recording.suspended(), unobserved():  # else thousands of collectives take the place of the program's
        return _measured(optimizer, repeats, torch.device(device or "cpu"))


def _measured(optimizer: str, repeats: int, where: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {name: [] for name in ("gather", "reduce", *_CALLS)}
    for tensors, size in GROUPS:
        step = _trained(tensors, size, where)
        count = repeats if size < _LARGE else min(repeats, _FEW)
        times = [step() for _ in range(count + 2)][2:]
        for name, values in zip(("gather", "reduce"), zip(*times, strict=True), strict=True):
            found[name].append((size, tensors, _typical(values, where)))
        for name, call in _CALLS.items():
            taken = [call(tensors, size, where) for _ in range(count + 1)][1:]
            found[name].append((size, tensors, _typical(taken, where)))
    found["optimizer_ns"] = _of_optimizer(optimizer, repeats, where)
    found["contention"] = _contention(repeats, where)
    return found | {"ranks": dist.get_world_size()}


def _typical(values: Any, device: torch.device) -> float:
    """The mean, because a step has many groups whose delays add up; without the longest one, an accident."""
    kept = sorted(values)[: max(1, len(values) - 1)]
    return slowest(float(statistics.fmean(kept)), None, device)


class _Told(torch.autograd.Function):
    """Uses all parameters, computes something else in the backward, and tells when it is called."""

    @staticmethod
    def forward(
        ctx: Any, told: list[int], work: torch.Tensor, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        told.append(time.perf_counter_ns())
        ctx.work = work
        ctx.told, ctx.shapes = told, [one.shape for one in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        made = [gradient[0].new_ones(shape) for shape in ctx.shapes]
        ctx.work.mul_(0.5)
        ctx.told.append(time.perf_counter_ns())
        return None, None, gradient[0], *made


class _Group(nn.Module):
    def __init__(self, tensors: int, size: int, device: torch.device) -> None:
        super().__init__()
        each = max(2, size // 4 // tensors)
        self.held = nn.ParameterList(torch.zeros(each, device=device) for _ in range(tensors))
        self.told: list[int] = []
        self.work = torch.zeros(_WORK, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Told.apply(  # type: ignore[no-untyped-call]
            self.told, self.work, x, *self.held
        )
        return made


def _mesh(device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (dist.get_world_size(),))


def _trained(tensors: int, size: int, device: torch.device) -> Callable[[], tuple[float, float]]:
    """A step of a group; it returns ns before the forward, and after the backward."""
    from torch.distributed.fsdp import fully_shard

    group = _Group(tensors, size, device)
    mesh = _mesh(device)
    fully_shard(group, mesh=mesh)
    root = nn.Sequential(group)
    fully_shard(root, mesh=mesh)
    x = torch.zeros(1, device=device, requires_grad=True)

    def step() -> tuple[float, float]:
        group.told.clear()
        root.zero_grad()
        dist.barrier()
        group.work.mul_(0.5)
        begin = _now(device)
        out = root(x)
        _now(device)
        out.backward()
        end = _now(device)
        called, computed = group.told
        return float(called - begin), float(end - computed)

    return step


def _now(device: torch.device) -> int:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter_ns()


def _together(call: Callable[[], object], device: torch.device) -> float:
    """ns of a call that all ranks begin at about the same time."""
    dist.barrier()
    begin = _now(device)
    call()
    return float(_now(device) - begin)


def _all_gather(_tensors: int, size: int, device: torch.device) -> float:
    part, whole = _part_and_whole(size, device)
    return _together(lambda: dist.all_gather_into_tensor(whole, part), device)


def _reduce_scatter(_tensors: int, size: int, device: torch.device) -> float:
    part, whole = _part_and_whole(size, device)
    return _together(lambda: dist.reduce_scatter_tensor(part, whole), device)


def _all_reduce(_tensors: int, size: int, device: torch.device) -> float:
    whole = torch.zeros(max(1, size // 4), device=device)
    return _together(lambda: dist.all_reduce(whole), device)


def _part_and_whole(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.zeros(max(1, size // 4 // dist.get_world_size()), device=device)
    return part, torch.zeros(part.numel() * dist.get_world_size(), device=device)


def _updated(tensors: int, size: int, device: torch.device) -> float:
    """ns until each rank has updated its share of some tensors, and has got the others' (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parts = [nn.Parameter(torch.zeros(max(1, size // 4 // tensors), device=device)) for _ in range(tensors)]
    for one in parts:
        one.grad = torch.zeros_like(one)
    optimizer = ZeroRedundancyOptimizer(parts, torch.optim.SGD, lr=0.0)
    return statistics.fmean([_together(optimizer.step, device) for _ in range(3)][1:])


_CALLS: Final = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _updated,
}


def _of_optimizer(name: str, repeats: int, device: torch.device) -> float:
    """ns by which an update takes longer for each tensor that is sharded."""
    from torch.distributed.tensor import Shard, distribute_tensor

    if not name:
        return 0.0
    kind = getattr(torch.optim, name)
    times = []
    whole = [torch.zeros(_SMALL, device=device) for _ in range(_MANY)]
    for tensors in (whole, [distribute_tensor(one, _mesh(device), [Shard(0)]) for one in whole]):
        parameters = [nn.Parameter(one) for one in tensors]
        for one in parameters:
            one.grad = torch.zeros_like(one)
        optimizer = kind(parameters, lr=0.0)
        taken = []
        for _ in range(repeats + 2):
            begin = _now(device)
            optimizer.step()
            taken.append(float(_now(device) - begin))
        times.append(_typical(taken[2:], device))
    return max(0.0, times[1] - times[0]) / _MANY


def _contention(repeats: int, device: torch.device) -> float:
    """How much a collective and a computation slow each other down, from 0 to 1."""
    part, whole = _part_and_whole(_BESIDE, device)
    matrix = torch.randn(192, 192, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def timed(times: int, collective: bool) -> float:
        def run() -> None:
            work = dist.all_gather_into_tensor(whole, part, async_op=True) if collective else None
            compute(times)
            if work is not None:
                work.wait()

        return _typical([_together(run, device) for _ in range(repeats + 1)][1:], device)

    alone, of_ten = timed(0, True), timed(10, False)
    times = max(1, round(10 * alone / of_ten))
    computed, both = timed(times, False), timed(times, True)
    return min(1.0, max(0.0, 1 - (alone + computed - both) / min(alone, computed)))
