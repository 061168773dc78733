"""Comm hooks of torch's that need NCCL: bfloat16, quantization, and PowerSGD over several buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from tests.gpu.ranks import NEEDS_NCCL, on_ranks

pytestmark = NEEDS_NCCL


def _power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "bf16": (lambda: None, default_hooks.bf16_compress_hook),
    "bf16 wrapper": (lambda: None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "quantized per tensor": (lambda: None, quantization_hooks.quantization_pertensor_hook),
    "quantized per channel": (lambda: None, quantization_hooks.quantization_perchannel_hook),
    "powersgd": (_power, powerSGD_hook.powerSGD_hook),
}


# Its callbacks read memory on streams that the allocator does not know: on torch's own reducer, too, with two ranks on
# one GPU, a fourth of the gradients differ from run to run.
RACES = "quantized per channel"


def _gradients(model: nn.Module, rank: int, steps: int) -> list[torch.Tensor]:
    seen = []
    torch.manual_seed(3)  # PowerSGD draws random numbers
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters()]
    return seen


def _on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    for name, (state, hook) in HOOKS.items():
        if name == RACES and size > 1:
            continue
        for as_view in (False, True):
            seen = []
            for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
                model = wrap(copy.deepcopy(net), device_ids=[0], bucket_cap_mb=0.003, gradient_as_bucket_view=as_view)
                model.register_comm_hook(state(), hook)
                seen.append(_gradients(model, rank, 5))
            assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), f"{name}, view {as_view}"


@pytest.mark.parametrize("size", [1, 2])
def test_torchs_hooks_on_nccl(size: int) -> None:
    """Torch's hooks give on our reducer, bit by bit, the gradients that they give on torch's."""
    on_ranks(size, _on_rank, size)
