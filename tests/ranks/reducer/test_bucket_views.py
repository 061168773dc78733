"""gradient_as_bucket_view: whose memory the gradients are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.models import MODELS, batch_of, loss_of


def _buckets(model: Any) -> list[list[torch.Tensor]]:
    named = dict(model.module.named_parameters())
    return [[named[name] for name in bucket.parameters] for bucket in model.buckets()]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("name", ["mlp", "channels_last", "strided", "mixed_dtypes"])
@on_ranks(2)
def test_gradients_are_the_buckets_memory(rank: int, size: int, name: str, set_to_none: bool, static: bool) -> None:
    """In every step, also after zero_grad(set_to_none=True) and of a static graph, gradients are their bucket's memory;
    no other is alive."""
    torch.manual_seed(7)
    model = DistributedDataParallel(
        MODELS[name].build(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True, static_graph=static
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fresh: list[StorageWeakRef] = []  # what autograd brought, in this step
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p: fresh.append(StorageWeakRef(p.grad.untyped_storage()))
            )
    seen = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        fresh.clear()
        loss_of(model(batch_of(MODELS[name], rank, step))).backward()
        storages = []
        for bucket in _buckets(model):
            memory = {p.grad.untyped_storage().data_ptr() for p in bucket if p.numel()}
            assert len(memory) == 1, "gradients of one bucket in several places"
            assert bucket[0].grad.untyped_storage().nbytes() == sum(p.nbytes for p in bucket)
            storages += memory
        for parameter in model.parameters():
            # dense parameters' strides, row-major for the others
            assert parameter.grad is None or parameter.grad.stride() == torch.empty_like(parameter).stride()
        seen.append(storages)
        assert fresh
        alive = [ref for ref in fresh if not ref.expired()]
        now = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
        assert all(ref.cdata in now for ref in alive), "a second buffer of gradients is alive"
        optimizer.step()
    final = seen[2:] if static else seen[1:]  # those before the order of readiness is known are others
    assert all(one == final[0] for one in final)


@on_ranks(2)
def test_gradients_move_with_their_buckets(rank: int, size: int) -> None:
    """When buckets are assigned anew gradients keep their values, as views of the new ones that can't be detached."""
    model = DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=True)
    model(torch.randn(4, 3)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    old = weakref.ref(model.module.weight.grad)
    model.eval()
    model(torch.randn(4, 3))  # rebuilds the buckets: gradients move into the new ones with their values
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert old() is None
    with pytest.raises(RuntimeError, match="detach"):
        model.module.weight.grad.detach_()


@on_ranks(1)
def test_a_gradient_assigned_meanwhile_is_named(rank: int, size: int) -> None:
    """A .grad that something replaces during the backward is an error that names the parameter."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), gradient_as_bucket_view=True)

    def replace(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad.clone()

    last = model.module[1].weight
    handle = model.module[0].weight.register_post_accumulate_grad_hook(lambda p: replace(last))
    with pytest.raises(RuntimeError, match=r"not the expected DDP bucket view .*It is the gradient of '1.weight'"):
        model(torch.randn(4, 3)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
