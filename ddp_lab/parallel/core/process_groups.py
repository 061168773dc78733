"""The DDP core's use of a process group, including groups written in Python.

[Note: groups written in Python]
A process group may be a subclass of `dist.ProcessGroup` written in Python. Three things are different about it:

- It need not come from `init_process_group` or `new_group`. Then torch has no entry for it, and
  `dist.get_rank(group)`, `dist.get_backend(group)` and similar functions raise. Here the group itself is asked. Its
  members' ranks in the default group, which it can't know, are exchanged when they compare their models.
- Its `Work` handles are Python objects, and `dist.broadcast` and similar functions call ``work.wait()``. torch's C++
  passes a timeout, so authors write ``wait(self, timeout)`` as well as ``wait(self, timeout=None)`` and
  ``wait(self)``. Here each of them gets the arguments that it accepts.
- The result of all_reduce may be in the tensor of ``work.get_future()``: the reducer takes it from there, as torch's
  does (`csrc/reduce/comm_hook.h`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed import distributed_c10d

from ... import native

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_async",
    "backend_name",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_text",
    "finish",
    "gather_numbers",
    "global_ranks",
    "group_index",
    "learn_ranks",
    "maximum",
    "needed_store_of",
    "own_rank",
    "set_timeout",
    "store_of",
    "timeout_of",
]

_C = native.load()
_NO_TIMEOUT = timedelta(0)  # the value that c10d's C++ passes to a `Work` written in Python
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_told: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()

# -- what a group is


def backend_name(group: dist.ProcessGroup) -> str:
    """The group's backend, or the own name of a group that torch does not know."""
    return str(dist.get_backend(group)) if _is_registered(group) else str(group.name())


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """The members' ranks in the default group, in the order of their ranks in this one.

    For a group that torch does not know: the ranks given to `learn_ranks`. Before that: this rank if it is alone in
    the group, else 0, 1, 2, …
    """
    if _is_registered(group):
        return list(dist.get_process_group_ranks(group))
    if group in _told:
        return _told[group]
    return [own_rank(group)] if group.size() == 1 else list(range(group.size()))


def group_index(group: dist.ProcessGroup) -> int:
    """This rank's number for a process group: the same for the same group, never reused."""
    if group not in _numbers:
        _numbers[group] = number = int(_C.index_of_group(group))
        weakref.finalize(group, _C.forget_group, number).atexit = False
    return _numbers[group]


def own_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in the default group; its rank in `group` if there is no default group."""
    return dist.get_rank() if dist.is_initialized() else int(group.rank())


def learn_ranks(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Stores the default-group ranks of the members of a group that torch does not know."""
    if not _is_registered(group):
        _told[group] = list(ranks)


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the members of a group exchange keys; None if none is known."""
    return distributed_c10d._get_process_group_store(group) if _is_registered(group) else None


def needed_store_of(group: dist.ProcessGroup) -> Any:
    """`store_of`; RuntimeError if there is none."""
    store = store_of(group)
    if store is None:
        raise RuntimeError(
            f"the process group {group!r} has no store through which its ranks can exchange messages, "
            "because it was not made by torch.distributed.init_process_group or new_group. Use a group that was."
        )
    return store


def _is_registered(group: dist.ProcessGroup) -> bool:
    return group in distributed_c10d._world.pg_map


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a group's backend; None if it does not report it."""
    try:
        options = backend.options
    except (AttributeError, RuntimeError):  # a backend without; RuntimeError from torch 2.14 on
        options = None
    found: timedelta | None = _C.shared_memory_timeout(backend) if options is None else options._timeout
    return found


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Sets the timeout of later operations of a group's backend."""
    _C.set_timeout(backend, timeout)


# -- collectives


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor, by rank in the group."""
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    if _is_written_in_python(group):
        finish(group.allgather([rows], [mine], AllgatherOptions()))
    else:
        dist.all_gather(rows, mine, group=group)
    return rows


def gather_numbers(mine: torch.Tensor, group: dist.ProcessGroup) -> list[list[Any]]:
    """Every rank's numbers, by rank in the group."""
    return [row.tolist() for row in all_gather(mine, group)]


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    """Broadcasts the tensor of the rank `source` of the group."""
    if not _is_written_in_python(group):
        dist.broadcast(tensor, group=group, group_src=source)
        return
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    finish(group.broadcast([tensor], options))


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, buffer_size: int, source: int = 0
) -> None:
    """Broadcasts the tensors of the rank `source`, several at once, at most `buffer_size` bytes."""
    if not _is_written_in_python(group):
        dist._broadcast_coalesced(group, list(tensors), buffer_size, source)  # type: ignore[attr-defined]
        return
    for chunk in _take_tensors(tensors, buffer_size):
        flat = _flatten_dense_tensors(chunk)
        broadcast(flat, group, source)
        for tensor, value in zip(chunk, _unflatten_dense_tensors(flat, chunk), strict=True):
            tensor.copy_(value)


def broadcast_text(text: str, group: dist.ProcessGroup, device: torch.device, source: int = 0) -> str:
    """The text of the rank `source` of the group."""
    raw = text.encode()
    length = torch.tensor([len(raw)], dtype=torch.int64, device=device)
    broadcast(length, group, source)
    if group.rank() == source:
        held = torch.tensor(list(raw), dtype=torch.uint8, device=device)
    else:
        held = torch.empty(int(length), dtype=torch.uint8, device=device)
    if int(length):
        broadcast(held, group, source)
    return bytes(held.tolist()).decode()


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduces the tensor over the group, in place."""
    finish(all_reduce_async(tensor, group, op))


def maximum(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The largest number over the ranks, at each place."""
    most = torch.tensor(numbers, dtype=torch.int64, device=device)
    all_reduce(most, group, dist.ReduceOp.MAX)
    return [int(number) for number in most.tolist()]


def all_reduce_async(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> dist.Work:
    """Starts `all_reduce`; `finish` waits for it."""
    if not _is_written_in_python(group):
        work: dist.Work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        return work
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def finish(work: dist.Work) -> None:
    """Waits for a `Work`. See [Note: groups written in Python]."""
    if type(work) is dist.Work or _takes_no_argument(work.wait):
        work.wait()
    else:
        work.wait(_NO_TIMEOUT)


def _is_written_in_python(group: dist.ProcessGroup) -> bool:
    return type(group) is not dist.ProcessGroup


def _takes_no_argument(wait: Any) -> bool:
    try:
        inspect.signature(wait).bind()
    except TypeError:
        return False
    except ValueError:  # a function of an extension, without a signature
        return True
    return True
