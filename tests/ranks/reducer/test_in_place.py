"""Gradients that shared memory averages where they are: the same as over Gloo, whatever else refers to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_lab.comm
from ddp_lab import DistributedDataParallel
from tests.ranks.compare import gradients_of
from tests.ranks.harness import on_ranks
from tests.waiting import wait_until

Gradients = list[torch.Tensor | None]


class _Sum(nn.Module):
    """The gradient of `table` is a view of what the rest of the backward still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.table = nn.Parameter(torch.randn(8 * 64))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, head: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.net(x) + self.table.view(8, 64)
        return self.head(out) if head else out


def _wrapped(group: Any, module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, process_group=group, **{"bucket_cap_mb": 0.01, **options})


def _input(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(-1 - step, 1 + rank, 8 * 64).view(8, 64)


def _shared_memory_of_autograd(rank: int, group: Any) -> Gradients:
    model, found = _wrapped(group, _Sum(), bucket_cap_mb=1e-6), Gradients()
    table = [name for name, _ in model.module.named_parameters()].index("table")

    def until_averaged(gradient: torch.Tensor) -> None:  # with the memory of the gradient of `table`
        bucket = next(number for number, members in enumerate(model._sync.assignment) if table in members)
        wait_until(lambda: model.reducer.stage()["buckets"][bucket][-1], "the average of the table's gradient")

    for step in range(4):
        if step == 1:  # from now on buckets are in the order in which gradients arrive
            model.module.net.register_forward_hook(
                lambda module, given, out: out.register_hook(until_averaged) and None
            )
        model.zero_grad()
        model(_input(rank, step)).square().sum().backward()
        found += gradients_of(model)
    return found


def _accumulated(rank: int, group: Any) -> Gradients:
    model, found = _wrapped(group, _Sum()), Gradients()
    for step in range(4):
        with model.no_sync():
            model(_input(rank, step)).square().sum().backward()
        model(_input(rank, step + 1)).square().sum().backward()
        found += gradients_of(model)
    return found


def _of_a_flat_buffer(rank: int, group: Any) -> Gradients:
    model = _wrapped(group, _Sum())
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    first = 0
    for parameter in model.parameters():
        parameter.grad = flat[first : first + parameter.numel()].view(parameter.shape)
        first += parameter.numel()
    for step in range(3):
        flat.zero_()
        model(_input(rank, step)).square().sum().backward()
    return [*gradients_of(model), flat.clone()]


def _unused(rank: int, group: Any) -> Gradients:
    model, found = _wrapped(group, _Sum(), find_unused_parameters=True), Gradients()
    for step in range(6):
        if step % 3 == 0:
            model.zero_grad()
        heads = (True, rank == 0, False)[step % 3]  # of all ranks, of one, of none: that gradient stays
        model(_input(rank, step), head=heads).square().sum().backward()
        found += gradients_of(model)
    return found


def _replaced_meanwhile(rank: int, group: Any) -> Gradients:
    model, found = _wrapped(group, _Sum()), Gradients()
    table, head = model.module.table, model.module.head.weight

    def another(*_: Any) -> None:  # when the gradients after it arrive
        if head.grad is not None:
            head.grad = head.grad.clone() if rank == 0 else None

    model.module.net[0].weight.register_post_accumulate_grad_hook(another)
    for step in range(4):
        model.zero_grad()
        model(_input(rank, step)).square().sum().backward()
        found += [*gradients_of(model), table.grad]
    return found


def _after_a_failure(rank: int, group: Any) -> Gradients:
    module = _Sum()
    model, failing = _wrapped(group, module), [True]

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        if failing[0]:
            raise ValueError("on purpose")
        return gradient

    module.net[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(_input(rank, 0)).square().sum().backward()  # some buckets are on their way
    failing[0] = False
    model.zero_grad()
    model(_input(rank, 1)).square().sum().backward()
    return gradients_of(model)


def _other_layouts(rank: int, group: Any) -> Gradients:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)).double()
    model, found = _wrapped(group, net.to(memory_format=torch.channels_last)), Gradients()
    for step in range(3):
        model.zero_grad(set_to_none=step == 1)
        images = torch.linspace(-1 - step, 1 + rank, 2 * 3 * 64, dtype=torch.float64).view(2, 3, 8, 8)
        model(images.to(memory_format=torch.channels_last)).square().sum().backward()
        found += gradients_of(model)
    return found


def _uneven_inputs(rank: int, group: Any) -> Gradients:
    model, found = _wrapped(group, _Sum()), Gradients()
    with model.join():
        for step in range(3 + rank):
            model.zero_grad()
            model(_input(rank, step)).square().sum().backward()
            found += gradients_of(model)
    return found


SCENARIOS: dict[str, Callable[[int, Any], Gradients]] = {
    "shared memory of autograd": _shared_memory_of_autograd,
    "accumulated": _accumulated,
    "of a flat buffer": _of_a_flat_buffer,
    "unused": _unused,
    "replaced meanwhile": _replaced_meanwhile,
    "after a failure": _after_a_failure,
    "other layouts": _other_layouts,
    "uneven inputs": _uneven_inputs,
}


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2)
def test_gradients_are_those_of_gloo(rank: int, size: int, name: str) -> None:
    """To the bit: two ranks add in one order only."""
    ddp_lab.comm.register()
    found = []
    for backend in ("gloo", "shm"):
        group = dist.new_group(backend=backend)
        torch.manual_seed(0)
        found.append(SCENARIOS[name](rank, group))
        dist.destroy_process_group(group)
    assert len(found[0]) == len(found[1])
    for number, (expected, mine) in enumerate(zip(*found, strict=True)):
        assert (expected is None) == (mine is None), number
        if expected is not None and mine is not None:
            assert torch.equal(expected, mine), (number, (expected - mine).abs().max())


class _Forgetful(nn.Module):
    """A parameter without elements is there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor, head: bool) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return (self.head(out) if head else out) + self.empty.sum()


@on_ranks(2)
def test_an_error_reaches_who_reduces_in_place(rank: int, size: int) -> None:
    """One rank's backward leaves a layer out: the other one, which waits, is told which and where."""
    ddp_lab.comm.register()
    group = dist.new_group(backend="shm")
    model = DistributedDataParallel(_Forgetful(), process_group=group)

    def train() -> None:
        for _ in range(2):
            model(torch.ones(2, 8), head=rank == 0).sum().backward()

    with pytest.raises(RuntimeError) as caught:
        train()
    dist.destroy_process_group(group)
    text = str(caught.value)
    assert "rank 1" in text
    assert "head.weight" in text
