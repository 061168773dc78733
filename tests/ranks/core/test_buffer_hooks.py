"""_register_buffer_comm_hook: the user's way to bring buffers into agreement, before or after the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks


class Net(nn.Module):
    """Adds the sum of its input to a buffer, and keeps what the buffer was at the begin of the forward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("total", torch.full((1,), float(rank)))
        self.register_buffer("kept", torch.full((1,), float(rank)))
        self.at_begin: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at_begin.append(self.total.item())
        self.total += x.sum()
        return self.linear(x)


def _sum_at_once(state: Any, buffers: dict[str, torch.Tensor]) -> None:
    state.append(sorted(buffers))
    dist.all_reduce(buffers["total"])


def _sum_later(state: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
    state.append(sorted(buffers))
    return [dist.all_reduce(buffers["total"], async_op=True).get_future()]


def _trace(wrap: Any, rank: int, where: Any, hook: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net(rank)
    wrap._set_params_and_buffers_to_ignore_for_model(net, ["kept"])
    model = wrap(net)
    calls: list[Any] = []
    model._register_buffer_comm_hook(calls, hook, where)
    totals = []
    for _ in range(3):
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        totals.append(net.total.item())
    with model.no_sync():
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return calls, totals, net.at_begin, net.total.item(), net.kept.item()


@on_ranks(2)
def test_buffer_hooks_run_as_torchs(rank: int, size: int) -> None:
    """PRE_FORWARD and POST_FORWARD, at once or with futures that the end of the backward waits for: the hook sees
    torch's names in torch's forwards, and leaves torch's buffers."""
    for where in (Location.PRE_FORWARD, Location.POST_FORWARD):
        for hook in (_sum_at_once, _sum_later):
            ours, theirs = (_trace(wrap, rank, where, hook) for wrap in (DistributedDataParallel, TorchDDP))
            assert ours[0] == theirs[0]
            assert ours[0][0] == ["total"]  # ignored buffers are left out
            if hook is _sum_at_once:
                assert ours == theirs, (where, ours, theirs)
            else:  # in the forward the sum may or may not be there yet
                assert ours[4] == theirs[4]
                if where is Location.POST_FORWARD:
                    assert ours[1] == theirs[1]


@on_ranks(2)
def test_the_default_broadcast_is_at_hand(rank: int, size: int) -> None:
    """A hook may call _default_broadcast_coalesced with another source; what is not callable is refused."""
    model = DistributedDataParallel(Net(rank))
    with pytest.raises(TypeError, match="must be callable"):
        model._register_buffer_comm_hook(None, 3)

    def from_last(state: Any, buffers: dict[str, torch.Tensor]) -> None:
        model._default_broadcast_coalesced(list(buffers.values()), authoritative_rank=size - 1)

    model.module.total.fill_(rank)
    model._register_buffer_comm_hook(None, from_last)
    model(torch.zeros(1, 2)).sum().backward()
    assert model.module.total.item() == size - 1


@on_ranks(2)
def test_saved_buffers_stay_valid(rank: int, size: int) -> None:
    """Version counters are preserved: two forwards and one backward work with a buffer that autograd has saved."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    model = DistributedDataParallel(Scaled())
    first = model(torch.ones(1, 2))
    second = model(torch.ones(1, 2))  # broadcasts a buffer that the first forward has saved
    (first + second).sum().backward()
