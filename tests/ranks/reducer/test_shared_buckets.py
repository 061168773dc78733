"""Memory that the ranks of a group read from one another, and the buckets of a model in it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp_lab.comm
from ddp_lab import DistributedDataParallel, native
from tests.ranks.harness import on_ranks
from tests.waiting import wait_until

_C = native.load()
CPU = torch.device("cpu")
MIB = 1 << 20


def _group() -> Any:
    ddp_lab.comm.register()
    return dist.new_group(backend="shm")


def _pages() -> int:
    """Bytes of this process's pool that take memory."""
    descriptor, _ = _C.Pool.own()
    return os.fstat(descriptor).st_blocks * 512


def _empty() -> None:
    """What earlier tests of these processes held is gone."""
    gc.collect()
    wait_until(lambda: _pages() == 0, "the end of what is in the pool")  # a thread may hold the last work a moment


def _tensor(group: Any, numel: int) -> torch.Tensor:
    backend = group._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    made: torch.Tensor = backend.allocate_tensor(numel, dtype=torch.float32, device=CPU)
    return made


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_memory_comes_and_goes(rank: int, size: int) -> None:
    """It is given back with its tensor, not by a fork's copy of it."""
    _empty()
    group = _group()
    tensors = [_tensor(group, MIB).fill_(rank) for _ in range(3)]
    assert _pages() == 12 * MIB
    del tensors[1]
    assert _pages() == 8 * MIB
    tensors.append(_tensor(group, MIB // 2).fill_(rank))  # where there is room
    child = os.fork()
    if child == 0:
        tensors.clear()  # lets go of what its parent still uses
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for tensor in tensors:
        assert (tensor == rank).all()
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(range(size))).all()
    inner = tensors[0][1_000:900_001]  # a part that begins anywhere
    dist.all_reduce(inner, group=group)
    assert (inner == size * sum(range(size))).all()
    assert (tensors[0][:1_000] == sum(range(size))).all()
    del tensors, tensor, inner
    dist.barrier(group)
    _empty()
    dist.destroy_process_group(group)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))


def _train(model: torch.nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 200), float(rank + step))).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_buckets_live_there(rank: int, size: int, views: bool) -> None:
    """Gradients are those of Gloo, also after the group was replaced; nothing is kept of a model that is gone."""
    gloo, shm, other = dist.new_group(backend="gloo"), _group(), _group()
    wrap: Callable[..., Any] = DistributedDataParallel
    options = {"bucket_cap_mb": 0.3, "gradient_as_bucket_view": views}
    expected = _train(wrap(_model(), process_group=gloo, **options), rank)
    bytes_of_all = sum(gradient.nbytes for gradient in expected)
    _empty()
    model = wrap(_model(), process_group=shm, **options)
    for group in (shm, other):
        model._update_process_group(group)
        for found, wanted in zip(_train(model, rank), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        # Buckets that nobody needs are never written to.
        assert _pages() in range(bytes_of_all, bytes_of_all + (1 << 16)) if views else _pages() == 0
    assert model._sync.description()["options"]["averages_in_place"]
    model.register_comm_hook(other, default_hooks.allreduce_hook)
    assert not model._sync.description()["options"]["averages_in_place"]
    for found, wanted in zip(_train(model, rank), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert _pages() >= bytes_of_all
    del model
    dist.barrier(shm)
    _empty()
    for group in (gloo, shm, other):
        dist.destroy_process_group(group)


@on_ranks(2)
def test_power_sgd_with_several_buckets(rank: int, size: int) -> None:
    """Its callbacks wait for collectives of their own, with which Gloo hangs."""
    group = _group()
    model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.2)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=200, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    gradients = _train(model, rank, steps=4)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, gradients)
    for theirs in everyone:
        assert all(map(torch.equal, gradients, theirs))
    dist.destroy_process_group(group)


def _entries(since: int, group: Any, frames: bool) -> list[dict[str, Any]]:
    entries = [one for one in _C.flights(frames)["entries"] if one["time_created_ns"] >= since]
    return [one for one in entries if one["process_group"][0] == group.group_name]


@on_ranks(2)
def test_operations_are_logged(rank: int, size: int) -> None:
    """With their state and the line that called them, as torch's Flight Recorder has them of its own backends."""
    since, group = time.time_ns(), _group()
    works = [dist.all_reduce(torch.ones(3, 4), group=group, async_op=True) for _ in range(3)] if rank == 0 else []
    states = ["started", "scheduled", "scheduled"] if rank == 0 else []
    wait_until(lambda: [one["state"] for one in _entries(since, group, False)] == states, f"the states {states}")
    before = _entries(since, group, True)
    dist.barrier()
    if rank:
        works = [dist.all_reduce(torch.ones(3, 4), group=group, async_op=True) for _ in range(3)]
    else:
        assert any(frame["filename"] == __file__ for frame in before[0]["frames"])
    for work in works:
        work.wait()
    after = _entries(since, group, False)
    assert [one["collective_seq_id"] for one in after] == [1, 2, 3]
    for one in after:
        told = (one["profiling_name"], one["input_sizes"], one["input_dtypes"], one["state"], one["retired"])
        assert told == ("shm:all_reduce", [[3, 4]], ["Float"], "completed", True)
    dist.destroy_process_group(group)
