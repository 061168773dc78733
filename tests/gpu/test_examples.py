"""Examples of DDP's reference that need GPUs: a module on two devices, and a checkpoint loaded on another device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available: no CUDA device or driver"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")


class TwoDevices(nn.Module):
    """The first layer on one GPU, the second on another; the output is on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10).to("cuda:0"), nn.Linear(10, 5).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to("cuda:0"))).to("cuda:1"))


def _train(model: Any, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 10, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return gradients


def _two_devices_on_rank(rank: int, size: int, folder: str) -> None:
    from ddp_lab import DistributedDataParallel

    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    torch.manual_seed(0)
    module = TwoDevices()
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(module, device_ids=[0])
    ours = DistributedDataParallel(copy.deepcopy(module))
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    torch.testing.assert_close(_train(ours, rank), _train(theirs, rank))
    dist.destroy_process_group()


@two_gpus
def test_a_module_that_spans_two_devices(tmp_path: Path) -> None:
    """Multi-device module: device_ids must be None; gradients on both devices are torch's."""
    spawn(_two_devices_on_rank, args=(2, str(tmp_path)), nprocs=2)


def _map_location_on_rank(rank: int, size: int, folder: str) -> None:
    from ddp_lab import DistributedDataParallel

    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(10, 5).to(device), device_ids=[device])
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/state")
    dist.barrier()
    state = torch.load(f"{folder}/state", map_location={"cuda:0": str(device)}, weights_only=True)
    assert {tensor.device for tensor in state.values()} == {device}
    model.load_state_dict(state)
    _train(model, rank)
    dist.destroy_process_group()


def test_a_checkpoint_is_loaded_on_each_ranks_device(tmp_path: Path) -> None:
    """Note: map_location puts the tensors that rank 0 saved on each rank's own GPU."""
    spawn(_map_location_on_rank, args=(2, str(tmp_path)), nprocs=2)
