"""A rank that sums through shared memory until the group breaks: `sum_for_ever.py RANK SIZE STORE`."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ddp_lab.comm

ddp_lab.comm.register()
rank, size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("shm", store=dist.FileStore(sys.argv[3], size), rank=rank, world_size=size)
print("ready", flush=True)
try:
    while True:
        ones = torch.ones(70_001)
        dist.all_reduce(ones)
        assert ones[-1].item() == size
except dist.DistBackendError as error:
    print(error, flush=True)
    os._exit(0)  # the Gloo group beside it would wait for the rank that has died
