"""A script without DistributedDataParallel: `fully_shard` (not with the argument "plain"), plain collectives, a send
and a receive."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("shard", "other"))["shard"]
if "plain" not in sys.argv:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
for _ in range(3):
    net(torch.randn(4, 8)).sum().backward()
dist.all_gather_into_tensor(torch.empty(size), torch.ones(1))
counted = torch.ones(1)
dist.all_reduce(counted)  # the plain one
if rank == 0:
    dist.send(counted, 1)
elif rank == 1:
    dist.recv(counted, 0)
dist.destroy_process_group()
