"""torch.distributed with the backend "shm", beyond test_shared_memory and torch's own tests."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ddp_lab.comm  # noqa: F401 - registers shm
from tests.ranks.harness import on_ranks


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
