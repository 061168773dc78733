"""A small training to try `ddp-lab run` and `torchrun` with; it needs no GPU."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # a different seed on each rank, so different batches
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)), bucket_cap_mb=0.01
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
