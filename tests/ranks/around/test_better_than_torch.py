"""Where torch's class silently stops averaging, or fails without saying why: ours averages, or says what is wrong.

What torch 2.13 does in each case is said in the test's first line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import (
    Branches,
    assert_gradients,
    assert_trains,
    batch,
    expected_gradients,
)

MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-4},
]


def _model(module: nn.Module | None = None, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return DistributedDataParallel(Branches() if module is None else module, **arguments)


def _loss(model: Any, rank: int, step: int = 0, **arguments: Any) -> torch.Tensor:
    return model(batch(rank, step), **arguments).square().sum()


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
@on_ranks(2)
def test_two_forwards_then_two_backwards(rank: int, size: int, mode: dict[str, Any], steps_before: int) -> None:
    """Torch does not average the second backward. Ours averages both."""
    model = _model(**mode)
    if steps_before:
        assert_trains(model, rank, steps_before)
    for step in range(3):
        expected = expected_gradients(
            model.module, lambda module, step=step: _loss(module, rank, step) + _loss(module, rank, step + 10)
        )
        model.zero_grad()
        losses = [_loss(model, rank, step), _loss(model, rank, step + 10)]
        for loss in losses:
            loss.backward()
        assert_gradients(model, expected)


@pytest.mark.parametrize("mode", MODES, ids=str)
@on_ranks(2)
def test_backward_twice_through_one_graph(rank: int, size: int, mode: dict[str, Any]) -> None:
    """Torch does not average the second backward. Ours averages both."""
    model = _model(**mode)
    for step in range(3):
        expected = expected_gradients(model.module, lambda module, step=step: 2 * _loss(module, rank, step))
        model.zero_grad()
        loss = _loss(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_gradients(model, expected)


@on_ranks(2)
def test_static_graph_that_begins_with_no_sync(rank: int, size: int) -> None:
    """Torch fails an internal assertion. Ours averages."""
    model = _model(static_graph=True)
    for step in range(3):
        expected = expected_gradients(
            model.module, lambda module, step=step: _loss(module, rank, step) + _loss(module, rank, step + 10)
        )
        model.zero_grad()
        with model.no_sync():
            _loss(model, rank, step).backward()
        _loss(model, rank, step + 10).backward()
        assert_gradients(model, expected)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = torch.tanh(self.body(x))
        return self.used(body), self.spare(body)


@on_ranks(2)
def test_static_graph_with_an_output_that_is_not_used(rank: int, size: int) -> None:
    """Torch raises, although the graph is static. Ours averages, and leaves the unused head without gradients."""
    assert_trains(_model(_TwoHeads(), static_graph=True), rank, 4, lambda module, x: module(x)[0].square().sum())


class _Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class _Record:
    value: torch.Tensor


class _Registered(_Plain):
    pass


torch.utils._pytree.register_pytree_node(
    _Registered, lambda output: ([output.value], None), lambda values, _: _Registered(values[0])
)


class _Wrapping(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.branches = Branches()

    def forward(self, x: torch.Tensor, depth: int = 2) -> Any:
        return self.kind(self.branches(x, depth))


@pytest.mark.parametrize("kind", [_Plain, _Record, _Registered])
@on_ranks(2)
def test_output_in_an_object_of_ones_own(rank: int, size: int, kind: type) -> None:
    """Torch raises a misleading "mark a variable ready only once". Ours averages."""
    model = _model(_Wrapping(kind), find_unused_parameters=True)
    assert_trains(model, rank, 4, lambda module, x: module(x).value.square().sum())


def _average(state: object, anything: Any) -> Any:
    buffer = anything.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


@on_ranks(2)
def test_hook_with_another_name_for_its_bucket(rank: int, size: int) -> None:
    """Torch raises KeyError: 'bucket'. Ours takes the second argument, whatever its name."""
    model = _model()
    model.register_comm_hook(None, _average)
    assert_trains(model, rank)


@pytest.mark.parametrize("mode", [{}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_buckets_as_a_hook_sees_them(rank: int, size: int, mode: dict[str, Any]) -> None:
    """Torch shows index 0 and is_last False for all in a static graph's first step. Ours counts them right."""
    model = _model(bucket_cap_mb=1e-4, **mode)
    steps: list[list[tuple[int, bool, int]]] = []

    def hook(state: object, bucket: dist.GradBucket) -> Any:
        steps[-1].append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        return _average(state, bucket)

    model.register_comm_hook(None, hook)
    for step in range(3):
        steps.append([])
        _loss(model, rank, step).backward()
    for buckets in steps:
        assert [index for index, _, _ in buckets] == list(range(len(buckets)))
        assert [last for _, last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
        assert sum(parameters for _, _, parameters in buckets) == 6
