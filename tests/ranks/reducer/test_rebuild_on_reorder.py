"""rebuild_buckets_on_reorder: buckets follow a graph whose order drifts, on all ranks in the same forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks


class Turning(nn.Module):
    """Runs its layers forwards or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("threshold", "followed"), [(0.5, True), (1.0, False), (None, False)])
@on_ranks(2)
def test_the_order_is_followed(rank: int, size: int, threshold: float | None, followed: bool) -> None:
    """Above the threshold the buckets take the new order, on every rank; below it, and without it, the order stays."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Turning(), bucket_cap_mb=1e-5)
    model.rebuild_buckets_on_reorder(threshold, every=2)

    def train(steps: int) -> list[int]:
        for _ in range(steps):
            model.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
        return [index for bucket in model._sync.assignment for index in bucket]

    assert train(4) == [5, 4, 3, 2, 1, 0]
    # only rank 0's order counts: the other ranks go on as before, and still have to rebuild with it
    model.module.turned = True
    assert train(5) == ([0, 1, 2, 3, 4, 5] if followed else [5, 4, 3, 2, 1, 0])
