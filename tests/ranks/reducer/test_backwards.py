"""Which backward is synchronised, and where it ends: autograd.grad, inputs=, windows, nested and failed backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same_on_all_ranks, mlp, samples
from tests.ranks.harness import on_ranks

MODES: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]


def _wrapped(module: nn.Module | None = None, **arguments: Any) -> Any:
    return DistributedDataParallel(module or mlp(), bucket_cap_mb=2e-4, **arguments)


def _assert_average(model: nn.Module, local: nn.Module, size: int) -> None:
    for mine, other in zip(model.parameters(), local.parameters(), strict=True):
        assert other.grad is not None
        dist.all_reduce(other.grad)
        torch.testing.assert_close(mine.grad, other.grad / size)


def _assert_trains(model: nn.Module, local: nn.Module, rank: int, size: int, steps: int = 2) -> None:
    """Each step has the average of the gradients that the module alone has."""
    for step in range(steps):
        for net in (model, local):
            net.zero_grad()
            net(samples(rank, step)).square().sum().backward()
        _assert_average(model, local, size)


def _fail(_: Any) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_backward_through_outputs_of_both_kinds(rank: int, size: int) -> None:
    """A second backward that passes outputs of forwards inside and outside no_sync is synchronised as a whole."""
    model, local = _wrapped(), mlp()
    for step in range(3):
        model.zero_grad()
        local.zero_grad()
        with model.no_sync():
            first = model(samples(rank, step)).square().sum()
        second = model(samples(rank, step + 50)).square().sum()
        second.backward(retain_graph=True)
        (first + second).backward()  # through an output of either kind: synchronised
        for factor, data in ((1, step), (2, step + 50)):
            (factor * local(samples(rank, data)).square().sum()).backward()
        _assert_average(model, local, size)


@on_ranks(2)
def test_second_backward_inside_no_sync_stays_local(rank: int, size: int) -> None:
    """Inside no_sync a second backward through a retained graph only accumulates, as the user has asked for it."""
    model = _wrapped()
    loss = model(samples(rank, 0)).square().sum()
    loss.backward(retain_graph=True)
    averaged = [p.grad.clone() for p in model.parameters()]
    with model.no_sync():
        loss.backward()
    local = mlp()
    local(samples(rank, 0)).square().sum().backward()
    for mine, before, own in zip(model.parameters(), averaged, local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, before + own.grad)


class Nested(nn.Module):
    """A reentrant checkpoint between two layers, and one around all parameters that come first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: torch.tanh(self.first(y)), x.requires_grad_(), use_reentrant=True)
        x = checkpoint(lambda y: torch.tanh(self.middle(y)), x, use_reentrant=True)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_nested_backwards(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """Reentrant checkpointing runs backwards inside the backward: the outermost one ends it."""
    model, local = _wrapped(Nested(), **arguments), Nested()
    _assert_trains(model, local, rank, size, 3)
    begin = model.reducer.report()
    assert begin["backward_begin"] <= begin["communication_begin"] <= begin["communication_end"]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@on_ranks(2)
def test_backward_of_some_parameters(rank: int, size: int) -> None:
    """backward(inputs=...) with find_unused_parameters averages these parameters and leaves the others alone."""
    model = _wrapped(find_unused_parameters=True)
    some = [model.module[0].weight, model.module[0].bias]
    model(samples(rank, 0)).square().sum().backward(inputs=some)
    assert model.module[2].weight.grad is None
    assert_same_on_all_ranks({"weight": some[0].grad, "bias": some[1].grad})


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("arguments", [*MODES, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_a_backward_after_one_that_failed(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """A backward that directly follows one that failed halfway says what to do, and the next forward starts clean."""
    model, local = _wrapped(**arguments), mlp()
    loss = model(samples(rank, 0)).square().sum()
    handle = model.module[0].weight.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as caught:
        loss.backward()
    _assert_trains(model, local, rank, size)
    text = str(caught.value)
    assert "was ended by an exception" in text
    assert "Run forward again" in text


@on_ranks(2)
def test_a_backward_that_failed_before_all_gradients_is_retried(rank: int, size: int) -> None:
    """A backward that failed before its first gradient leaves its place to the next one, on one rank or on all."""
    model, local = _wrapped(), mlp()
    for step in range(3):
        model.zero_grad()
        local.zero_grad()
        out = model(samples(rank, step))
        handle = out.grad_fn.register_prehook(_fail)
        if rank == 0 or step == 1:  # on one rank alone, on both
            with pytest.raises(ZeroDivisionError):
                out.square().sum().backward(retain_graph=True)
        handle.remove()
        out.square().sum().backward()
        local(samples(rank, step)).square().sum().backward()
        _assert_average(model, local, size)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True will create a reference cycle")
@pytest.mark.filterwarnings("ignore:Using DistributedDataParallel with create_graph=True")
@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_gradients_that_can_be_differentiated(rank: int, size: int, as_view: bool) -> None:
    """create_graph=True: gradients are averaged and keep their graph, so the mean of a penalty's gradients is exact."""
    alone = mlp().double()
    model = _wrapped(mlp().double(), gradient_as_bucket_view=as_view)

    def penalty(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        net(batch.double()).square().mean().backward(create_graph=True)
        gradients = [p.grad for p in net.parameters()]
        for p in net.parameters():
            p.grad = None
        return sum(gradient.square().sum() for gradient in gradients)

    for step in range(2):
        mine = penalty(model, samples(rank, step))
        whole = penalty(alone, torch.cat([samples(each, step) for each in range(size)]))
        assert torch.allclose(mine, whole)
        whole.backward()
        gradients = torch.autograd.grad(mine, list(model.parameters()))
        for gradient, p in zip(gradients, alone.parameters(), strict=True):
            dist.all_reduce(gradient)
            assert torch.allclose(gradient / size, p.grad)
            p.grad = None
