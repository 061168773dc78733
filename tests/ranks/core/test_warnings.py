"""Warnings: when torch warns, ours does, once and with names; where torch is silent about a mistake, ours warns too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import Branches, assert_trains, batch, warned
from tests.ranks.wrapping import FORWARD_SYNC


def _model(module: nn.Module | None = None, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return DistributedDataParallel(Branches() if module is None else module, **arguments)


def _step(model: Any, rank: int, **arguments: Any) -> None:
    model(batch(rank)).square().sum().backward(**arguments)


@on_ranks(2)
def test_right_use_is_silent(rank: int, size: int) -> None:
    """A model built and trained as it should be warns of nothing."""
    for arguments in [{}, {"forward_sync_buffers": False}] if FORWARD_SYNC else [{}]:
        assert warned(lambda arguments=arguments: _step(_model(**arguments), rank)) == []


@on_ranks(2)
def test_unnecessary_find_unused_parameters(rank: int, size: int) -> None:
    """find_unused_parameters=True without any unused parameter: said once."""
    model = _model(find_unused_parameters=True)
    texts = warned(lambda: [_step(model, rank) for _ in range(4)])
    assert len(texts) == 1
    assert texts[0].startswith("find_unused_parameters=True was specified in DDP constructor, but did not find any")


@on_ranks(2)
def test_necessary_find_unused_parameters(rank: int, size: int) -> None:
    """find_unused_parameters=True with unused parameters: no warning."""
    model = _model(find_unused_parameters=True)
    assert warned(lambda: [model(batch(rank), 2).sum().backward() for _ in range(3)]) == []


class _Transposed(nn.Module):
    """Its gradient has other strides than its weight."""

    class _Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, (grads[0].t() @ ctx.saved_tensors[0]).t()

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._Apply.apply(x, self.odd)


@on_ranks(2)
def test_strides_of_a_gradient(rank: int, size: int) -> None:
    """A gradient laid out otherwise than its bucket: said once, with the parameter's name and both strides."""
    model = _model(_Transposed())

    def steps() -> None:
        for _ in range(3):
            model.zero_grad()
            model.module.odd.grad = torch.zeros(3, 4).t()
            _step(model, rank)

    texts = [text for text in warned(steps) if "the gradient layout contract" not in text]
    assert len(texts) == 1
    assert texts[0].startswith("Grad strides do not match bucket view strides.")
    assert "'odd'" in texts[0]
    assert "[1, 4]" in texts[0]
    assert "[3, 1]" in texts[0]


@on_ranks(2)
def test_create_graph(rank: int, size: int) -> None:
    """create_graph=True: higher-order gradients are not averaged, which is said, and not in every step."""
    model = _model()

    def steps() -> None:
        for _ in range(3):
            model.zero_grad()
            _step(model, rank, create_graph=True)

    texts = [text for text in warned(steps) if "DistributedDataParallel" in text]
    assert len(texts) == 1
    assert texts[0].startswith("Using DistributedDataParallel with create_graph=True")


@on_ranks(2)
def test_a_warning_that_is_an_error_hides_no_other(rank: int, size: int) -> None:
    """Of two that one backward finds, the second is raised by the next; the averages are there after each."""
    model = _model(_Transposed())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Grad strides|Using DistributedDataParallel")
        warnings.filterwarnings("ignore", message="Using backward|grad and param")
        for words in ("Grad strides", "Using DistributedDataParallel"):
            model.zero_grad()
            model.module.odd.grad = torch.zeros(3, 4).t()
            with pytest.raises(UserWarning, match=words):
                _step(model, rank, create_graph=True)
            same = model.module.odd.grad.detach().clone()
            dist.all_reduce(same)
            torch.testing.assert_close(same / size, model.module.odd.grad.detach())


class _Fails(nn.Module):
    """Its backward fails between its two layers, as long as it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.fails:
            hidden.register_hook(self._fail)
        return self.second(hidden)

    @staticmethod
    def _fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("planted")


@on_ranks(2)
def test_a_warning_of_a_backward_that_fails(rank: int, size: int) -> None:
    """The next one that finds the same says it; no backward of another model does."""
    model, other = _model(_Fails()), _model()

    def step() -> list[str]:
        texts = warned(lambda: model(torch.ones(2, 4)).square().sum().backward(create_graph=True))
        return [text for text in texts if text.startswith("Using DistributedDataParallel")]

    with pytest.raises(ArithmeticError, match="planted"):
        step()
    assert warned(lambda: _step(other, rank)) == []
    model.module.fails = False
    assert len(step()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"static_graph": True}, "You've set static_graph to be True, no need to set it again."),
        ({"find_unused_parameters": True}, "You passed find_unused_parameters=true to DistributedDataParallel,"),
    ],
)
@on_ranks(2)
def test_static_graph_again(rank: int, size: int, arguments: dict[str, Any], words: str) -> None:
    """static_graph set twice, or beside find_unused_parameters: torch's first sentence."""
    model = _model(**arguments)
    texts = warned(model._set_static_graph)
    assert len(texts) == 1
    assert texts[0].startswith(words)


@on_ranks(2)
def test_autograd_grad(rank: int, size: int) -> None:
    """torch.autograd.grad on the model's parameters is not averaged: said once, naming the parameter."""
    model = _model()
    weight = model.module.second.weight
    texts = warned(lambda: [torch.autograd.grad(model(batch(rank)).sum(), [weight]) for _ in range(2)])
    assert_trains(model, rank)
    assert len(texts) == 1
    assert "autograd.grad" in texts[0]
    assert "second.weight" in texts[0]
