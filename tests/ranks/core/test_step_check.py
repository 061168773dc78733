"""Gradients that stay a rank's own are never used in silence; and right programs are never warned."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.full((2, 4), 1.0 + rank + step)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


# ---- gradients that are a rank's own, from a step of a wrapped model and an optimizer


def _call_module(model: Any, x: torch.Tensor) -> None:
    model.module(x).square().sum().backward()


def _functional(model: Any, x: torch.Tensor) -> None:
    torch.func.functional_call(model.module, dict(model.module.named_parameters()), (x,)).square().sum().backward()


def _one_more(model: Any, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    model.module[0](x).square().sum().backward()  # an auxiliary loss


def _swallow(model: Any, x: torch.Tensor) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.module[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(x).square().sum().backward()
    handle.remove()


def _leave_out(model: Any, x: torch.Tensor) -> None:
    model(x)
    out = model.module[2](model.module[1](model.module[0](x)))  # armed by the forward above
    out.square().sum().backward()


def _replace_in_forward(model: Any, x: torch.Tensor) -> None:
    def replace(layer: nn.Linear, inputs: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    handle = model.module[2].register_forward_pre_hook(replace)
    model(x).square().sum().backward()
    handle.remove()


OWN: dict[str, tuple[Callable[[Any, torch.Tensor], None], str]] = {
    "the module is called": (_call_module, r"SGD.step\(\) has used .* not averaged on rank \d.*'0.bias', '0.weight'"),
    "functional_call": (_functional, r"'4.bias' and 1 more arrived in a backward that no forward of the model"),
    "one more backward": (_one_more, r"gradients of '0.bias', '0.weight' arrived in a backward that no forward"),
    "an exception is swallowed": (_swallow, r"step \d has not finished: .*'0.*an exception ended it"),
    "unused parameters": (_leave_out, r"has not finished: no gradient has arrived for '4.bias', '4.weight'"),
    "replaced by the forward": (_replace_in_forward, r"forward of Sequential .* has itself put new .*: '2.weight'\."),
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_step_with_own_gradients_is_warned_of(rank: int, size: int, mode: str) -> None:
    """Once, in each way to get them, at the program's line."""
    for name, (backward, words) in OWN.items():
        if mode == "unused" and backward is _leave_out:  # that is what the option is for
            continue
        model = DistributedDataParallel(_net(), **MODES[mode])
        optimizer = _optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(model, _batch(rank, 2))
            optimizer.step()
            optimizer.step()
        found = [one for one in caught if "averaged" in str(one.message) or "average" in str(one.message)]
        assert found, f"{name}: silent"
        assert re.search(words, str(found[0].message)), f"{name}: {found[0].message}"
        assert found[0].filename == __file__, f"{name}: {found[0].filename}"
        assert sum("SGD.step()" in str(one.message) for one in caught) <= 1, name
        dist.barrier()


@on_ranks(2)
def test_a_backward_without_the_models_parameters(rank: int, size: int) -> None:
    """A forward that computes with a copy: the backward says that it has averaged nothing."""
    net = _net()
    model = DistributedDataParallel(net)
    net.forward = copy.deepcopy(net).forward  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="no parameter of the model got a gradient, so nothing was averaged") as told:
        model(_batch(rank, 0)).sum().backward()
    assert [one.filename for one in told] == [__file__]


@on_ranks(2)
def test_finalize_backward_is_forgotten(rank: int, size: int) -> None:
    """The optimizer steps before the program has ended its backward."""
    model = DistributedDataParallel(_net())
    model.require_manual_backward_finalization = True
    optimizer = _optimizer(model)
    model(_batch(rank, 0)).sum().backward()
    with pytest.warns(UserWarning, match=r"waits for finalize_backward\(\)"):
        optimizer.step()
    model.finalize_backward()


# ---- what a forward does to its own parameters


def _convert_in_forward(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, inputs: module.double() and module.float() and None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", [False, True])
@on_ranks(2)
def test_a_forward_that_converts_the_module(rank: int, size: int, mode: str, part: bool) -> None:
    """Its gradients are averaged, under no_sync too, though each forward gives the parameters new accumulators."""
    net = _net()
    model = DistributedDataParallel(net, **MODES[mode])
    _convert_in_forward(net[2] if part else net)
    optimizer = _optimizer(model)
    for step in range(4):
        if step == 2:
            with model.no_sync():
                model(_batch(rank, step)).square().sum().backward()
        model(_batch(rank, step)).square().sum().backward()
        for parameter in net.parameters():
            assert all(torch.equal(other, parameter.grad) for other in everywhere(parameter.grad)), step
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)


@on_ranks(2)
def test_converted_between_two_forwards_of_a_backward(rank: int, size: int) -> None:
    """The gradients of the earlier graph can't be averaged: an error, not a wrong average."""
    net = _net()
    model = DistributedDataParallel(net)
    first = model(_batch(rank, 0))
    net.double().float()
    with pytest.raises(RuntimeError, match=r"A gradient of '\d.\w+' .* built before the parameter was converted"):
        (first + model(_batch(rank, 1))).sum().backward()


@on_ranks(2)
def test_another_module_is_assigned(rank: int, size: int) -> None:
    """`model.module = ...`: the new module's gradients are averaged; one of the same tensors changes nothing."""
    model = DistributedDataParallel(_net())
    model(_batch(rank, 0)).sum().backward()
    generation = model.reducer.generation()
    model.module = nn.Sequential(*model.module)
    model(_batch(rank, 0)).sum().backward()
    assert model.reducer.generation() <= generation + 1  # of the buckets, which are rebuilt once
    model.module = copy.deepcopy(model.module)
    with pytest.warns(UserWarning, match=r"have changed since it was wrapped .*reassigned: '0.bias'"):
        out = model(_batch(rank, 1))
    model.zero_grad()
    out.square().sum().backward()
    for parameter in model.module.parameters():
        assert all(torch.equal(other, parameter.grad) for other in everywhere(parameter.grad))


# ---- programs that are right


def _accumulate(model: Any, rank: int, step: int) -> None:
    with model.no_sync():
        out = model(_batch(rank, 2 * step))
    out.sum().backward()  # outside, as some trainers do
    model(_batch(rank, 2 * step + 1)).square().sum().backward()


def _local(model: Any, rank: int, step: int) -> None:
    with model.no_sync():
        model(_batch(0, step)).sum().backward()


def _evaluate(model: Any, rank: int, step: int) -> None:
    model(_batch(rank, step)).sum().backward()
    model(_batch(rank, step)).sum().item()  # with gradients, whose backward never comes


def _penalise(model: Any, rank: int, step: int) -> None:
    x = _batch(rank, step).requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + gradient.square().sum()).backward()


def _checkpoint(model: Any, rank: int, step: int) -> None:
    out = checkpoint(model, _batch(rank, step).requires_grad_(), use_reentrant=False)
    out.sum().backward()


def _module_first(model: Any, rank: int, step: int) -> None:
    model.module(_batch(rank, step)).sum().backward()  # accumulation: the next backward averages it all
    model(_batch(rank, step)).square().sum().backward()


def _own_then_dropped(model: Any, rank: int, step: int) -> None:
    model.module(_batch(rank, step)).sum().backward()
    model.zero_grad()


def _frozen(model: Any, rank: int, step: int) -> None:
    model.requires_grad_(False)
    model(_batch(rank, step).requires_grad_()).sum().backward()
    model.requires_grad_(True)
    model(_batch(rank, step)).sum().backward()


def _join(model: Any, rank: int, step: int) -> None:
    with model.join():
        for _ in range(1 + rank):
            model(_batch(rank, step)).sum().backward()


def _retain(model: Any, rank: int, step: int) -> None:
    loss = model(_batch(rank, step)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


RIGHT = (
    *(_accumulate, _local, _evaluate, _penalise, _checkpoint, _module_first, _own_then_dropped, _frozen, _join),
    _retain,
)


@on_ranks(2)
def test_right_programs_are_not_warned(rank: int, size: int) -> None:
    """Accumulation, evaluation, penalties, checkpoints, frozen models, uneven inputs."""
    for mode, options in MODES.items():
        for backward in RIGHT:
            if mode == "static" and backward in (_penalise, _frozen, _retain):  # other graphs in each step
                continue
            model = DistributedDataParallel(_net(), **options)
            optimizer = _optimizer(model)
            for step in range(3):
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*did not find any unused parameters")
                    backward(model, rank, step)
                    optimizer.step()


@on_ranks(2)
def test_several_models_are_not_warned(rank: int, size: int) -> None:
    """A GAN with two optimizers and either way to call its critic; a model unused in the loss; shared parameters."""
    maker, critic = DistributedDataParallel(_net()), DistributedDataParallel(_net())
    optimizers = _optimizer(maker), _optimizer(critic)
    for step in range(3):
        for used in (critic, critic.module):
            optimizers[1].zero_grad()
            made = maker(_batch(rank, step))
            (critic(made.detach()) - critic(_batch(rank, step))).sum().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            used(maker(_batch(rank, step))).sum().backward()
            optimizers[0].step()

    both = torch.optim.SGD([*maker.parameters(), *critic.parameters()], lr=0.01)
    both.zero_grad()
    critic(_batch(rank, 0))
    maker(_batch(rank, 0)).sum().backward()
    both.step()

    net = _net()
    part, whole = DistributedDataParallel(net[0]), DistributedDataParallel(net)
    optimizer = _optimizer(net)
    for model in (whole, part, whole):
        optimizer.zero_grad()
        model(_batch(rank, 0)).sum().backward()
        optimizer.step()
