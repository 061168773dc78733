"""rebuild_buckets_on_reorder: buckets follow a graph whose order drifts, on all ranks in the same forward."""

from __future__ import annotations

import torch
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.conftest import Ranks


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


def _order_on_rank(rank: int, size: int, threshold: float | None) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Turning(), bucket_cap_mb=1e-5)
    model.rebuild_buckets_on_reorder(threshold, every=2)

    def train(steps: int) -> list[int]:
        for _ in range(steps):
            model.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
        return [index for bucket in model._sync.assignment for index in bucket]

    before = train(4)
    # only rank 0's order counts: the other ranks go on as before, and still have to rebuild with it
    model.module.turned = True
    return before, train(5)


def test_the_order_is_followed(ranks: Ranks) -> None:
    """Above the threshold the buckets take the new order, on every rank."""
    for before, after in ranks(2, _order_on_rank, 0.5):
        assert before == [5, 4, 3, 2, 1, 0]
        assert after == [0, 1, 2, 3, 4, 5]


def test_a_high_threshold_keeps_the_order(ranks: Ranks) -> None:
    """Below the threshold, and without rebuild_buckets_on_reorder, the order stays."""
    for threshold in (1.0, None):
        for before, after in ranks(2, _order_on_rank, threshold):
            assert before == after
