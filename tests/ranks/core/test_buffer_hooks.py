"""_register_buffer_comm_hook: the user's way to bring buffers into agreement, before or after the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
