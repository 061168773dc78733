"""Cases of our own: for the tests of the runner itself, and of kinds that torch's wheel does not hold."""

from __future__ import annotations

import os
import unittest
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.distributed import distributed_test


class TwoRanks(MultiProcessTestCase):
    """Ranks started as those of torch's tests."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_constructs(self) -> None:
        """Each name under which torch's tests find the class means the same class, and constructs it."""
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        names = [
            DistributedDataParallel,
            distributed_test.DistributedDataParallel,
            torch.nn.parallel.DistributedDataParallel,
            torch.nn.parallel.distributed.DistributedDataParallel,
        ]
        assert len(set(names)) == 1
        for cls in names:
            cls(torch.nn.Linear(2, 2))

    def test_fails_on_rank_1(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        print(f"rank {self.rank} was here", flush=True)
        store.set(f"{self.rank} has said it", "")
        store.wait(["0 has said it"])  # a rank that is still silent when its peer fails is ended
        assert self.rank == 0, "what rank 1 has to say"

    def test_hangs(self) -> None:
        os.read(os.pipe()[0], 1)


class OneProcess(unittest.TestCase):
    """Ends that a test may come to."""

    def test_is_skipped(self) -> None:
        self.skipTest("no reason")

    def test_dies(self) -> None:
        os._exit(0)


class LonelyWork(dist.Work):
    """Done when it is made. The group keeps it: it must not keep the group."""

    def __init__(self, result: Any, group: LonelyGroup) -> None:
        super().__init__()
        self.group = weakref.ref(group)
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout: Any) -> bool:
        group = self.group()
        assert group is not None
        group.waited += 1
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        group = self.group()
        assert group is not None
        group.futures += 1
        return self.future


class LonelyGroup(dist.ProcessGroup):
    """A group of one rank, written in Python as torch's tests do, and not registered."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.waited = self.futures = 0

    def broadcast(self, tensors: Any, options: Any) -> LonelyWork:
        return LonelyWork(tensors, self)

    def allgather(self, gathered: Any, tensors: Any, options: Any) -> LonelyWork:
        for rows, tensor in zip(gathered, tensors, strict=True):
            rows[0].copy_(tensor)
        return LonelyWork(gathered, self)

    def allreduce(self, tensors: Any, options: Any) -> LonelyWork:
        return LonelyWork(tensors, self)

    def getRank(self) -> int:
        return 0

    def getSize(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "lonely"


class Threads(MultiThreadedTestCase):
    """Ranks that are threads of one process; their default group is written in Python."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_threads_average(self) -> None:
        """Each step leaves the mean over the threads in all gradients, also of what accumulated under no_sync."""
        module = torch.nn.Linear(2, 1)
        model = DistributedDataParallel(module)
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                model(torch.full((1, 2), float(self.rank))).sum().backward()
            assert module.weight.grad.tolist() == [[self.rank, self.rank]]
            model(torch.full((1, 2), float(10 * step))).sum().backward()
            assert module.weight.grad.tolist() == [[10 * step + 0.5, 10 * step + 0.5]]

    def test_lonely_group(self) -> None:
        """Over a group of one, gradients are the module's own; its works are waited for and asked for futures."""
        group = LonelyGroup()
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        for arguments in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            model = DistributedDataParallel(module, process_group=group, **arguments)
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(4, 2)).sum().backward()
                averaged = [parameter.grad.clone() for parameter in module.parameters()]
                own = torch.autograd.grad(module(torch.ones(4, 2)).sum(), list(module.parameters()))
                assert all(map(torch.equal, averaged, own))
            del model
            module.zero_grad(set_to_none=True)
        assert group.waited
        assert group.futures
