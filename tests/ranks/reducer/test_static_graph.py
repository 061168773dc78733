"""static_graph: the first backward teaches what the others wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same_on_all_ranks, same_as_torch, samples
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import Branches, batch, error_of

CAP = 2e-4  # MiB


class Repeated(nn.Module):
    """One layer in three reentrant checkpoints, so that its gradient arrives three times; another is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 6)
        self.block = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def _train(wrap: type, rank: int, arguments: dict[str, Any]) -> list[Any]:
    model = wrap(Repeated(), static_graph=True, bucket_cap_mb=CAP, **arguments)
    seen = []
    for step in range(5):
        if step != 3:
            model.zero_grad()
        model(samples(rank, step)).square().sum().backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")
@on_ranks(2)
def test_gradients_that_arrive_several_times(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """A layer shared by reentrant checkpoints, and an unused one: gradients are torch's in each step."""
    same_as_torch(lambda wrap: _train(wrap, rank, arguments), exact=size == 2)


@on_ranks(2)
def test_later_backwards_overlap(rank: int, size: int) -> None:
    """From the second backward on buckets are launched before the backward's own computation is over."""
    model = DistributedDataParallel(Repeated(), static_graph=True, bucket_cap_mb=CAP)
    early = []
    for step in range(4):
        model(samples(rank, step)).square().sum().backward()
        times = model.reducer.report()
        early.append(times["communication_begin"] < times["backward_compute_end"])
    answers = [len(model.buckets()) > 1, *early[2:]]
    assert all(answers)


@on_ranks(2)
def test_second_backward_of_a_static_graph(rank: int, size: int) -> None:
    """Two forwards and two backwards with one static graph: each backward leaves the same gradients on all ranks."""
    model = DistributedDataParallel(Repeated(), static_graph=True, bucket_cap_mb=CAP)
    for step in range(3):
        model.zero_grad()
        losses = [model(samples(rank, 10 * step + i)).square().sum() for i in range(2)]
        for loss in losses:
            loss.backward()
            used = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
            assert len(used) == 4
            assert_same_on_all_ranks(used)


@on_ranks(2)
def test_graph_that_changes_is_refused(rank: int, size: int) -> None:
    """A parameter that was unused at first and then used: an error that names it, once more at the next forward."""
    model = DistributedDataParallel(Branches(), static_graph=True)
    model(batch(rank, 0), 1).sum().backward()
    gained = error_of(lambda: model(batch(rank, 1), 2).sum().backward())
    unfinished = error_of(lambda: model(batch(rank, 2), 1))
    assert unfinished in model.reducer.report()["error"]
    model.zero_grad()
    model(batch(rank, 3), 1).sum().backward()
    assert_same_on_all_ranks({"first": model.module.first.weight.grad})
    assert gained.startswith("Your training graph has changed in this iteration")
    assert "'second." in gained
    assert unfinished.startswith("Expected to have finished reduction in the prior iteration")
