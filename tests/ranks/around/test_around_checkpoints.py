"""Around DDP: state dicts, saved and loaded in every way, stateless calls, device meshes with tensor parallel."""

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
from tests.ranks.compare import assert_same, assert_same_on_all_ranks, mlp, same_as_torch, samples, state_of
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        optimizer.step()


def _distributed_checkpoint_on_rank(rank: int, size: int, folder: str) -> None:
    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        _train(model, optimizer, rank, range(2))
        weights, moments = states.get_state_dict(model, optimizer)
        full = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
        path = Path(folder) / wrap.__module__
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
        _train(model, optimizer, rank, range(2, 4))
        expected = state_of(model)

        fresh = wrap(mlp(), bucket_cap_mb=SMALL)
        again = torch.optim.Adam(fresh.parameters(), lr=0.05)
        weights, moments = states.get_state_dict(fresh, again)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        states.set_state_dict(fresh, again, model_state_dict=weights, optim_state_dict=moments)
        _train(fresh, again, rank, range(2, 4))
        assert_same(state_of(fresh), expected, "resumed")
        return dict(full), states.get_optimizer_state_dict(fresh, again)["state"], expected

    full, _, _ = same_as_torch(program)
    assert list(full) == list(mlp().state_dict())  # no "module." in it
    assert isinstance(DistributedDataParallel(mlp()), torch.nn.parallel.DistributedDataParallel)


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """torch.distributed.checkpoint finds our model under its own names, saves it, and training resumes bit by bit."""
    ranks(2, _distributed_checkpoint_on_rank, str(tmp_path))


def _checkpoint_of(rank: int, size: int, folder: str, load: bool) -> Any:
    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if not load:
            _train(model, optimizer, rank, range(2))
        weights, moments = states.get_state_dict(model, optimizer)
        held, path = {"model": weights, "optimizer": moments}, Path(folder) / wrap.__module__
        if not load:
            dcp.save(held, checkpoint_id=path)
            return state_of(model)
        dcp.load(held, checkpoint_id=path)
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        loaded = {name: value.clone() for name, value in state_of(model).items()}
        _train(model, optimizer, rank, range(2, 4))
        return loaded, state_of(model)

    return same_as_torch(program)


def test_distributed_checkpoint_of_another_world_size(ranks: Ranks, tmp_path: Path) -> None:
    """What two ranks saved is what one or three load, and training goes on as with torch's class."""
    saved, _ = ranks(2, _checkpoint_of, str(tmp_path), False)
    names = [name for name in saved if "gradient" not in name]
    for size in (1, 3):
        for loaded, _ in ranks(size, _checkpoint_of, str(tmp_path), True):
            assert_same({n: v for n, v in loaded.items() if "gradient" not in n}, {n: saved[n] for n in names})


def _save_and_load_on_rank(rank: int, size: int, folder: str) -> None:
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _train(model, optimizer, rank, range(2))
    path = Path(folder) / "model.pt"
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    loaded = torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=True)
    assert list(loaded) == [f"module.{name}" for name in mlp().state_dict()]

    other = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    other.load_state_dict(loaded)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    consume_prefix_in_state_dict_if_present(loaded, "module.")
    plain = mlp()
    plain.load_state_dict(loaded)
    assert_same(dict(plain.state_dict()), dict(model.module.state_dict()))

    replaced = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(replaced.parameters(), lr=0.05)
    _train(replaced, optimizer, rank, range(2))
    replaced.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    _train(replaced, optimizer, rank, range(3))
    assert_same_on_all_ranks(state_of(replaced))


def test_save_load_and_prefix(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 saves, all ranks load with `map_location`; without the "module." prefix a plain module loads it."""
    ranks(2, _save_and_load_on_rank, str(tmp_path))


@on_ranks(2)
def test_functional_call(rank: int, size: int) -> None:
    """`torch.func.functional_call` swaps parameters of the wrapped model; its own parameters are averaged as ever."""

    def program(wrap: Any) -> Any:
        torch.manual_seed(3)
        model = wrap(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), bucket_cap_mb=SMALL)
        x = samples(rank, 0)
        doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
        with torch.no_grad():
            changed = torch.func.functional_call(model, doubled, (x,))
            untouched = model(x)
        same = dict(model.named_parameters())
        torch.func.functional_call(model, same, (x,)).square().sum().backward()
        return changed, untouched, state_of(model)

    changed, untouched, state = same_as_torch(program)
    assert not torch.equal(changed, untouched)
    assert_same_on_all_ranks({name: value for name, value in state.items() if name.startswith("gradient")})


SPLIT = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # by parameter: the dimension that tensor parallelism splits


@on_ranks(4)
def test_data_and_tensor_parallel(rank: int, size: int) -> None:
    """On a 2-D mesh of 4 ranks, two replicas of a model split over two ranks train as one process on both batches."""
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
