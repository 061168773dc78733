"""no_sync and sync_gradients: which backward averages, and what is said about a context in the wrong place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks


class Two(nn.Module):
    """Two layers of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1, bias=False)
        self.b = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in use)


def _x(rank: int) -> torch.Tensor:
    return torch.full((1, 2), 1.0 + rank)


def _mean(size: int) -> float:
    return (size + 1) / 2


@on_ranks(2)
def test_around_the_backward_only(rank: int, size: int) -> None:
    """no_sync around the backward alone does not stop it from averaging, as in torch; a warning says so. Around the
    forward, too, it leaves a rank's own gradients, and an exception ends it."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    loss = model(_x(rank)).sum()
    with pytest.warns(UserWarning, match=r"backward ran inside no_sync\(\), but its forward did not"), model.no_sync():
        loss.backward()
    assert model.module.weight.grad.unique().tolist() == [_mean(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        with model.no_sync():
            model(_x(rank)).sum().backward()
        with model.no_sync(), model.no_sync():
            model(_x(rank)).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [2.0 * (1 + rank)]
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        model(_x(rank)).sum().backward()
    assert model.module.weight.grad.unique().tolist() == [3 * _mean(size)]


MODES: list[dict[str, Any]] = [
    *({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}),
    {"bucket_cap_mb": 1e-6},
]


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("given", MODES, ids=str)
@on_ranks(2)
def test_sync_gradients(rank: int, size: int, given: dict[str, Any], steps_before: int) -> None:
    """sync_gradients averages what accumulated under no_sync without another backward (which torch needs), counts as a
    step, leaves unused parameters alone, and training goes on."""
    model = DistributedDataParallel(Two(), **given)
    for _ in range(steps_before):
        model(_x(rank)).sum().backward()
    model.zero_grad()
    steps = model.reducer.step()
    with model.no_sync():
        for _ in range(3):
            model(_x(rank), "a").sum().backward()
    assert model.module.a.weight.grad.unique().tolist() == [3.0 * (1 + rank)]
    model.sync_gradients()
    assert model.reducer.step() == steps + 1
    assert model.module.a.weight.grad.unique().tolist() == [3 * _mean(size)]
    assert model.module.b.weight.grad is None
    model.zero_grad()
    model(_x(rank)).sum().backward()
    assert model.module.b.weight.grad.unique().tolist() == [_mean(size)]


@on_ranks(2)
def test_gradients_of_one_rank_alone(rank: int, size: int) -> None:
    """A parameter that accumulated a gradient on one rank alone gets the average on both."""
    model = DistributedDataParallel(Two())
    with model.no_sync():
        model(_x(rank), "a" if rank == 0 else "b").sum().backward()
    model.sync_gradients()
    assert model.module.a.weight.grad.unique().tolist() == [1 / size]
    assert model.module.b.weight.grad.unique().tolist() == [(1 + rank) / size if rank else 2 / size]


@on_ranks(2)
def test_inside_a_backward(rank: int, size: int) -> None:
    """sync_gradients during a backward raises RuntimeError, and that backward still ends."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    errors: list[str] = []

    def call(grad: torch.Tensor) -> None:
        try:
            model.sync_gradients()
        except RuntimeError as error:
            errors.append(str(error))

    out = model(_x(rank))
    model.module.bias.register_post_accumulate_grad_hook(call)
    out.sum().backward()
    assert len(errors) == 1
    dist.barrier()
