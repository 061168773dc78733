"""A script that knows nothing of ddp_lab. Arguments: what happens (see `main`), and how many steps."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Pickled by reference to ``__main__`` for workers that are spawned."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(10, generator=torch.Generator().manual_seed(index))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def descend(model: nn.Module) -> None:
    """A step of SGD by hand: torch.optim takes a rank longer to import than what tests see of it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def main(what: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # a rank that ends while another still connects to it would fail that one
    count = {"no model": 0, "two models": 2}.get(what, 1)
    models = [DistributedDataParallel(build(), bucket_cap_mb=0.002) for _ in range(count)]
    loader = torch.utils.data.DataLoader(
        Rows(),
        8,
        num_workers=1 if what == "workers" else 0,
        multiprocessing_context="spawn" if what == "workers" else None,
    )
    batches = list(loader)
    for step in range(steps):
        for model in models:
            model.zero_grad()
            model(batches[(step + rank) % len(batches)]).square().mean().backward()
            descend(model)
        if step == 5 and rank == 1 and what == "raises":
            raise RuntimeError("the data is broken")
        if what == "endless" and rank == 1 and os.path.exists(os.environ["HANG"]):
            signal.pause()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
