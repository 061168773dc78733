"""Cases of our own: for the tests of the runner itself, and of kinds that torch's wheel does not hold."""

from __future__ import annotations

import os
import unittest

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
