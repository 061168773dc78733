"""Training of one model by our class and by torch's, and the comparison of what it left behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.models import MODELS, batch_of, loss_of

__all__ = ["Variant", "assert_equal", "pair", "train"]

STEPS = 4


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    bucket_cap_mb: float | None = None
    as_view: bool = False
    set_to_none: bool = True
    accumulate: int = 1
    zero: bool = True


def _snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.module.named_parameters()}
    return grads | {f"buffer {name}": b.clone() for name, b in model.module.named_buffers()}


def train(model: torch.nn.Module, name: str, rank: int, variant: Variant) -> list[dict[str, torch.Tensor | None]]:
    """Gradients and buffers after each of the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(STEPS):
        if variant.zero:
            optimizer.zero_grad(set_to_none=variant.set_to_none)
        for part in range(variant.accumulate):
            last = part == variant.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model(batch_of(MODELS[name], rank, 10 * step + part))).backward()
        seen.append(_snapshot(model))
        optimizer.step()
    return seen


def assert_equal(ours: list[Any], torchs: list[Any], what: str) -> None:
    """What `train` returned is the same bit by bit, and has the same strides."""
    for step, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            other = theirs[name]
            assert (gradient is None) == (other is None), f"{what}, step {step}: {name}"
            if gradient is not None:
                assert gradient.stride() == other.stride(), f"{what}, step {step}: strides of {name}"
                assert torch.equal(gradient, other), f"{what}, step {step}: {name} differs"


def pair(name: str, register: Callable[[Any, int], None] | None = None, **arguments: Any) -> tuple[Any, Any]:
    """The model of that name in our class and in torch's; `register(model, index)` is called with both."""
    torch.manual_seed(7)
    module = MODELS[name].build()
    both = (DistributedDataParallel(copy.deepcopy(module), **arguments), TorchDDP(copy.deepcopy(module), **arguments))
    for index, model in enumerate(both):
        if register is not None:
            register(model, index)
    return both
