"""Errors of training: torch's class and first sentence, names, ranks and the remedy; the model is usable after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddp_lab import DistributedDataParallel
from ddp_lab import DistributedDataParallel as Ours
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import Branches, assert_trains, batch, error_of

UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


def _model(module: nn.Module, **arguments: Any) -> Any:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return DistributedDataParallel(module, **arguments)


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_missing_gradients_are_named(rank: int, size: int) -> None:
    """Next forward, plain: parameters that got no gradient, by name and index, the rank, and what to do."""
    model = _model(Branches())
    model(batch(rank), 2).sum().backward()
    text = error_of(lambda: model(batch(rank)))
    assert_trains(model, rank)
    assert text.startswith(UNFINISHED)
    assert f"did not receive grad for rank {rank}: third.weight, third.bias" in text
    for words in (
        "4 5",
        "2 of 6 parameters got no gradient in step 0",
        "find_unused_parameters=True",
        f"on rank {rank}",
    ):
        assert words in text
    assert "first" not in text


@pytest.mark.parametrize(("culprit", "steps_before"), [(0, 0), (1, 1), (0, 3)])
@on_ranks(2)
def test_unused_on_one_rank_is_the_same_error_on_every_rank(
    rank: int, size: int, culprit: int, steps_before: int
) -> None:
    """Better than torch, whose other ranks see "connection closed": each rank raises the same text, naming the rank."""
    model = _model(Branches())
    for step in range(steps_before):
        model(batch(rank, step)).sum().backward()
    text = error_of(lambda: [model(batch(rank, step), 2 if rank == culprit else 3).sum().backward() for step in (7, 8)])
    assert_trains(model, rank)
    assert everywhere(text) == [text] * 2
    assert text.startswith(UNFINISHED)
    assert f"rank {culprit}: third.weight, third.bias" in text
    assert f"rank {1 - culprit}:" not in text


class _TwiceCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.body(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=True) if times > 1 else self.shared(x)
        return x


def _reentrant_twice(cls: type, rank: int, **arguments: Any) -> str:
    model = cls(_TwiceCheckpointed(), **arguments)
    text = error_of(lambda: model(batch(rank), 2).sum().backward())
    if cls is Ours:
        assert_trains(model, rank)
    return text


def _found_unused_and_used(cls: type, rank: int) -> str:
    model = cls(Branches(), find_unused_parameters=True)
    return error_of(lambda: (model(batch(rank), 2).sum() + model.module.third(batch(rank)).sum()).backward())


MARKED_TWICE: dict[str, Callable[[type, int], str]] = {
    "reentrant": _reentrant_twice,
    "reentrant, unused are searched": lambda cls, rank: _reentrant_twice(cls, rank, find_unused_parameters=True),
    "reentrant, views": lambda cls, rank: _reentrant_twice(cls, rank, gradient_as_bucket_view=True),
    "found unused": _found_unused_and_used,
}


@pytest.mark.parametrize("case", MARKED_TWICE)
@on_ranks(2)
def test_marked_twice_in_torchs_words(rank: int, size: int, case: str) -> None:
    """A gradient that is complete twice in one backward: torch's first sentence, its line with the parameter's index
    and name, at each debug level, and the remedy."""
    before = dist.get_debug_level()
    for level in ("OFF", "INFO", "DETAIL"):
        dist.set_debug_level(getattr(dist.DebugLevel, level))
        try:
            torchs, ours = (MARKED_TWICE[case](cls, rank) for cls in (TorchDDP, Ours))
        finally:
            dist.set_debug_level(before)
        assert ours.startswith("Expected to mark a variable ready only once.")
        lines = [line for text in (torchs, ours) for line in text.splitlines() if line.startswith("Parameter at index")]
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert "has been marked as ready twice" in lines[1]
        assert " with name " in lines[1]
        if case == "reentrant":
            assert "static_graph=True" in ours
            assert "checkpoint" in ours


@on_ranks(2)
def test_static_graph_lost_a_parameter(rank: int, size: int) -> None:
    """static_graph: a parameter that was used in the first step and now is not is named at the next forward."""
    model = _model(Branches(), static_graph=True)
    model(batch(rank)).sum().backward()
    model(batch(rank, 1), 2).sum().backward()
    text = error_of(lambda: model(batch(rank, 2)))
    assert_trains(model, rank)
    assert text.startswith(UNFINISHED)
    assert "your training graph has changed in this iteration" in text
    assert f"rank {rank}: third.weight, third.bias" in text


@on_ranks(2)
def test_gradient_of_another_dtype_is_named(rank: int, size: int) -> None:
    """A gradient whose dtype is not the one the model was wrapped with: both dtypes and the parameter."""
    model = _model(Branches())
    assert_trains(model, rank)
    weight = model.module.second.weight
    model.zero_grad()
    weight.grad_dtype = torch.float64
    handle = weight.register_hook(torch.Tensor.double)
    text = error_of(lambda: model(batch(rank)).sum().backward())
    handle.remove()
    model.zero_grad()
    weight.grad_dtype = torch.float32
    assert_trains(model, rank)
    assert text.startswith("Expected Float on cpu, got Double on cpu")
    assert "second.weight" in text
