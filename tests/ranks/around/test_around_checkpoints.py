"""Around DDP: distributed checkpoints, device meshes with tensor parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, mlp, same_as_torch, samples, state_of
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        optimizer.step()


def _checkpoint_of(rank: int, size: int, folder: str, load: bool) -> Any:
    """What is saved or loaded, and after two more steps."""

    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if not load:
            _train(model, optimizer, rank, range(2))
        weights, moments = states.get_state_dict(model, optimizer)
        held, path = {"model": weights, "optimizer": moments}, Path(folder) / wrap.__module__
        if load:
            dcp.load(held, checkpoint_id=path)
            states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        else:
            dcp.save(held, checkpoint_id=path)
        full = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
        assert list(full) == list(mlp().state_dict())  # no "module." in it
        then = {name: value.clone() for name, value in full.items()}
        _train(model, optimizer, rank, range(2, 4))
        return then, state_of(model), states.get_optimizer_state_dict(model, optimizer)["state"]

    return same_as_torch(program)


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """torch.distributed.checkpoint finds our model under its own names: what two ranks saved is what one, two or three
    load; training goes on as with torch's class, and on as many ranks bit by bit as if it had not been interrupted."""
    saved, *resumed = ranks(2, _checkpoint_of, str(tmp_path), False)[0]
    for size in (1, 2, 3):
        for loaded, *trained in ranks(size, _checkpoint_of, str(tmp_path), True):
            assert_same(loaded, saved)
            if size == 2:
                assert_same(trained, resumed, "resumed")


SPLIT = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # by parameter: the dimension that tensor parallelism splits


@on_ranks(4)
def test_data_and_tensor_parallel(rank: int, size: int) -> None:
    """On a 2-D mesh of 4 ranks, two replicas of a model split over two ranks train as one process on both batches. That
    a forward swaps the model's tensors is no change of it."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
    replica = mesh["data"].get_local_rank()

    def whole(name: str, part: torch.Tensor) -> torch.Tensor:
        if name not in SPLIT:
            return part
        parts = [torch.empty_like(part) for _ in range(size // 2)]
        dist.all_gather(parts, part.contiguous(), group=mesh["model"].get_group())
        return torch.cat(parts, SPLIT[name])

    def program(wrap: Any) -> Any:
        net = mlp()
        parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = wrap(net, device_mesh=mesh["data"])
        parameters = dict(model.module.named_parameters())  # forward puts plain tensors in their places
        optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
        _train(model, optimizer, replica, range(3))
        assert wrap is not DistributedDataParallel or model.reducer.generation() == 1  # as rebuilt once
        return {name: whole(name, p.detach()) for name, p in parameters.items()}

    weights = same_as_torch(program, exact=False)

    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        for rank_of_data in range(2):
            (alone(samples(rank_of_data, step)).square().mean() / 2).backward()
        optimizer.step()
    assert_same(weights, {name: p.detach() for name, p in alone.named_parameters()}, exact=False)
