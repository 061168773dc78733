"""Run by mpiexec: every operation of the backend "mpi" gives what Gloo gives, and says what it can't do; training."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import mpi_training
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ddp_lab.comm  # noqa: F401 - registers "mpi"
from tests.ranks.comm.against_gloo import COLLECTIVES, call


def _collectives(group: Any, gloo: Any) -> None:
    """With random arguments, waited for or not, they give what Gloo gives; what MPI can't reduce is refused."""
    for name in COLLECTIVES:
        for seed in range(15):
            refusal, what = "", f"{name} {seed}"
            try:
                call(name, random.Random(what), group, gloo, later=seed % 2 == 1, what=what)
            except ValueError as error:
                refusal = str(error)
            assert not refusal or re.match("mpi can't reduce tensors of (Half|BFloat16)", refusal), f"{what}: {refusal}"


def _other_forms(group: Any, rank: int, size: int) -> None:
    """Of no dimension and of several, bits, averages, in one tensor for all ranks."""
    for op, expected in ((ReduceOp.BOR, (1 << size) - 1), (ReduceOp.BAND, 0), (ReduceOp.BXOR, (1 << size) - 1)):
        bits = torch.tensor(1 << rank)
        dist.all_reduce(bits, op, group=group)
        assert bits.item() == expected, op
    mean = torch.full((2, 3), float(rank), dtype=torch.float64)
    dist.all_reduce(mean, ReduceOp.AVG, group=group)
    assert mean.unique().tolist() == [(size - 1) / 2]
    part, whole = torch.empty(2, 3), torch.empty(2 * size, 3)
    dist.reduce_scatter_tensor(part, torch.arange(6.0 * size).view(2 * size, 3) + rank, ReduceOp.MAX, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
    assert torch.equal(whole, torch.arange(6.0 * size).view(2 * size, 3) + size - 1)
    flags = [torch.zeros(2, dtype=torch.bool) for _ in range(size)]
    dist.all_to_all(flags, [torch.tensor([rank == 0, peer == 0]) for peer in range(size)], group=group)
    assert [one.tolist() for one in flags] == [[peer == 0, rank == 0] for peer in range(size)]


def _messages(group: Any, rank: int, size: int) -> None:
    """All send to all at once, large and in an order that would block; tags are kept apart."""
    following, former = (rank + 1) % size, (rank - 1) % size
    big = [torch.empty(300_000) for _ in range(2)]
    works = [dist.isend(torch.full((300_000,), float(rank + tag)), following, group=group, tag=tag) for tag in (1, 2)]
    works += [dist.irecv(big[2 - tag], former, group=group, tag=tag) for tag in (2, 1)]
    for work in works:
        assert work is not None
        work.wait()
    assert [one.unique().tolist() for one in big] == [[float(former + tag)] for tag in (2, 1)]
    if rank == 0:
        for _ in range(size - 1):
            tensor = torch.empty(2)
            source = dist.recv(tensor, None, group=group, tag=3)
            assert tensor.tolist() == [float(source)] * 2
    else:
        dist.send(torch.full((2,), float(rank)), 0, group=group, tag=3)
    operations = [dist.P2POp(dist.isend, torch.full((2, 2), float(rank)), following, group=group)]
    operations.append(dist.P2POp(dist.irecv, received := torch.empty(2, 2), former, group=group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.unique().tolist() == [float(former)]


def _asynchronous(group: Any, rank: int, size: int) -> None:
    """Many at once, in two groups in opposite order; callbacks that communicate; large ones in several messages."""
    other = dist.new_group(backend="mpi")
    tensors = [[torch.full((1000,), float(rank + 10 * which + i)) for i in range(10)] for which in range(2)]
    works = []
    for which in (0, 1) if rank % 2 else (1, 0):
        for tensor in tensors[which]:
            works.append(dist.all_reduce(tensor, group=(group, other)[which], async_op=True))
    for work in works:
        work.wait()
    for which in range(2):
        expected = [size * (size - 1) / 2 + size * (10.0 * which + i) for i in range(10)]
        assert [tensor[-1].item() for tensor in tensors[which]] == expected

    def again(future: Any) -> torch.Tensor:
        (tensor,) = future.value()
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0] * 2

    chained = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(again)
    after = torch.ones(1)
    dist.all_reduce(after, group=group)
    assert chained.wait().tolist() == [2.0 * size * size] * 3
    assert after.item() == size
    large = torch.ones((1 << 24) + 5, dtype=torch.int8)
    dist.all_reduce(large, group=group)
    assert bool((large == size).all())


def _sub_groups(rank: int, size: int) -> None:
    """Groups of some ranks, in an order of their own, and of one rank."""
    pair = dist.new_group([size - 1, 0], backend="mpi", sort_ranks=False)
    alone = [dist.new_group([one], backend="mpi") for one in range(size)][rank]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == 1
    if rank in (0, size - 1):
        assert dist.get_group_rank(pair, size - 1) == 0
        got = [torch.empty(1) for _ in range(2)]
        dist.all_gather(got, torch.tensor([float(rank)]), group=pair)
        assert [one.item() for one in got] == [size - 1, 0]


def _turned(group: Any, rank: int, size: int) -> None:
    """Outputs whose elements lie in another order."""
    part = torch.arange(6.0).view(2, 3)
    summed = torch.empty(3, 2).t()
    dist.reduce_scatter(summed, [part + rank] * size, group=group)
    assert torch.equal(summed, part * size + size * (size - 1) / 2)
    gathered = [torch.empty(3, 2).t() for _ in range(size)]
    dist.all_gather(gathered, part + rank, group=group)
    assert all(torch.equal(one, part + peer) for peer, one in enumerate(gathered))


def _refusals(group: Any) -> None:
    with pytest.raises(ValueError, match="mpi can't reduce tensors of Half: convert them"):
        dist.all_reduce(torch.ones(1, dtype=torch.half), group=group)
    with pytest.raises(ValueError, match="bitwise ReduceOp with tensors of Float"):
        dist.all_reduce(torch.ones(1), ReduceOp.BAND, group=group)
    with pytest.raises(ValueError, match=r"ReduceOp\.AVG with tensors of Int"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), ReduceOp.AVG, group=group)
    with pytest.raises(RuntimeError, match="Tensors must be contiguous"):
        dist.broadcast(torch.ones(4)[::2], 0, group=group)
    with pytest.raises(RuntimeError, match="one dtype and size"):
        dist.all_gather([torch.empty(3)] * dist.get_world_size(group), torch.ones(2), group=group)


def main() -> None:
    """All of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="mpi://")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.is_mpi_available()
    groups = {"gloo": dist.group.WORLD, "mpi": dist.new_group(backend="mpi")}
    assert dist.get_backend(groups["mpi"]) == "mpi"
    _collectives(groups["mpi"], groups["gloo"])
    _other_forms(groups["mpi"], rank, size)
    _messages(groups["mpi"], rank, size)
    dist.barrier(group=groups["mpi"])
    _asynchronous(groups["mpi"], rank, size)
    _turned(groups["mpi"], rank, size)
    _sub_groups(rank, size)
    _refusals(groups["mpi"])
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch gives some operations new names
        main()
    mpi_training.main()
