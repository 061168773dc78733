"""Gradients on real ranks: equal to torch's DistributedDataParallel, and to one process on the whole batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from ddp_lab import DistributedDataParallel
from tests.ranks.conftest import Ranks
from tests.ranks.models import MODELS, batch_of, loss_of
from tests.ranks.training import Variant, assert_equal, pair, train


def _grid_on_rank(rank: int, size: int, name: str, variants: list[Variant]) -> int:
    for variant in variants:
        ours, torchs = pair(name, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=variant.as_view)
        mine, theirs = (train(model, name, rank, variant) for model in (ours, torchs))
        assert_equal(mine, theirs, f"{name} {variant}")
        for gradients in mine:
            assert all(g is None or torch.isfinite(g).all() for g in gradients.values())
    return len(variants)


VARIANTS = [
    Variant(cap, view, to_none, accumulate)
    for cap, view, to_none, accumulate in itertools.product((None, 0.0005), (False, True), (False, True), (1, 3))
] + [Variant(0.0005, view, zero=False) for view in (False, True)]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_gradients_and_buffers_are_bit_equal_to_torchs(ranks: Ranks, name: str) -> None:
    """Over caps, views, zero_grad and accumulation, gradients, strides and buffers are torch's, bit by bit."""
    assert ranks(2, _grid_on_rank, name, VARIANTS) == [len(VARIANTS)] * 2


@pytest.mark.parametrize("size", [1, 4])
def test_other_world_sizes(ranks: Ranks, size: int) -> None:
    """With 1 and 4 ranks gradients are torch's bit by bit, for every model."""
    few = [Variant(0.0005), Variant(None, as_view=True, accumulate=2)]
    for name in sorted(MODELS):
        ranks(size, _grid_on_rank, name, few)


def _whole_batch_on_rank(rank: int, size: int, name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(7)
    module = case.build()
    alone = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        loss_of(model(batch_of(case, rank, step))).backward()
        loss_of(alone(torch.cat([batch_of(case, other, step) for other in range(size)]))).backward()
        for (path, mine), whole in zip(module.named_parameters(), alone.parameters(), strict=True):
            if whole.grad is None:
                assert mine.grad is None or not mine.grad.any(), path
                continue
            tolerance = 2e-2 if mine.dtype == torch.bfloat16 else 1e-6
            error = (mine.grad - whole.grad).norm() / whole.grad.norm().clamp_min(1e-30)
            assert error <= tolerance, f"{path}: relative error {error:.2e}"


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_those_of_one_process_on_the_whole_batch(ranks: Ranks, size: int) -> None:
    """Averaged gradients are those of one process that sees all ranks' samples, to 1e-6 (bfloat16: 2e-2)."""
    for name in sorted(MODELS):
        if MODELS[name].whole_batch:
            ranks(size, _whole_batch_on_rank, name)
