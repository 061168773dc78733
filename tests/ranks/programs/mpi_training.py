"""Run by `mpi_operations.py`: `init_process_group("mpi")`; torch's DDP and ours train alike; time-outs, abort."""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ddp_lab
import ddp_lab.comm


def main() -> None:
    """Trains, then lets operations fail."""
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    assert dist.get_backend() == "mpi"
    torch.manual_seed(rank)  # models differ until DDP broadcasts rank 0's
    module = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
    models = [
        kind(copy.deepcopy(module), bucket_cap_mb=0.004)
        for kind in (torch.nn.parallel.DistributedDataParallel, ddp_lab.DistributedDataParallel)
    ]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(100 + rank)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().div(8).backward()
            optimizer.step()
    for stock, own in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(stock, own)
        everyone = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(everyone, own.detach())
        assert all(torch.equal(everyone[0], one) for one in everyone)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": one} for one in range(size)]

    with pytest.raises(RuntimeError, match=f"recv: there is no rank {size + 3} in a group of {size}"):
        dist.recv(torch.empty(1), size + 3)
    # The others have time, however busy the machine is.
    group = dist.new_group(timeout=timedelta(seconds=60 if rank else 0.2))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timed out after 200 ms"):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(dist.DistBackendError, match="timed out after 200 ms"):
            dist.all_reduce(torch.ones(1), group=group)
    aborted = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=aborted, async_op=True)
        aborted._get_backend(torch.device("cpu")).abort()
        with pytest.raises(dist.DistBackendError, match="this group was aborted"):
            work.wait()
    dist.barrier()
    if rank:  # MPI's own part of these ends, which lets MPI end
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=aborted)
    print("rank", rank, "of", size, "is done")
