"""torch.distributed as its reference describes it, with the backend "shm", beyond test_shared_memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_lab.comm
from tests.ranks.harness import on_ranks


def test_the_backend_class() -> None:
    """It has ours as attributes, and parses their names in either case."""
    ddp_lab.comm.register()
    assert dist.Backend("SHM") == dist.Backend.SHM == "shm"
    assert dist.Backend.ROUND_ROBIN == "round_robin"


@on_ranks(3)
def test_new_group(rank: int, size: int) -> None:
    """Members, and outsiders (rank and size -1, None)."""
    group = dist.new_group([2, 0], backend="shm")
    if rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend(group)
        ones = torch.ones(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the call of an outsider
            assert dist.all_reduce(ones, group=group, async_op=True) is None
        assert ones.item() == 1
    else:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (rank // 2, 2)
        assert dist.get_process_group_ranks(group) == [0, 2]
        assert (dist.get_group_rank(group, 2), dist.get_global_rank(group, 1)) == (1, 2)
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, group=group)  # the root's global rank
        assert tensor.tolist() == [2.0, 2.0]
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(3)
def test_point_to_point(rank: int, size: int) -> None:
    """To and from a rank, from any, with tags in another order, in batches."""
    group = dist.new_group(backend="shm")
    if rank == 0:
        sources = []
        for _ in range(size - 1):
            got = torch.empty(2)
            sources.append(dist.recv(got, group=group))  # from any
            assert got.tolist() == [sources[-1]] * 2
        assert sorted(sources) == list(range(1, size))
        tagged = {tag: torch.empty(1) for tag in (5, 4)}
        works = [dist.irecv(got, 1, group=group, tag=tag) for tag, got in tagged.items()]
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        assert {tag: got.item() for tag, got in tagged.items()} == {5: 50.0, 4: 40.0}
        operations = [dist.P2POp(dist.isend, torch.ones(1), 1, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        dist.send(torch.full((2,), float(rank)), 0, group=group)
        if rank == 1:
            works = [dist.isend(torch.tensor([10.0 * tag]), 0, group=group, tag=tag) for tag in (4, 5)]
            for work in works:
                assert work is not None
                work.wait()
            got = torch.empty(1)
            assert dist.recv(got, 0, group=group) == 0
    with pytest.raises(ValueError, match=r"itself|same"):
        dist.send(torch.ones(1), rank, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_collectives_return_nothing_or_a_work(rank: int, size: int) -> None:
    """Without async_op None, with it a work: future, wait, is_completed (results: test_shared_memory)."""
    group = dist.new_group(backend="shm")
    root = size - 1
    ones, parts = torch.ones(3), [torch.full((3,), float(i)) for i in range(size)]
    lists = [torch.empty(3) for _ in range(size)]
    calls: dict[str, Callable[[bool], Any]] = {
        "broadcast": lambda later: dist.broadcast(ones, root, group=group, async_op=later),
        "all_reduce": lambda later: dist.all_reduce(ones, group=group, async_op=later),
        "reduce": lambda later: dist.reduce(ones, root, group=group, async_op=later),
        "all_gather": lambda later: dist.all_gather(lists, ones, group=group, async_op=later),
        "gather": lambda later: dist.gather(ones, lists if rank == root else None, root, group=group, async_op=later),
        "scatter": lambda later: dist.scatter(ones, parts if rank == root else None, root, group=group, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter(ones, parts, group=group, async_op=later),
        "all_to_all": lambda later: dist.all_to_all(lists, parts, group=group, async_op=later),
        "barrier": lambda later: dist.barrier(group, async_op=later),
    }
    for name, call in calls.items():
        assert call(False) is None, name
        work = call(True)
        assert work.wait(), name
        assert work.is_completed(), name
        assert work.get_future().then(lambda future: future.done()).wait() is True, name
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce([ones], group=group)  # no tensor
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_monitored_barrier(rank: int, size: int) -> None:
    """It is that of the Gloo group within, and names the rank that is missing; other backends are refused as before."""
    shm, gloo = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
    every_device = dist.new_group(backend="cpu:shm")  # as a cluster makes it
    for group in (shm, gloo, every_device):
        dist.monitored_barrier(group, timeout=timedelta(seconds=60))
        dist.monitored_barrier(group, wait_all_ranks=True)
    with nullcontext() if torch.__version__ >= "2.14" else pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier(dist.new_group(backend="cpu:gloo"))  # torch looks at the name
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Rr]ank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(shm, timeout=timedelta(milliseconds=50))
    for group in (gloo, every_device):
        dist.destroy_process_group(group)


@on_ranks(2)
def test_torchs_debug_mode(rank: int, size: int) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself compares the calls of a group of ours."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend="shm")
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(RuntimeError, match="CollectiveFingerPrint"):
        dist.all_reduce(torch.ones(1 + rank), group=group)
    dist.destroy_process_group(group)
