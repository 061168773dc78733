"""Small models and steps for tests of what goes wrong: each knows its right gradients without any DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Branches", "assert_trains", "batch", "error_of", "expected_gradients", "warned"]

Step = Callable[[Any], torch.Tensor]
_TORCHS = ("Using backward() with create_graph=True", "grad and param do not obey the gradient layout contract")


class Branches(nn.Module):
    """``first``, then as many of ``second`` and ``third`` as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        for layer in (self.first, self.second, self.third)[:depth]:
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """Three samples of four features, the same wherever they are asked for."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def error_of(action: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> str:
    """The text of the exception that the action raises; AssertionError if it raises none, or another kind."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def warned(action: Callable[[], Any]) -> list[str]:
    """The texts of the warnings that the action gives; ours stand at a line of the tests."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    own = [warning for warning in caught if not str(warning.message).startswith(_TORCHS)]
    assert [warning for warning in own if "tests" not in Path(warning.filename).parts] == []
    return [str(warning.message) for warning in caught]


def expected_gradients(module: nn.Module, step: Step) -> list[torch.Tensor | None]:
    """The average over the ranks of the gradients of ``step(copy of the module)``; None where no rank has one."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    step(alone).backward()
    averages: list[torch.Tensor | None] = []
    for parameter in alone.parameters():
        have = torch.tensor(float(parameter.grad is not None))
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(have)
        dist.all_reduce(gradient)
        averages.append(gradient / dist.get_world_size() if have else None)
    return averages


def assert_gradients(model: Any, expected: list[torch.Tensor | None]) -> None:
    """The model's gradients are these, up to the rounding of sums in another order."""
    for (name, parameter), right in zip(model.module.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) == (right is None), name
        if right is not None:
            torch.testing.assert_close(parameter.grad, right, msg=lambda text, name=name: f"{name}: {text}")


def assert_trains(model: Any, rank: int, steps: int = 3, step: Callable[..., torch.Tensor] | None = None) -> None:
    """From here on each step gives the average gradients: the model is as good as new."""
    for number in range(steps):
        x = batch(rank, 50 + number)

        def loss(module: Any, x: torch.Tensor = x) -> torch.Tensor:
            return module(x).square().sum() if step is None else step(module, x)

        expected = expected_gradients(model.module, loss)
        model.zero_grad()
        loss(model).backward()
        assert_gradients(model, expected)
