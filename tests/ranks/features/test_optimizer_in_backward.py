"""Optimizers that step inside the backward: the weights are those of a step after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, mlp, same_as_torch, samples
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets
STEPS = 5


def _backward(model: nn.Module, rank: int, step: int) -> None:
    model(samples(rank, step)).square().mean().backward()


def _after(wrap: Any, rank: int, name: str, **kwargs: Any) -> list[dict[str, torch.Tensor]]:
    """Weights of a model whose optimizer steps after the backward."""
    model = wrap(mlp(), bucket_cap_mb=SMALL)
    optimizer = getattr(torch.optim, name)(model.parameters(), **kwargs)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _backward(model, rank, step)
        optimizer.step()
        seen.append({key: value.clone() for key, value in model.state_dict().items()})
    return seen


@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(2)
def test_some_parameters_and_accumulation(rank: int, size: int, find_unused: bool) -> None:
    """Parameters without such an optimizer keep their gradients, used here or on another rank; no_sync accumulates."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.second, self.sometimes = nn.Linear(10, 8), nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, more: bool) -> torch.Tensor:
            y = self.second(torch.tanh(self.first(x)))
            return self.sometimes(y) if more else y

    def train(early: bool) -> list[dict[str, torch.Tensor]]:
        net = Net()
        if early:
            _apply_optimizer_in_backward(torch.optim.SGD, net.first.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(net, bucket_cap_mb=SMALL, find_unused_parameters=find_unused)
        first = torch.optim.SGD(net.first.parameters(), lr=0.1)
        others = torch.optim.SGD([*net.second.parameters(), *net.sometimes.parameters()], lr=0.1)
        seen = []
        for step in range(STEPS):
            more = rank == 0 or not find_unused
            with model.no_sync():
                model(samples(rank, 50 + step), more=more).square().mean().backward()
            model(samples(rank, step), more=more).square().mean().backward()
            assert (net.first.weight.grad is None) == early
            assert net.second.weight.grad is not None
            assert net.sometimes.weight.grad is not None  # used on rank 0 at least
            first.step()
            others.step()
            model.zero_grad()
            seen.append({key: value.clone() for key, value in net.state_dict().items()})
        return seen

    assert_same(train(True), train(False))


@on_ranks(1)
def test_no_second_hook(rank: int, size: int) -> None:
    """With another comm hook the first forward refuses: communication can't be replaced twice."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="can only be called once"):
        _backward(model, rank, 0)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("name", "kwargs"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.05})])
@on_ranks(2)
def test_register_fused_optim(rank: int, size: int, name: str, kwargs: dict[str, Any], some: bool) -> None:
    """`_register_fused_optim` steps all or the given parameters with each reduced bucket, as torch's class does."""

    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        chosen = list(model.parameters())[:2] if some else None
        model._register_fused_optim(getattr(torch.optim, name), optim_params=chosen, **kwargs)
        seen = []
        for step in range(STEPS):
            model.zero_grad()
            _backward(model, rank, step)
            seen.append({key: value.clone() for key, value in model.state_dict().items()})
        return seen

    seen = same_as_torch(program)
    if not some:
        assert_same(seen, _after(DistributedDataParallel, rank, name, **kwargs), exact=False)
    unchanged = mlp().state_dict()["4.weight"]
    assert torch.equal(seen[-1]["module.4.weight"], unchanged) == some


@on_ranks(1)
def test_optimizers_without_a_functional_form(rank: int, size: int) -> None:
    """An optimizer that can't run per bucket is refused by name."""
    model = DistributedDataParallel(mlp())
    with pytest.raises(ValueError, match="does not have"):
        model._register_fused_optim(torch.optim.LBFGS, lr=0.1)
