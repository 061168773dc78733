"""delay_all_reduce_named_params with param_to_hook_all_reduce: averaged together, late, in a buffer of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks


class Net(nn.Module):
    """Delayed layers are used last, so their gradients come first; `trigger`'s comes at the end."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trigger = nn.Linear(3, 3)
        self.body = nn.Linear(3, 3)
        self.late = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.body(self.trigger(x)).to(self.late.weight.dtype))


def _reference(size: int, dtype: torch.dtype, steps: Sequence[int]) -> list[torch.Tensor]:
    """Gradients of one process that sees every rank's batches."""
    net = Net(dtype)
    for step in steps:
        for rank in range(size):
            (net(_batch(rank, step)).square().sum() / size).backward()
    return [parameter.grad for parameter in net.parameters()]


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_delayed_parameters_are_averaged(rank: int, size: int, dtype: torch.dtype) -> None:
    """Delayed parameters, of whatever dtype, get the average in views of one buffer, whether gradients are dropped or
    zeroed between steps, and are in no bucket."""
    net = Net(dtype)
    chosen = [(name, net.get_parameter(name)) for name in ("late.weight", "late.bias")]
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=chosen, param_to_hook_all_reduce=net.trigger.weight
    )
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(_batch(rank, step)).square().sum().backward()
        for parameter, expected in zip(net.parameters(), _reference(size, dtype, [step]), strict=True):
            torch.testing.assert_close(parameter.grad, expected)
    assert not any("late" in name for bucket in model.buckets() for name in bucket.parameters)
    assert net.late.weight.grad.untyped_storage().data_ptr() == net.late.bias.grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@on_ranks(2)
def test_the_trigger_may_be_delayed_itself(rank: int, size: int, every: bool, twice: bool) -> None:
    """Better than torch, which leaves its gradient un-averaged: `param_to_hook_all_reduce` among those delayed."""

    class Reused(Net):
        """Its trigger is used twice in each forward."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.trigger(x)) if twice else super().forward(x)

    def reference(steps: Sequence[int]) -> list[torch.Tensor]:
        net = Reused(torch.float32)
        for step in steps:
            for other in range(size):
                (net(_batch(other, step)).square().sum() / size).backward()
        return [parameter.grad for parameter in net.parameters()]

    net = Reused(torch.float32)
    # the engine hands out the bias's gradient before the weight's
    names = [name for name, _ in net.named_parameters()] if every else ["trigger.weight", "late.bias"]
    model = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[(name, net.get_parameter(name)) for name in names],
        param_to_hook_all_reduce=net.trigger.weight,
    )
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(_batch(rank, step)).square().sum().backward()
        for parameter, expected in zip(net.parameters(), reference([step]), strict=True):
            torch.testing.assert_close(parameter.grad, expected)
    model.zero_grad()
    local = copy.deepcopy(net)
    local(_batch(rank, 0)).square().sum().backward()
    with model.no_sync():
        model(_batch(rank, 0)).square().sum().backward()
    for parameter, own in zip(net.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, own.grad)
    model(_batch(rank, 1)).square().sum().backward()
    for parameter, expected in zip(net.parameters(), reference([0, 1]), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@on_ranks(2)
def test_a_gradient_after_the_triggers_is_an_error(rank: int, size: int) -> None:
    """The average has begun without it. Under no_sync there is none, so any order will do."""
    net = Net(torch.float32)
    names = ["trigger.weight", "late.weight"]
    model = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[(name, net.get_parameter(name)) for name in names],
        param_to_hook_all_reduce=net.late.weight,
    )
    with pytest.raises(RuntimeError, match=r"'trigger.weight' arrived after that of param_to_hook_all_reduce"):
        model(_batch(rank, 0)).sum().backward()
    model.zero_grad()
    for step in range(2):
        with model.no_sync():
            model(_batch(rank, step)).sum().backward()


@on_ranks(2)
def test_all_parameters_delayed(rank: int, size: int) -> None:
    """If every trained parameter is delayed there is no reducer, and forward, no_sync and backward work."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=list(net.named_parameters()), param_to_hook_all_reduce=net[0].weight
    )
    assert not hasattr(model, "reducer")  # nothing for it to do
    x = torch.full((1, 3), float(rank))
    with model.no_sync():
        model(x).sum().backward()
    assert net[1].weight.grad is not None
    model.zero_grad()
    model(x).sum().backward()
    assert net[1].weight.grad.shape == (3, 3)
