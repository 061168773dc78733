"""Ours beside torch's class on the same ranks: the same program, run with each, must leave the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel

__all__ = [
    "assert_same",
    "assert_same_on_all_ranks",
    "everywhere",
    "gradients_of",
    "mlp",
    "same_as_torch",
    "samples",
    "state_of",
]


def mlp() -> nn.Module:
    """Three layers of several buckets if caps are small; equal at each call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def samples(rank: int, step: int, rows: int = 6, columns: int = 10) -> torch.Tensor:
    """What one rank is fed in one step, equal in every process that asks."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * step + rank))


def same_as_torch(program: Callable[[type], Any], *, exact: bool = True) -> Any:
    """Runs ``program(wrapper class)`` with torch's class and with ours and compares what they return.

    Returns:
        What it returned with ours.
    """
    theirs = program(TorchDDP)
    ours = program(DistributedDataParallel)
    assert_same(ours, theirs, exact=exact)
    return ours


def assert_same(ours: Any, theirs: Any, where: str = "", *, exact: bool = True) -> None:
    """Compares trees of dicts, sequences, tensors and plain values; `exact`: bit by bit."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        assert ours.dtype == theirs.dtype, where
        equal = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        assert equal, f"{where}: {ours} instead of {theirs}"
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), f"{where}: {list(ours)} instead of {list(theirs)}"
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]", exact=exact)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{index}]", exact=exact)
    else:
        assert ours == theirs, where


def assert_same_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    """Compares each tensor with rank 0's."""
    for name, tensor in tensors.items():
        reference = tensor.detach().clone().contiguous()
        dist.broadcast(reference, 0)
        assert torch.equal(reference, tensor), f"{name} differs from rank 0's"


def everywhere(value: Any) -> list[Any]:
    """What each rank of the default group has here, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients of all parameters."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters, buffers and gradients of a wrapped model."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | gradients
