"""Around DDP: optimizers that communicate, autocast and gradient scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp_lab.comm
from ddp_lab import DistributedDataParallel
from tests.ranks.compare import mlp, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets
STEPS = 4


def _steps(model: nn.Module, optimizer: Any, rank: int, after_backward: Any = None) -> list[Any]:
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        if after_backward is not None:
            seen.append(after_backward())
        optimizer.step()
        seen.append(state_of(model))
    return seen


@pytest.mark.parametrize(("as_view", "name"), [(False, "SGD"), (True, "Adam")])
@on_ranks(2)
def test_zero_redundancy_optimizer(rank: int, size: int, as_view: bool, name: str) -> None:
    """ZeroRedundancyOptimizer shards its state over our model's ranks and takes torch's steps."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), getattr(torch.optim, name), lr=0.05)
        seen = _steps(model, optimizer, rank)
        optimizer.consolidate_state_dict(to=0)
        return seen, optimizer.state_dict()["state"] if rank == 0 else None

    same_as_torch(train)


@on_ranks(2)
def test_zero_overlap_hooks_refuse_gloo(rank: int, size: int) -> None:
    """The hooks that overlap ZeRO's step with the backward take our model and refuse Gloo themselves, as in torch."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
        with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP"):
            wrap(allreduce_hook, model, optimizer)


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_zero_overlapping_the_backward(rank: int, size: int, static: bool) -> None:
    """It begins to step in the iteration in which it does with torch's class, which programs prepend dummy inputs for:
    with a static graph the buckets are final one forward later."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp_lab.comm.register()
    group = dist.new_group(backend="shm")  # torch refuses Gloo

    def train(wrap: Any) -> Any:
        model = wrap(mlp(), process_group=group, static_graph=static)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.1
        )
        model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
        rebuilt, states = [], []
        for step in range(5):
            optimizer.zero_grad()
            model(samples(rank, step)).square().mean().backward()
            rebuilt.append(model._has_rebuilt_buckets)
            states.append({name: value.detach().clone() for name, value in model.module.named_parameters()})
        return rebuilt, states

    rebuilt, _ = same_as_torch(train)
    assert rebuilt == ([False, False, True, True, True] if static else [False, True, True, True, True])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(2)
def test_autocast_and_grad_scaler(rank: int, size: int, inside: bool) -> None:
    """bfloat16 autocast around or inside the model, with loss scaling: same weights and same scales as with torch's."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    def train(wrap: Any) -> Any:
        model = wrap(Inside() if inside else mlp(), bucket_cap_mb=SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                output = model(samples(rank, step))
                assert output.dtype == torch.bfloat16
                loss = output.float().square().mean()
            if step == 2 and rank == 0:
                loss = loss * float("inf")  # on one rank: all skip this step, because the average is infinite
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append((state_of(model) if step != 2 else None, norm if step != 2 else None, scaler.get_scale()))
        return seen

    seen = same_as_torch(train)
    scales = [scale for _, _, scale in seen]
    assert scales[1] > scales[0]
    assert scales[2] < scales[1]
