"""Process groups and works as third parties write them in Python. The groups pass everything on to one of torch's.

None of them is registered with torch: `dist.get_rank(group)` and its like raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

__all__ = ["WORKS", "PythonGroup"]


class TimeoutWork(dist.Work):
    """Its `wait` wants a timeout, because torch's C++ passes one."""

    def __init__(self, inner: Any, result: Any, group: PythonGroup) -> None:
        super().__init__()
        self.inner, self.result, self.group = inner, result, group
        self.future: Future[Any] | None = None

    def wait(self, timeout: Any) -> bool:
        self.group.waited += 1
        self.inner.wait()
        return True

    def get_future(self) -> Future[Any]:
        self.group.futures += 1
        if self.future is None:
            self.inner.wait()
            self.future = Future()
            self.future.set_result(self.result)
        return self.future


class OptionalTimeoutWork(TimeoutWork):
    """Its `wait` takes a timeout, or none."""

    def wait(self, timeout: Any = None) -> bool:
        return super().wait(timeout)


class PlainWork(TimeoutWork):
    """Its `wait` takes nothing. With torch's class such a group fails at construction."""

    def wait(self) -> bool:  # type: ignore[override]
        return super().wait(None)


def _work_of_future(inner: Any, result: Any, group: PythonGroup) -> Any:
    inner.wait()
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


WORKS: dict[str, Callable[[Any, Any, PythonGroup], Any]] = {
    "timeout": TimeoutWork,
    "optional": OptionalTimeoutWork,
    "future": _work_of_future,
    "plain": PlainWork,
}


class PythonGroup(dist.ProcessGroup):
    """A group whose collectives are Python methods.

    Args:
        inner: the group that does them; the default one if None.
        works: a key of `WORKS`: how the works are written.
        elsewhere: all_reduce leaves its input alone, and gives the sum in the future.
    """

    def __init__(self, inner: Any = None, works: str = "timeout", *, elsewhere: bool = False) -> None:
        self.inner = inner if inner is not None else dist.group.WORLD
        super().__init__(self.inner.rank(), self.inner.size())
        self.make_work, self.elsewhere = WORKS[works], elsewhere
        self.waited = self.futures = 0
        self.called: list[str] = []
        self.own_name = ""

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.called.append("broadcast")
        return self.make_work(self.inner.broadcast(tensors, options), tensors, self)

    def allgather(self, gathered: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Any:
        self.called.append("allgather")
        return self.make_work(self.inner.allgather(gathered, tensors, options), gathered, self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.called.append("allreduce")
        summed = [tensor.clone() for tensor in tensors] if self.elsewhere else tensors
        return self.make_work(self.inner.allreduce(summed, options), summed, self)

    def getRank(self) -> int:
        return int(self.inner.rank())

    def getSize(self) -> int:
        return int(self.inner.size())

    def getBackendName(self) -> str:
        return "python"

    def setGroupName(self, name: str) -> None:
        self.own_name = name

    def getGroupName(self) -> str:
        return self.own_name
