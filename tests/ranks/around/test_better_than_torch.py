"""Where torch's class silently stops averaging, or fails without saying why: ours averages, or says what is wrong.

What torch 2.13 does in each case is said in the test's first line.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.conftest import Ranks
from tests.ranks.provoking import (
    Branches,
    assert_gradients,
    assert_trains,
    batch,
    error_of,
    expected_gradients,
    warned,
)

MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-4},
]


def _model(module: nn.Module | None = None, **arguments: Any) -> Any:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(3)
    return DistributedDataParallel(Branches() if module is None else module, **arguments)


def _loss(model: Any, rank: int, step: int = 0, **arguments: Any) -> torch.Tensor:
    return model(batch(rank, step), **arguments).square().sum()


def _two_forwards(rank: int, size: int, mode: dict[str, Any], steps_before: int) -> None:
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


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_forwards_then_two_backwards(mode: dict[str, Any], steps_before: int, ranks: Ranks) -> None:
    """Torch does not average the second backward. Ours averages both."""
    ranks(2, _two_forwards, mode, steps_before)


def _backward_twice(rank: int, size: int, mode: dict[str, Any]) -> None:
    model = _model(**mode)
    for step in range(3):
        expected = expected_gradients(model.module, lambda module, step=step: 2 * _loss(module, rank, step))
        model.zero_grad()
        loss = _loss(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_gradients(model, expected)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_backward_twice_through_one_graph(mode: dict[str, Any], ranks: Ranks) -> None:
    """Torch does not average the second backward. Ours averages both."""
    ranks(2, _backward_twice, mode)


def _unfrozen(rank: int, size: int) -> list[str]:
    module = Branches()
    module.second.requires_grad_(False)
    model = _model(module)
    assert_trains(model, rank, 2)
    model.module.second.requires_grad_(True)
    texts = warned(lambda: _loss(model, rank).backward())
    assert_trains(model, rank)
    return texts


def test_layer_unfrozen_after_wrapping(ranks: Ranks) -> None:
    """Torch never averages its gradients. Ours does from the next forward on, and says so once, naming it."""
    for texts in ranks(2, _unfrozen):
        assert len(texts) == 1
        assert "second.weight" in texts[0]


def _frozen(rank: int, size: int) -> list[str]:
    model = _model()
    assert_trains(model, rank, 2)
    model.module.second.requires_grad_(False)
    texts = warned(lambda: _loss(model, rank).backward())
    assert_trains(model, rank)
    return texts


def test_layer_frozen_after_wrapping(ranks: Ranks) -> None:
    """Torch raises "Expected to have finished reduction". Ours trains on, and says so once, naming the layer."""
    for texts in ranks(2, _frozen):
        assert len(texts) == 1
        assert "second.weight" in texts[0]


def _static_after_no_sync(rank: int, size: int) -> None:
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


def test_static_graph_that_begins_with_no_sync(ranks: Ranks) -> None:
    """Torch fails an internal assertion. Ours averages."""
    ranks(2, _static_after_no_sync)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = torch.tanh(self.body(x))
        return self.used(body), self.spare(body)


def _static_with_unused_output(rank: int, size: int) -> None:
    assert_trains(_model(_TwoHeads(), static_graph=True), rank, 4, lambda module, x: module(x)[0].square().sum())


def test_static_graph_with_an_output_that_is_not_used(ranks: Ranks) -> None:
    """Torch raises, although the graph is static. Ours averages, and leaves the unused head without gradients."""
    ranks(2, _static_with_unused_output)


class _Failing(Branches):
    fail = False

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.fail:
            hidden.register_hook(self._raise)
        return torch.tanh(self.third(torch.tanh(self.second(hidden))))

    @staticmethod
    def _raise(gradient: torch.Tensor) -> None:
        raise ValueError("out of memory, say")


def _failing_backward(rank: int, size: int, mode: dict[str, Any], steps_before: int) -> None:
    model = _model(_Failing(), **mode)
    if steps_before:
        assert_trains(model, rank, steps_before)
    model.module.fail = True
    error_of(lambda: _loss(model, rank).backward(), ValueError)
    model.module.fail = False
    assert_trains(model, rank)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_exception_in_a_backward(mode: dict[str, Any], steps_before: int, ranks: Ranks) -> None:
    """Torch raises "Expected to have finished reduction" forever after. Ours starts clean at the next forward."""
    ranks(2, _failing_backward, mode, steps_before)


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


def _custom_output(rank: int, size: int, kind: type) -> None:
    model = _model(_Wrapping(kind), find_unused_parameters=True)
    assert_trains(model, rank, 4, lambda module, x: module(x).value.square().sum())


@pytest.mark.parametrize("kind", [_Plain, _Record, _Registered])
def test_output_in_an_object_of_ones_own(kind: type, ranks: Ranks) -> None:
    """Torch raises a misleading "mark a variable ready only once". Ours averages."""
    ranks(2, _custom_output, kind)


def _average(state: object, anything: Any) -> Any:
    buffer = anything.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def _unnamed_hook(rank: int, size: int) -> None:
    model = _model()
    model.register_comm_hook(None, _average)
    assert_trains(model, rank)


def test_hook_with_another_name_for_its_bucket(ranks: Ranks) -> None:
    """Torch raises KeyError: 'bucket'. Ours takes the second argument, whatever its name."""
    ranks(2, _unnamed_hook)


def _seen_by_hook(rank: int, size: int, mode: dict[str, Any]) -> list[list[tuple[int, bool, int]]]:
    model = _model(bucket_cap_mb=1e-4, **mode)
    steps: list[list[tuple[int, bool, int]]] = []

    def hook(state: object, bucket: dist.GradBucket) -> Any:
        steps[-1].append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        return _average(state, bucket)

    model.register_comm_hook(None, hook)
    for step in range(3):
        steps.append([])
        _loss(model, rank, step).backward()
    return steps


@pytest.mark.parametrize("mode", [{}, {"static_graph": True}], ids=str)
def test_buckets_as_a_hook_sees_them(mode: dict[str, Any], ranks: Ranks) -> None:
    """Torch shows index 0 and is_last False for all in a static graph's first step. Ours counts them right."""
    for steps in ranks(2, _seen_by_hook, mode):
        for buckets in steps:
            assert [index for index, _, _ in buckets] == list(range(len(buckets)))
            assert [last for _, last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
            assert sum(parameters for _, _, parameters in buckets) == 6


def _other_order(rank: int, size: int) -> str:
    module = Branches()
    if rank == 1:
        module.second = module._modules.pop("second")  # to the end
    return error_of(lambda: _model(module))


def test_equal_shapes_in_another_order(ranks: Ranks) -> None:
    """Torch averages the wrong tensors. Ours refuses the model on every rank, naming what differs."""
    for text in ranks(2, _other_order):
        assert text.startswith("DDP expects same model across all ranks")
        assert "second.weight" in text
        assert "third.weight" in text


class _Growing(Branches):
    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = super().forward(x, depth)
        return x * self.gain if hasattr(self, "gain") else x


def _changed(rank: int, size: int, change: str) -> list[str]:
    model = _model(_Growing())
    assert_trains(model, rank, 2)
    if change == "added":
        model.module.gain = nn.Parameter(torch.full((4,), 2.0 + rank))
    elif change == "buffer":
        model.module.register_buffer("gain", torch.full((4,), 2.0 + rank))
    elif change == "reassigned":
        model.module.second.weight = nn.Parameter(torch.full((4, 4), 0.1 + rank))
    else:
        del model.module.third
        model.module.third = nn.Identity()
    texts = warned(lambda: _loss(model, rank).backward())
    for tensor in [*model.module.parameters(), *model.module.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
    assert_trains(model, rank)
    return texts


@pytest.mark.parametrize(
    ("change", "name"),
    [("added", "gain"), ("buffer", "gain"), ("reassigned", "second.weight"), ("removed", "third.weight")],
)
def test_model_changed_after_wrapping(change: str, name: str, ranks: Ranks) -> None:
    """Torch never averages a new parameter. Ours takes the change over, from rank 0, and says so once, naming it."""
    for texts in ranks(2, _changed, change):
        assert len(texts) == 1
        assert name in texts[0]


def _too_few(state: object, bucket: dist.GradBucket) -> Any:
    return _average(state, bucket).then(lambda future: future.value()[:-1])


def _hook_of_another_shape(rank: int, size: int) -> str:
    model = _model()
    model.register_comm_hook(None, _too_few)
    return error_of(lambda: _loss(model, rank).backward())


def test_hook_that_gives_another_shape(ranks: Ranks) -> None:
    """Torch leaves the ranks with different gradients. Ours raises, naming the hook and the bucket."""
    for text in ranks(2, _hook_of_another_shape):
        assert "_too_few" in text
        assert "bucket 0" in text


def _kept_views(rank: int, size: int, mode: dict[str, Any]) -> None:
    model = _model(gradient_as_bucket_view=True, **mode)
    assert_trains(model, rank, 3)
    places = []
    for step in range(4):
        model.zero_grad(set_to_none=True)
        _loss(model, rank, step).backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize("mode", [{}, {"static_graph": True}, {"bucket_cap_mb": 1e-4}], ids=str)
def test_views_survive_set_to_none(mode: dict[str, Any], ranks: Ranks) -> None:
    """gradient_as_bucket_view: after zero_grad(set_to_none=True) gradients are views of the same buckets again."""
    ranks(2, _kept_views, mode)


def _synchronised_later(rank: int, size: int, mode: dict[str, Any], steps_before: int) -> None:
    model = _model(**mode)
    if steps_before:
        assert_trains(model, rank, steps_before)
    expected = expected_gradients(model.module, lambda module: sum(_loss(module, rank, step) for step in range(3)))
    model.zero_grad()
    with model.no_sync():
        for step in range(3):
            _loss(model, rank, step).backward()
    alone = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    model.sync_gradients()
    assert_gradients(model, expected)
    assert not all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), alone, strict=True))
    assert_trains(model, rank)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradients_of_no_sync_are_averaged_on_demand(mode: dict[str, Any], steps_before: int, ranks: Ranks) -> None:
    """Torch needs another backward. sync_gradients() averages what no_sync has accumulated."""
    ranks(2, _synchronised_later, mode, steps_before)
