"""Convergence: the digits network follows torch's DDP's loss curve, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks

EPOCHS = 4
BATCH = 64


Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def digits() -> tuple[Pair, Pair]:
    """Images and labels, to train on and held out. They are read here, as scikit-learn is slow to import."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, kept = order[:297], order[297:]
    return (x[kept], y[kept]), (x[held_out], y[held_out])


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _curve(model: nn.Module, data: TensorDataset, rank: int, size: int) -> list[float]:
    sampler = DistributedSampler(data, size, rank, seed=3)
    loader = DataLoader(data, BATCH // size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        pytest.param(2, {}, marks=pytest.mark.soak),
        pytest.param(
            *(2, {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 0.02}),
            marks=pytest.mark.soak,
        ),
        (4, {"find_unused_parameters": True, "bucket_cap_mb": 0.02}),
    ],
    ids=str,
)
@on_ranks()
def test_the_loss_curve_is_torchs(rank: int, size: int, digits: tuple[Pair, Pair], arguments: dict[str, Any]) -> None:
    """Convergence on the digits: all losses and the final state are bit-equal to torch's DDP; the network learns."""
    kept, (x, y) = digits
    data = TensorDataset(*kept)
    network = _network()
    ours = DistributedDataParallel(copy.deepcopy(network), **arguments)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(network), **arguments)
    mine, other = (_curve(model, data, rank, size) for model in (ours, theirs))
    assert len(mine) == EPOCHS * -(-1500 // BATCH)
    assert mine == other
    assert sum(mine[-10:]) < 0.2 * sum(mine[:10])
    for (name, tensor), their in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(tensor, their), name
    ours.eval()
    assert (ours.module(x).argmax(1) == y).double().mean() > 0.93
