"""A data loader with workers that are processes, beside DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_lab import DistributedDataParallel


class Squares(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows and the sums of their squares."""

    def __init__(self) -> None:
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].square().sum()


def _losses(rank: int, size: int, context: str | None) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Squares()
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=DistributedSampler(data, size, rank),
        num_workers=0 if context is None else 1,
        multiprocessing_context=context,
    )
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _load_in_process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    expected = _losses(rank, size, None)
    assert len(expected) == 3
    assert _losses(rank, size, ("forkserver", "spawn")[rank]) == expected
    dist.destroy_process_group()


@pytest.mark.soak
def test_data_loaders_with_workers(tmp_path: Path) -> None:
    """Warning: workers started by forkserver or spawn feed ranks (started by spawn, too) what no workers would."""
    spawn(_load_in_process, args=(2, str(tmp_path)), nprocs=2)
