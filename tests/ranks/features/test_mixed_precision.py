"""mixed_precision: parameters in low precision between a forward and the end of its backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, assert_same_on_all_ranks, samples, state_of
from tests.ranks.harness import on_ranks

SMALL = 0.0005  # MiB: several buckets
LOW = torch.bfloat16


class Net(nn.Module):
    """Asserts that it computes in `expected`."""

    def __init__(self, expected: torch.dtype = LOW) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.3))
        self.register_buffer("count", torch.tensor(7))
        self.expected = expected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert {x.dtype, self.frozen.dtype, self.shift.dtype, self.first.weight.dtype} == {self.expected}
        assert self.count.dtype == torch.int64
        return self.second(torch.tanh(self.first(x))) * self.frozen + self.shift


def _low_gradients(net: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of one rank as a module that is in low precision throughout computes them."""
    low = Net()
    low.load_state_dict(net.state_dict())
    low.to(LOW)
    low(x.to(LOW)).square().mean().backward()
    return {name: p.grad for name, p in low.named_parameters() if p.grad is not None}


def _averaged(gradients: dict[str, torch.Tensor], dtype: torch.dtype, size: int) -> dict[str, torch.Tensor]:
    averages = {}
    for name, gradient in gradients.items():
        buffer = (gradient.float() / size).to(dtype)
        dist.all_reduce(buffer)
        averages[name] = buffer.float()
    return averages


@pytest.mark.parametrize("reduce_dtype", [LOW, torch.float32, None])
@pytest.mark.parametrize(("as_view", "to_none"), [(False, True), (True, True), (True, False), (False, False)])
@on_ranks(2)
def test_gradients(rank: int, size: int, reduce_dtype: torch.dtype | None, as_view: bool, to_none: bool) -> None:
    """Computes in `param_dtype`, averages in `reduce_dtype` (and says so of its buckets), leaves gradients of full
    precision, bit by bit."""
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=reduce_dtype, buffer_dtype=LOW)
    net = Net()
    model = DistributedDataParallel(net, mixed_precision=config, bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        assert p._mp_param.dtype == LOW
        assert p._fp_param.dtype == p.dtype == torch.float32
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        expected = _averaged(_low_gradients(net, samples(rank, step)), reduce_dtype or LOW, size)
        model(samples(rank, step)).square().mean().backward()
        found = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
        assert_same(found, expected, f"step {step}")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p._mp_param.untyped_storage().size() for p in model.parameters()} == {0}
        optimizer.step()
        assert_same_on_all_ranks(state_of(model))
    travelling = reduce_dtype or LOW
    assert {bucket.dtype for bucket in model.buckets()} == {str(travelling).removeprefix("torch.")}
    numbers = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert sum(bucket.bytes for bucket in model.buckets()) == numbers * travelling.itemsize
    described = model._sync.description()["buckets"]
    assert [(one["bytes"], one["dtype"]) for one in described] == [(one.bytes, one.dtype) for one in model.buckets()]


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_accumulation_is_in_full_precision(rank: int, size: int, as_view: bool) -> None:
    """Under no_sync low gradients are added up in full precision, not cast down each time, and so averaged."""
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32, buffer_dtype=LOW)
    net = Net()
    model = DistributedDataParallel(net, mixed_precision=config, gradient_as_bucket_view=as_view)
    for window in range(3):
        model.zero_grad()
        sums: dict[str, torch.Tensor] = {}
        for part in range(4):
            for name, gradient in _low_gradients(net, samples(rank, 4 * window + part)).items():
                sums[name] = sums.get(name, 0) + gradient.float()
        for part in range(4):
            with model.no_sync() if part < 3 else contextlib.nullcontext():
                model(samples(rank, 4 * window + part)).square().mean().backward()
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        found = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
        assert_same(found, _averaged(sums, torch.float32, size))


@on_ranks(2)
def test_evaluation_and_failures(rank: int, size: int) -> None:
    """Forwards without gradients and failed backwards leave parameters in full precision and averages right."""
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=LOW, buffer_dtype=LOW)
    model = DistributedDataParallel(Net(), mixed_precision=config)
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        evaluated = model(samples(rank, 0))
    assert_same(dict(model.state_dict()), reference)  # in full precision: the state dict can be saved

    output = model(samples(rank, 0))
    with torch.no_grad():
        assert torch.equal(model(samples(rank, 0)), evaluated)
    output.square().mean().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(dict(model.state_dict()), reference)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("in the backward")

    hidden = model.module.first.register_forward_hook(lambda module, inputs, output: Failing.apply(output))
    with pytest.raises(KeyError):
        model(samples(rank, 1)).sum().backward()
    hidden.remove()
    model.zero_grad()
    model(samples(rank, 0)).square().mean().backward()
    assert_same(dict(model.state_dict()), reference)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    model.module.expected = torch.float32
    model.module.shift.data = model.module.shift.float()
    model.module(samples(rank, 0))  # the module itself computes in full precision


class Blocks(nn.Module):
    """Two checkpointed layers and one that is used twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.twice, self.last = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = checkpoint(self.twice, y, use_reentrant=self.reentrant)
        y = self.twice(y) if not self.reentrant else y
        return checkpoint(self.last, torch.tanh(y), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpointed_layers(rank: int, size: int, reentrant: bool) -> None:
    """Recomputed forwards, also in reentrant backwards, see the low-precision parameters."""
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
    model = DistributedDataParallel(Blocks(reentrant), mixed_precision=config, bucket_cap_mb=SMALL)
    for step in range(3):
        low = Blocks(reentrant)
        low.load_state_dict(model.module.state_dict())
        low.to(LOW)(samples(rank, step).to(LOW)).square().mean().backward()
        expected = _averaged({name: p.grad for name, p in low.named_parameters()}, torch.float32, size)
        model.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        assert_same({name: p.grad for name, p in model.module.named_parameters()}, expected)


@on_ranks(1)
def test_ignored_parameters_and_hooks(rank: int, size: int) -> None:
    """Ignored parameters and buffers are left alone; another comm hook is refused."""
    net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4))
    net.register_buffer("own", torch.ones(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "own"])
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=LOW, buffer_dtype=LOW)
    model = DistributedDataParallel(net, mixed_precision=config)
    assert not hasattr(net[1].weight, "_mp_param")
    assert net[0].weight._mp_param.dtype == LOW
    assert net.own.dtype == torch.float32
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, lambda state, bucket: None)


@on_ranks(2)
def test_only_the_reduction_is_low(rank: int, size: int) -> None:
    """With `reduce_dtype` alone everything is computed in full precision, and only the buckets travel in low."""
    net = Net(torch.float32)
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(reduce_dtype=LOW), bucket_cap_mb=SMALL)
    for step in range(3):
        model.zero_grad()
        alone = Net(torch.float32)
        alone.load_state_dict(net.state_dict())
        alone(samples(rank, step)).square().mean().backward()
        expected = _averaged({n: p.grad for n, p in alone.named_parameters() if p.grad is not None}, LOW, size)
        model(samples(rank, step)).square().mean().backward()
        assert_same({n: p.grad for n, p in net.named_parameters() if p.requires_grad}, expected)
