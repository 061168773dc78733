"""Examples that are whole programs: checkpoints, data loaders with workers, distributed autograd and optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import FileStore, rpc
from torch.multiprocessing.spawn import spawn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_lab import DistributedDataParallel
from tests.ranks.conftest import Ranks
from tests.ranks.harness import RankPool

STEPS = 3


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


# -- saving and loading


def _save_and_load_on_rank(rank: int, size: int, folder: str) -> None:
    def fresh(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = DistributedDataParallel(_net(seed))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = fresh(0)
    _train(model, optimizer, rank, 0, STEPS)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/checkpoint")
    dist.barrier()
    _train(model, optimizer, rank, STEPS, STEPS)

    again, its_optimizer = fresh(7 + rank)
    where: Any = "cpu" if rank == 0 else lambda storage, location: storage
    saved = torch.load(f"{folder}/checkpoint", map_location=where, weights_only=True)
    assert all(name.startswith("module.") for name in saved["model"])
    again.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    _train(again, its_optimizer, rank, STEPS, STEPS)
    for (name, mine), other in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        if "running" not in name or rank == 0:  # the statistics of the last forward are each rank's own
            assert torch.equal(mine, other), name


def test_a_checkpoint_of_one_rank_is_loaded_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Note: rank 0 saves, each rank loads with its own map_location, and training goes on bit by bit."""
    ranks(2, _save_and_load_on_rank, str(tmp_path))


def _prefix_on_rank(rank: int, size: int, folder: str) -> None:
    model = DistributedDataParallel(_net())
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/state")
    dist.barrier()
    state = torch.load(f"{folder}/state", map_location="cpu", weights_only=True)
    consume_prefix_in_state_dict_if_present(state, "module.")
    plain = _net(3)
    plain.load_state_dict(state)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain.eval()(x), model.eval()(x))
    nn.DataParallel(plain).load_state_dict(model.state_dict())


def test_a_plain_module_loads_a_state_without_the_prefix(ranks: Ranks, tmp_path: Path) -> None:
    """Note: consume_prefix_in_state_dict_if_present takes `module.` away; then a module without DDP loads the state."""
    ranks(2, _prefix_on_rank, str(tmp_path))


# -- data loaders whose workers are processes


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


# -- distributed autograd and optimizer


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def _remote_on_rank(rank: int, size: int, folder: str) -> None:
    from torch.distributed.optim import DistributedOptimizer

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    lr = 0.05
    remote = rpc.remote("worker1", _ones, args=(3, 3))  # one for each rank, both live on worker1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    alone = copy.deepcopy(model.module)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [remote, *(rpc.RRef(parameter) for parameter in model.parameters())], lr=lr
    )
    target = torch.full((3, 2), float(rank))
    for _ in range(STEPS):
        own = remote.to_here().detach().clone().requires_grad_()
        alone.load_state_dict(model.module.state_dict())
        alone.zero_grad()
        (alone(own) - target).square().mean().backward()
        dist.barrier()  # everybody has the parameter's value before anybody changes it
        with dist_autograd.context() as context:
            loss = (model(remote.to_here()) - target).square().mean()
            dist_autograd.backward(context, [loss])
            gradients = dist_autograd.get_gradients(context)
            for mine, local in zip(model.module.parameters(), alone.parameters(), strict=True):
                expected = local.grad.clone()
                dist.all_reduce(expected)
                torch.testing.assert_close(gradients[mine], expected / size)
                assert mine.grad is None
            dist.barrier()
            optimizer.step(context)
        dist.barrier()
        for mine, local in zip(model.module.parameters(), alone.parameters(), strict=True):
            average = local.grad.clone()
            dist.all_reduce(average)
            torch.testing.assert_close(mine.detach(), local.detach() - lr * average / size)
        torch.testing.assert_close(remote.to_here().detach(), own.detach() - lr * own.grad)
        dist.barrier()
    del remote, optimizer
    rpc.shutdown()


def test_distributed_autograd_and_optimizer(tmp_path: Path) -> None:
    """Example: DDP after a remote parameter; the context holds averages, DistributedOptimizer steps both."""

    pool = RankPool(2)  # of its own, because a process starts RPC once
    try:
        pool.run(_remote_on_rank, str(tmp_path))
    finally:
        pool.close()
