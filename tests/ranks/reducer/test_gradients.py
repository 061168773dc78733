"""Gradients on real ranks: equal to torch's DistributedDataParallel, and to one process on the whole batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.models import MODELS, batch_of, loss_of
from tests.ranks.training import Variant, assert_equal, pair, train


def _assert_as_torch(rank: int, name: str, variants: list[Variant]) -> None:
    for variant in variants:
        ours, torchs = pair(name, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=variant.as_view)
        mine, theirs = (train(model, name, rank, variant) for model in (ours, torchs))
        assert_equal(mine, theirs, f"{name} {variant}")
        for gradients in mine:
            assert all(g is None or torch.isfinite(g).all() for g in gradients.values())


SMALL = 0.0005
KEPT = [Variant(SMALL, view, zero=False) for view in (False, True)]
# Any two of these settings meet in one of the first six.
PAIRS = [
    *(Variant(None, False, False, 1), Variant(None, True, True, 3), Variant(None, True, True, 1)),
    *(Variant(SMALL, False, True, 1), Variant(SMALL, True, False, 3), Variant(SMALL, False, False, 3)),
    *KEPT,
]
ALL = [*(Variant(*one) for one in itertools.product((None, SMALL), (False, True), (False, True), (1, 3))), *KEPT]


@pytest.mark.parametrize(
    "variants", [pytest.param(PAIRS, id="pairs"), pytest.param(ALL, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", sorted(MODELS))
@on_ranks(2)
def test_gradients_and_buffers_are_bit_equal_to_torchs(
    rank: int, size: int, name: str, variants: list[Variant]
) -> None:
    """Over caps, views, zero_grad and accumulation, gradients, strides and buffers are torch's, bit by bit."""
    _assert_as_torch(rank, name, variants)


@pytest.mark.parametrize("size", [1, 4])
@on_ranks()
def test_other_world_sizes(rank: int, size: int) -> None:
    """With 1 and 4 ranks gradients are torch's bit by bit, for every model."""
    for name in sorted(MODELS):
        _assert_as_torch(rank, name, [Variant(SMALL), Variant(None, as_view=True, accumulate=2)])


@pytest.mark.parametrize("name", sorted(name for name, case in MODELS.items() if case.whole_batch))
@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_gradients_are_those_of_one_process_on_the_whole_batch(rank: int, size: int, name: str) -> None:
    """Averaged gradients are those of one process that sees all ranks' samples, to 1e-6 (bfloat16: 2e-2)."""
    case = MODELS[name]
    torch.manual_seed(7)
    module = case.build()
    alone = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL)
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
