"""A script that starts its ranks itself, and fails in one of them if it is told to."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def worker(rank: int, size: int, store: str, fails: bool) -> None:
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(6):
        if fails and (rank, step) == (1, 3):
            raise ValueError("no such file")
        model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2, os.path.abspath("store"), sys.argv[1:] == ["fails"]), nprocs=2)
