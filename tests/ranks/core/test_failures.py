"""Errors name parameters and ranks, and leave the model usable."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import error_of
from tests.waiting import wait_until


class TwoBranches(nn.Module):
    """Uses its second branch only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.fail: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        y = self.first(x)
        if self.fail is not None:
            y.register_hook(self.fail)
        return self.second(y) if both else y


def _pair(**arguments: Any) -> tuple[Any, Any]:
    """Our model, and torch's from the same seed that never saw a failure."""
    torch.manual_seed(5)
    module = TwoBranches()
    return (
        DistributedDataParallel(copy.deepcopy(module), **arguments),
        nn.parallel.DistributedDataParallel(copy.deepcopy(module), **arguments),
    )


def _assert_clean_step(ours: Any, torchs: Any, rank: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for model in (ours, torchs):
        model.zero_grad()
        model(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@on_ranks(2)
def test_a_gradient_that_is_ready_twice_is_named(rank: int, size: int) -> None:
    """Gradients may come in several backwards; one that comes twice raises, naming the parameter."""
    ours, torchs = _pair()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for model in (ours, torchs):
        module = model.module
        model.zero_grad()
        model(x)  # arms; the losses below reach each parameter once, in two backwards
        module.second(x).sum().backward()
        module.first(x).sum().backward()
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    ours(x)
    ours.module.first(x).sum().backward()
    message = error_of(ours.module.first(x).sum().backward)
    assert message.startswith("Expected to mark a variable ready only once.")
    assert "'first." in message
    assert f"on rank {rank}" in message


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
)
@on_ranks(2)
def test_an_exception_in_the_backward_is_recovered_from(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """After an exception between two gradients the next steps give torch's gradients, bit by bit."""
    ours, torchs = _pair(**arguments)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in the middle of the backward")

    for repeat in range(3):
        ours.module.fail = fail
        assert "in the middle" in error_of(ours(torch.ones(2, 4)).sum().backward, ZeroDivisionError)
        ours.module.fail = None
        if repeat == 1:
            ours.abandon_backward()
        _assert_clean_step(ours, torchs, rank)
        _assert_clean_step(ours, torchs, rank)


@on_ranks(2)
def test_a_backward_that_is_given_up_raises(rank: int, size: int) -> None:
    """A backward that another thread gives up does not end as if its gradients were averaged."""
    ours, torchs = _pair()

    def give_up(_: torch.Tensor) -> None:
        helper = threading.Thread(target=ours.abandon_backward)
        helper.start()
        helper.join()

    ours.module.fail = give_up
    message = error_of(ours(torch.ones(2, 4)).sum().backward)
    ours.module.fail = None
    _assert_clean_step(ours, torchs, rank)
    assert message.startswith(f"the backward of step 0 was abandoned (abandon_backward) on rank {rank}")


@on_ranks(2)
def test_a_rank_that_waits_is_freed_and_rejoins(rank: int, size: int) -> None:
    """A rank freed from its wait, by closing its group's sockets, raises, and with a new group both ranks train on,
    counting the same steps."""
    before = {int(fd) for fd in os.listdir("/proc/self/fd")}
    group = dist.new_group([0, 1])
    torch.manual_seed(5)
    module = TwoBranches()
    ours = DistributedDataParallel(copy.deepcopy(module), process_group=group)
    x = torch.ones(2, 4)
    ours(x).sum().backward()
    ours(x).sum().backward()  # rebuilt
    steps = int(ours.reducer.step())

    def free() -> None:
        wait_until(ours.reducer.in_flight, "a bucket in flight")
        for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()  # a socket that listens has no peer: gloo ends the process if it fails
                connection.shutdown(socket.SHUT_RDWR)

    if rank == 0:
        helper = threading.Thread(target=free)
        helper.start()
        message = error_of(ours(x).sum().backward)
        helper.join()
    else:
        ours.module.fail = lambda _: 1 / 0
        message = error_of(ours(x).sum().backward, ZeroDivisionError)
        ours.module.fail = None
    ours.abandon_backward()

    ours._update_process_group(dist.new_group([0, 1]))
    torchs = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    for _ in range(3):
        _assert_clean_step(ours, torchs, rank)
    assert len(ours.buckets()) == 1
    assert ours.buckets()[0].rebuilt
    assert message
    assert len(set(everywhere((steps, int(ours.reducer.step()))))) == 1


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_models_that_differ_between_ranks_are_refused_on_all_ranks(rank: int, size: int) -> None:
    """All ranks raise the same message that names the parameter, the ranks and what each has."""

    def shapes() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5 if rank == 1 else 4), nn.Linear(5 if rank == 1 else 4, 2))

    def order() -> nn.Module:
        net = nn.Module()
        for name in ("left", "right") if rank != 2 % size else ("right", "left"):
            net.add_module(name, nn.Linear(4, 4))
        return net

    def names() -> nn.Module:
        net = nn.Module()
        net.add_module("head" if rank == 0 else "tail", nn.Linear(4, 4))
        return net

    def dtypes() -> nn.Module:
        return nn.Linear(4, 4, dtype=torch.float64 if rank == size - 1 else torch.float32)

    def frozen() -> nn.Module:
        net = nn.Linear(4, 4)
        net.bias.requires_grad_(rank == 0)
        return net

    def all_frozen() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(rank == 0)

    def count() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + (rank == 1))))

    def buffers() -> nn.Module:
        net = nn.Linear(4, 4)
        net.register_buffer("table", torch.zeros(3 + rank))
        return net

    builders = (shapes, order, names, dtypes, frozen, all_frozen, count, buffers)
    first = {build.__name__: error_of(lambda build=build: DistributedDataParallel(build())) for build in builders}
    first["caps"] = error_of(lambda: DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb=1 + rank))
    DistributedDataParallel(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()  # the group is as good as before
    assert everywhere(first) == [first] * size
    assert all(text.startswith("DDP expects same model across all ranks, but ") for text in first.values())
    others = "rank 1" if size == 2 else "ranks 1–3"
    assert "params[0] in rank 0 with sizes [4, 4] appears not to match sizes" in first["shapes"]
    assert "parameter '0.weight' of shape [4, 4], float32, trained" in first["shapes"]
    assert "rank 1: parameter '0.weight' of shape [5, 4]" in first["shapes"]
    assert "parameter 'left.weight'" in first["order"]
    assert "parameter 'right.weight'" in first["order"]
    assert (
        f"rank 0: parameter 'head.weight' of shape [4, 4], float32, trained, strides [4, 1]; {others}" in first["names"]
    )
    assert f"rank {size - 1}: parameter 'weight' of shape [4, 4], float64" in first["dtypes"]
    assert f"{others}: parameter 'bias' of shape [4], float32, frozen" in first["frozen"]
    assert "frozen" in first["all_frozen"]
    assert "Rank 0 has 4 params, while rank 1 has inconsistent 6 params" in first["count"]
    assert "nothing" in first["count"]
    assert "buffer 'table' of shape [3]" in first["buffers"]
    assert "argument bucket_cap_mb=[1.0, 1.0]" in first["caps"]
