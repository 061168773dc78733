"""Collectives over several tensors of each process: the ``*_multigpu`` functions of torch 1.7, which torch has removed.

Each process gives a list of tensors, one for each of its devices (GPUs, or the CPU several times), the same number on
all processes. They are combined within the process, exchanged between processes in one collective, and distributed to
the process's devices again. All tensors of one list have one shape and dtype.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

__all__ = [
    "MultiWork",
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]

Tensors = list[torch.Tensor]

_LOCALLY: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, other: torch.minimum(total, other, out=total),
    ReduceOp.MAX: lambda total, other: torch.maximum(total, other, out=total),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class MultiWork:
    """A collective that was started with ``async_op=True``: the `Work` between processes, then copies within this one.

    The copies are made by the first call that finds the collective done: `wait`, `is_completed` or the future.
    """

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish
        self._lock = threading.Lock()
        self._finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until all tensors hold the result (on GPUs: makes the current streams wait); raises its error."""
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self._spread()
        return done

    def is_completed(self) -> bool:
        """Whether the collective has ended; if without error, the tensors hold the result.

        For Gloo's reduce_scatter it is True only after `wait`.
        """
        if self._finished:  # its future may complete before the work does
            return True
        if not self._work.is_completed():
            return False
        with contextlib.suppress(RuntimeError):  # wait() raises it again
            self.wait()
        return True

    def get_future(self) -> torch.futures.Future[None]:
        """Completes when all tensors hold the result.

        Raises:
            RuntimeError: the backend's `Work` has no future (Gloo's reduce_scatter).
        """

        def spread(done: torch.futures.Future[Any]) -> None:
            done.wait()
            self._spread()

        future: torch.futures.Future[None] = self._work.get_future().then(spread)
        return future

    def _spread(self) -> None:
        with self._lock:
            if not self._finished:
                with torch.no_grad():
                    self._finish()
                self._finished = True


def broadcast_multigpu(
    tensor_list: Tensors, src: int, group: ProcessGroup | None = None, async_op: bool = False, src_tensor: int = 0
) -> MultiWork | None:
    """Copies one tensor of one process to every tensor of all processes.

    Args:
        tensor_list: this process's tensors; those of rank `src` are the source and, but for one, receive too.
        src: global rank of the source.
        group: the processes; the default group if None.
        async_op: whether to return at once.
        src_tensor: index of the source in rank `src`'s list.

    Returns:
        A `Work` if `async_op`, else None; None in processes outside the group.

    Raises:
        ValueError: no tensors, different shapes or dtypes, or no such index.
    """
    if _outside(group):
        return None
    _check_list("tensor_list", tensor_list)
    _check_index("src_tensor", src_tensor, tensor_list)
    root = tensor_list[src_tensor]
    sent = root.detach().contiguous()
    work = dist.broadcast(sent, src, group=group, async_op=True)
    return _give(work, async_op, lambda: _copy(sent, tensor_list))


def all_reduce_multigpu(
    tensor_list: Tensors, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> MultiWork | None:
    """Reduces all tensors of all processes; each of them then holds the result, with the same bits everywhere.

    Args:
        tensor_list: this process's tensors, input and output.
        op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, as far as the group's backend supports them.
        group: the processes; the default group if None.
        async_op: whether to return at once.

    Returns:
        A `Work` if `async_op`, else None; None in processes outside the group.

    Raises:
        ValueError: no tensors, different shapes or dtypes, or another `op`.
    """
    if _outside(group):
        return None
    _check_list("tensor_list", tensor_list)
    total = _reduced(tensor_list, op, tensor_list[0].device)
    work = dist.all_reduce(total, op, group=group, async_op=True)
    return _give(work, async_op, lambda: _copy(total, tensor_list))


def reduce_multigpu(
    tensor_list: Tensors,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> MultiWork | None:
    """Reduces all tensors of all processes into one tensor of one process; all others stay as they are.

    Args:
        tensor_list: this process's tensors.
        dst: global rank that gets the result.
        op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, as far as the group's backend supports them.
        group: the processes; the default group if None.
        async_op: whether to return at once.
        dst_tensor: index of the tensor in rank `dst`'s list that gets it.

    Returns:
        A `Work` if `async_op`, else None; None in processes outside the group.

    Raises:
        ValueError: no tensors, different shapes or dtypes, no such index, or another `op`.
    """
    if _outside(group):
        return None
    _check_list("tensor_list", tensor_list)
    _check_index("dst_tensor", dst_tensor, tensor_list)
    total = _reduced(tensor_list, op, tensor_list[dst_tensor].device)
    work = dist.reduce(total, dst, op, group=group, async_op=True)
    receives = tensor_list[dst_tensor : dst_tensor + 1] if dist.get_rank() == dst else []
    return _give(work, async_op, lambda: _copy(total, receives))


def all_gather_multigpu(
    output_tensor_lists: Sequence[Tensors],
    input_tensor_list: Tensors,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> MultiWork | None:
    """Gathers all tensors of all processes on each device of each process.

    Args:
        output_tensor_lists: for each device a list of (world size times tensors of a process) tensors. Tensor j of
            rank k is at index ``k * len(input_tensor_list) + j`` (torch 1.7 documents ``k * world_size + j``,
            which is the same if each process has as many tensors as there are processes).
        input_tensor_list: this process's tensors.
        group: the processes; the default group if None.
        async_op: whether to return at once.

    Returns:
        A `Work` if `async_op`, else None; None in processes outside the group.

    Raises:
        ValueError: no tensors, different shapes or dtypes, or lists of the wrong length.
    """
    if _outside(group):
        return None
    _check_list("input_tensor_list", input_tensor_list)
    count, size = len(input_tensor_list), dist.get_world_size(group)
    _check_lists("output_tensor_lists", output_tensor_lists, count, size, input_tensor_list[0])
    joined = _stack(input_tensor_list, input_tensor_list[0].device)
    gathered = [torch.empty_like(joined) for _ in range(size)]
    work = dist.all_gather(gathered, joined, group=group, async_op=True)

    def spread() -> None:
        found = [tensor for part in gathered for tensor in part]
        for outputs in output_tensor_lists:
            for output, tensor in zip(outputs, found, strict=True):
                output.copy_(tensor)

    return _give(work, async_op, spread)


def reduce_scatter_multigpu(
    output_tensor_list: Tensors,
    input_tensor_lists: Sequence[Tensors],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> MultiWork | None:
    """Reduces lists of tensors over all devices of all processes; each device gets one tensor of the result.

    Args:
        output_tensor_list: this process's tensors, one for each device.
        input_tensor_lists: for each device a list of (world size times tensors of a process) tensors. Tensor j of
            rank k gets the reduction of all lists' index ``k * len(output_tensor_list) + j``.
        op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR, as far as the group's backend supports them.
        group: the processes; the default group if None.
        async_op: whether to return at once.

    Returns:
        A `Work` if `async_op`, else None; None in processes outside the group.

    Raises:
        ValueError: no tensors, different shapes or dtypes, lists of the wrong length, or another `op`.
    """
    if _outside(group):
        return None
    _check_list("output_tensor_list", output_tensor_list)
    first = output_tensor_list[0]
    count, size = len(output_tensor_list), dist.get_world_size(group)
    _check_lists("input_tensor_lists", input_tensor_lists, count, size, first)
    slots = [_reduced(list(slot), op, first.device) for slot in zip(*input_tensor_lists, strict=True)]
    sent = [torch.stack(slots[rank * count : (rank + 1) * count]) for rank in range(size)]
    received = torch.empty_like(sent[0])
    work = dist.reduce_scatter(received, sent, op, group=group, async_op=True)

    def spread() -> None:
        for output, tensor in zip(output_tensor_list, received, strict=True):
            output.copy_(tensor)

    return _give(work, async_op, spread)


def _give(work: Any, async_op: bool, finish: Callable[[], None]) -> MultiWork | None:
    made = MultiWork(work, finish)
    if async_op:
        return made
    made.wait()
    return None


@torch.no_grad()
def _reduced(tensors: Tensors, op: Any, device: torch.device) -> torch.Tensor:
    """A new contiguous tensor: the reduction of all, in their order, so that it is the same each time."""
    reduce = _LOCALLY.get(op)
    if reduce is None:
        raise ValueError(f"{op} is not supported: choose one of {', '.join(known.name for known in _LOCALLY)}")
    total = tensors[0].to(device).clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        reduce(total, tensor.to(device))
    return total


@torch.no_grad()
def _stack(tensors: Tensors, device: torch.device) -> torch.Tensor:
    return torch.stack([tensor.to(device) for tensor in tensors])


def _copy(source: torch.Tensor, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor is not source:
            tensor.copy_(source)


def _outside(group: Any) -> bool:
    return bool(group == dist.GroupMember.NON_GROUP_MEMBER)


def _check_list(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor | None = None) -> None:
    if isinstance(tensors, torch.Tensor) or len(tensors) == 0:
        raise ValueError(f"{name} must be a list of at least one tensor, one for each device")
    like = tensors[0] if like is None else like
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name}[{index}] has shape {tuple(tensor.shape)} and {tensor.dtype}, another tensor "
                f"{tuple(like.shape)} and {like.dtype}: they must be equal"
            )


def _check_index(name: str, index: int, tensors: Tensors) -> None:
    if not 0 <= index < len(tensors):
        raise ValueError(f"{name} is {index}, but tensor_list has {len(tensors)} tensors")


def _check_lists(name: str, lists: Sequence[Tensors], count: int, size: int, like: torch.Tensor) -> None:
    if len(lists) != count:
        raise ValueError(
            f"{name} has {len(lists)} lists, but needs one for each of the {count} tensors of this process"
        )
    for index, tensors in enumerate(lists):
        if len(tensors) != size * count:
            raise ValueError(f"{name}[{index}] has {len(tensors)} tensors, but needs {count} for each of {size} ranks")
        _check_list(f"{name}[{index}]", tensors, like)
