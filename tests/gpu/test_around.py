"""On a CUDA device with NCCL: mixed precision, SyncBatchNorm and ZeRO's overlap hooks beside torch's class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.ranks import NEEDS_NCCL, on_ranks
from tests.ranks.compare import assert_same, assert_same_on_all_ranks, mlp, same_as_torch, samples, state_of

pytestmark = NEEDS_NCCL

SMALL = 0.0005  # MiB: several buckets
RANKS = 2


def _steps(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(5):
        chosen.zero_grad()
        model(samples(rank, step).cuda()).float().square().mean().backward()
        if not getattr(chosen, "_overlap_with_ddp", False):
            chosen.step()
        seen.append(state_of(model))
    return seen


def _reference(reduce_dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What mixed precision is to compute: bfloat16 gradients of all ranks, averaged, and a step in full precision."""
    net = mlp().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for step in range(5):
        low = copy.deepcopy(net).to(torch.bfloat16)
        sums = [torch.zeros_like(parameter, dtype=reduce_dtype) for parameter in net.parameters()]
        for rank in range(RANKS):
            low.zero_grad()
            low(samples(rank, step).cuda().bfloat16()).float().square().mean().backward()
            for total, parameter in zip(sums, low.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.to(reduce_dtype) / RANKS
        for total, parameter in zip(sums, net.parameters(), strict=True):
            parameter.grad = total.float()
        optimizer.step()
        seen.append({f"module.{name}": value.clone() for name, value in net.state_dict().items()})
    return seen


def _mixed_precision(rank: int, reduce_dtype: torch.dtype, as_view: bool) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(
        mlp().cuda(),
        device_ids=[0],
        mixed_precision=_MixedPrecision(torch.bfloat16, reduce_dtype, torch.bfloat16),
        bucket_cap_mb=SMALL,
        gradient_as_bucket_view=as_view,
    )
    seen = _steps(model, rank)
    for ours, expected in zip(seen, _reference(reduce_dtype), strict=True):
        assert_same({name: ours[name] for name in expected}, expected)
    assert_same_on_all_ranks(seen[-1])


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_mixed_precision(reduce_dtype: torch.dtype, as_view: bool) -> None:
    """Native mixed precision is what it says, bit by bit.

    Torch 2.11's class is no measure on one GPU: its first step takes the parameters themselves for their gradients.
    """
    on_ranks(RANKS, _mixed_precision, reduce_dtype, as_view)


def _sync_batchnorm(rank: int) -> None:
    def program(wrap: type) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model = wrap(nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(), device_ids=[0], bucket_cap_mb=SMALL)
        return _steps(model, rank)

    seen = same_as_torch(program, exact=False)
    assert_same_on_all_ranks(seen[-1])

    def joined(wrap: type) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4)).cuda()
        model = wrap(net, device_ids=[0])
        done = []

        def train() -> None:
            for step in range(2 + rank):
                model(samples(rank, step).cuda()).sum().backward()
                done.append(step)

        with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
            train()
        return done

    assert same_as_torch(joined) == [0, 1]


def test_sync_batchnorm() -> None:
    """SyncBatchNorm's statistics and gradients are torch's, also in a join that ends early."""
    on_ranks(RANKS, _sync_batchnorm)


def _zero_overlap(rank: int, interleaved: bool, shard_buckets: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrap_hook = ddp_zero_hook.hook_with_zero_step_interleaved if interleaved else ddp_zero_hook.hook_with_zero_step

    def program(wrap: type) -> Any:
        model = wrap(mlp().cuda(), device_ids=[0], bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, wrap_hook(allreduce_hook, model, optimizer, shard_buckets=shard_buckets))
        return _steps(model, rank, optimizer)

    seen = same_as_torch(program, exact=False)
    assert_same_on_all_ranks({name: value for name, value in seen[-1].items() if not name.startswith("gradient")})


@pytest.mark.parametrize(("interleaved", "shard_buckets"), [(False, False), (False, True), (True, False)])
def test_zero_step_in_the_backward(interleaved: bool, shard_buckets: bool) -> None:
    """ZeRO's step overlapped with our backward, whole or per bucket, leaves the weights that torch's class leaves."""
    on_ranks(RANKS, _zero_overlap, interleaved, shard_buckets)
