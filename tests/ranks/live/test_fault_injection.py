"""Faults on purpose do what they say, on the rank that they are for, and nothing is left of them afterwards."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel, fault_injection, faults, recording
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks

DELAY = 0.05


def _model(**arguments: Any) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)])
    return DistributedDataParallel(net, bucket_cap_mb=1e-4, **arguments)


def _step(model: Any, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _times(model: Any) -> list[Any]:
    return [bucket.times for bucket in model.buckets()]


def _marks() -> list[str]:
    return [one["name"] for one in recording.descriptions(0)[0] if one["type"] == "mark"]


def _forward_ms(model: Any) -> float:
    report = model.reducer.report()
    return float(report["forward_end"] - report["forward_begin"]) / 1e6


@on_ranks(2)
def test_slow_ranks_and_layers_are_slow(rank: int, size: int) -> None:
    """A slow rank's forward takes longer; a slow layer's bucket is late, not the one before it; gradients stay."""
    model = _model()
    for _ in range(3):
        plain = _step(model, rank)
    found = {}
    on_one = contextlib.nullcontext
    with fault_injection.slow_rank(model, DELAY) if rank == 1 else on_one():
        slowed = _step(model, rank)
    found["forward"] = _forward_ms(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, slowed, strict=True))
    with fault_injection.slow_layer(model, "1.weight", DELAY) if rank == 1 else on_one():
        slowed = _step(model, rank)
    found["first bucket"], found["second bucket"] = (times.ready_ms for times in _times(model)[:2])
    assert all(torch.equal(a, b) for a, b in zip(plain, slowed, strict=True))
    _step(model, rank)
    assert not model._live.waiting
    assert not model.module._forward_pre_hooks
    assert fault_injection.active(model) == []
    if rank == 1:
        name = "slow layer: 50 ms before the gradient of '1.weight'"
        assert {name, f"end of {name}"} <= set(_marks())
    fast, slow = everywhere(found)
    assert slow["forward"] >= DELAY * 1e3
    assert slow["second bucket"] >= DELAY * 1e3
    assert slow["first bucket"] < slow["second bucket"] - 0.9 * DELAY * 1e3
    assert fast["forward"] < slow["forward"]


HOOKS = (None, "fp16", "mine")


def _average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True:UserWarning")
@on_ranks(2)
def test_a_slow_link_only_delays(rank: int, size: int, hook: str | None, options: dict[str, Any]) -> None:
    """Buckets of the rank with the slow link take their latency and bytes longer; all gradients are what they were."""
    DistributedDataParallel.register_named_comm_hook("mine", _average)
    model = _model(**options)
    for _ in range(2):
        _step(model, rank)
    if hook is not None:
        model.reconfigure(comm_hook=hook)
    plain = _step(model, rank)
    bucket = model.buckets()[0].bytes
    with fault_injection.slow_link(model, DELAY, bucket / DELAY / 1e6) if rank == 1 else contextlib.nullcontext():
        slowed = [_step(model, rank), _step(model, rank)]
        first, *_, last = _times(model)
        if rank == 1:  # for its own bytes, after those before it; the latency of one overlaps that of the next
            assert first.reduced_ms - first.launched_ms >= 2 * DELAY * 1e3
            assert last.reduced_ms - first.launched_ms >= 4 * DELAY * 1e3
            # a live change while the link is slow keeps the link
            assert len(model._comm_hooks) == (hook is not None)
        model.reconfigure(order="reversed")
        slowed.append(_step(model, rank))
        if rank == 1:
            assert _times(model)[0].reduced_ms - _times(model)[0].launched_ms >= 2 * DELAY * 1e3
    again = _step(model, rank)
    for gradients in (*slowed, again):
        for mine, other in zip(gradients, plain, strict=True):
            assert torch.equal(mine, other)
    assert model.configuration()["comm_hook"] == (None if hook is None else model.configuration()["comm_hook"])
    assert not model._live.waiting


def _steps(model: Any, rank: int) -> None:
    for _ in range(2):
        _step(model, rank)


@on_ranks(2)
def test_a_dropped_gradient_is_the_real_error(rank: int, size: int) -> None:
    """A gradient dropped on one rank gives every rank the error that names it; then training goes on."""
    model = _model()
    for _ in range(2):
        _step(model, rank)
    if rank == 1:
        fault_injection.drop_gradient(model, "1.weight")
    with pytest.raises(RuntimeError) as caught:
        _steps(model, rank)
    model.zero_grad()
    _step(model, rank)  # it was one gradient
    message = str(caught.value)
    assert message.startswith("Expected to have finished reduction")
    assert "1.weight" in message


@on_ranks(2)
def test_faults_that_make_no_sense(rank: int, size: int) -> None:
    """A fault that its model can't have is refused, with the closest name; one of another rank is not this one's."""
    model = _model()
    said = []
    for fault in (
        faults.SlowLayer(rank, "1.wieght", 0.1),
        faults.SlowRank(rank, -1.0),
        faults.SlowLink(rank, mb_per_second=0.0),
    ):
        with pytest.raises(ValueError) as caught:
            fault_injection.inject(model, fault)
        said.append(str(caught.value))
    fault_injection.inject(model, faults.SlowLink(rank))
    with pytest.raises(ValueError) as caught:
        fault_injection.inject(model, faults.SlowLink(rank))
    assert fault_injection.inject(model, faults.SlowRank(rank + 1, 60.0)) is None
    (active,) = fault_injection.active(model)
    assert (active["kind"], active["rank"], active["begun"]) == ("SlowLink", rank, False)
    fault_injection.end(model)
    said = [*said, str(caught.value)]
    assert "did you mean '1.weight'" in said[0]
    assert "between 0 and a day" in said[1]
    assert "must be positive" in said[2]
    assert "already has a slow link on this rank" in said[3]


def test_faults_travel() -> None:
    """Each kind of fault is the same after a way through JSON; what is none is refused."""
    for fault in (
        faults.SlowRank(0, 0.1),
        faults.SlowLayer(1, "a.b", 0.2),
        faults.SlowLink(2, 0.1, 5.0),
        faults.DroppedGradient(3, "c"),
        faults.DeadRank(4),
    ):
        assert faults.from_dict(json.loads(json.dumps(faults.to_dict(fault)))) == fault
        assert fault.text()
    with pytest.raises(ValueError, match="there is no fault 'Flood'"):
        faults.from_dict({"kind": "Flood"})
