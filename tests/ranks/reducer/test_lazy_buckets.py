"""lazy_bucket_allocation: the same gradients, from buckets that have memory during a backward alone."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from tests.ranks.compare import assert_same, gradients_of, mlp, samples
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import wrap
from tests.waiting import wait_until

SMALL = 0.0005  # MiB: several buckets


class Heads(nn.Module):
    """A body and two heads, of which a forward may leave one out; the last parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(10, 8)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, heads: str = "lr") -> torch.Tensor:
        x = torch.tanh(self.body(x))
        return sum({"l": self.left, "r": self.right}[name](x) for name in heads)


def _backward(model: Any, *inputs: Any) -> list[torch.Tensor | None]:
    model(*inputs).square().sum().backward()
    return gradients_of(model)


def _train(model: Any, rank: int, forwards: list[tuple[Any, ...]] | None = None) -> list[Any]:
    """Gradients of seven steps: zeroed to None, to zero, not at all, and accumulated under no_sync."""
    seen = []
    for step in range(7):
        arguments = forwards[step] if forwards else ()
        if step in (1, 2, 6):
            model.zero_grad()
        if step == 4:
            model.zero_grad(set_to_none=False)
        if step == 5:
            with model.no_sync():
                seen.append(_backward(model, samples(rank, 50), *arguments))
        seen.append(_backward(model, samples(rank, step), *arguments))
    return seen


def _all_reduce_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


PLAIN: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "batched copies": {"batched_grad_copy": True},
    "batched views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "mixed precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("given", PLAIN.values(), ids=PLAIN)
@on_ranks(2)
def test_gradients_are_the_same(rank: int, size: int, given: dict[str, Any]) -> None:
    """Over the rebuild, kept gradients and no_sync, with and without a comm hook, gradients don't depend on it."""
    for hooked in (False, True):
        if hooked and "mixed_precision" in given:
            continue
        found = []
        for lazy in (False, True):
            model = wrap(mlp(), bucket_cap_mb=SMALL, lazy_bucket_allocation=lazy, **given)
            if hooked:
                model.register_comm_hook(None, _all_reduce_hook)
            found.append(_train(model, rank))
            assert len(model.buckets()) > 1
            assert model.buckets()[0].bytes > 0
        assert_same(found[1], found[0])


UNUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "found": ({"find_unused_parameters": True}, ["lr", "l", "r", "r", "lr", "l", "r"]),
    "views": ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, ["lr", "l", "r", "r", "lr", "l", "r"]),
    "skipped": ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, ["l", "r"] * 3 + ["l"]),
    "static": ({"static_graph": True}, ["l"] * 7),
}


@pytest.mark.parametrize(("given", "heads"), UNUSED.values(), ids=UNUSED)
@on_ranks(2)
def test_unused_parameters(rank: int, size: int, given: dict[str, Any], heads: list[str]) -> None:
    """Parameters that are unused on some ranks or on all leave the same gradients behind as without it."""
    if "skip_all_reduce_unused_params" not in given and rank == 1 and "static_graph" not in given:
        heads = heads[::-1]
    found = []
    for lazy in (False, True):
        model = wrap(Heads(), bucket_cap_mb=SMALL, lazy_bucket_allocation=lazy, **given)
        found.append(_train(model, rank, [(head,) for head in heads]))
    assert_same(found[1], found[0])


@on_ranks(2)
def test_uneven_inputs(rank: int, size: int) -> None:
    """A rank that has run out of inputs answers with zeros; the others' gradients are as without it."""
    found = []
    for lazy in (False, True):
        model = wrap(mlp(), bucket_cap_mb=SMALL, lazy_bucket_allocation=lazy)
        seen = []
        with model.join():
            for step in range(2 + 2 * rank):
                seen.append(_backward(model, samples(rank, step)))
        found.append([*seen, dict(model.state_dict())])
    assert_same(found[1], found[0])


@on_ranks(2)
def test_sparse_gradients(rank: int, size: int) -> None:
    """Sparse gradients, whose buckets hold no memory of their own, travel beside lazy ones."""
    for lazy in (False, True):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))
        model = wrap(net, lazy_bucket_allocation=lazy)
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([rank, step, 7])).sum().backward()
        gradient = net[0].weight.grad
        assert gradient.is_sparse
        rows = gradient.coalesce().indices().flatten().tolist()
        assert rows == sorted({0, 1, 2, 7})


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_only_views_keep_a_bucket(rank: int, size: int, as_view: bool) -> None:
    """After a backward the memory of its buckets lives on in gradients that are views of it, and nowhere else."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(weakref.ref(bucket.buffer().untyped_storage()))
        return _all_reduce_hook(state, bucket)

    model = wrap(mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view, lazy_bucket_allocation=True)
    model.register_comm_hook(None, hook)
    for step in range(2):
        model.zero_grad()
        _backward(model, samples(rank, step))
    if as_view:
        assert seen[-1]() is not None
    model.zero_grad()
    # A backend's thread lets go of its work a moment later.
    wait_until(lambda: not any(reference() for reference in seen), "the end of the buckets")


def _resident() -> int:
    """Bytes of memory that this process has written; pages of its libraries come and go as the machine has need."""
    found = re.search(r"^Anonymous: +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("lazy", [False, True])
@on_ranks(2)
def test_no_memory_between_steps(rank: int, size: int, lazy: bool) -> None:
    """Between two steps a lazy model holds no bucket: 32 MiB less for parameters of 32 MiB."""
    big = nn.Linear(4096, 2048, bias=False)
    gc.collect()  # what the tests before left in this process
    before, half = _resident(), big.weight.nbytes // 2
    model = wrap(big, lazy_bucket_allocation=lazy)
    for _ in range(2):
        model(torch.ones(1, 4096)).sum().backward()
        model.zero_grad()
    if lazy:
        wait_until(lambda: _resident() - before < half, "the return of its memory")
    else:
        assert _resident() - before > half


class _Stop(Exception):
    pass


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_after_a_backward_that_failed(rank: int, size: int, as_view: bool) -> None:
    """A backward that an exception ended leaves no bucket behind that the next one could mistake for its own."""
    model = wrap(mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view, lazy_bucket_allocation=True)
    expected = _train(wrap(mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=as_view), rank)
    _backward(model, samples(rank, 0))

    def stop(gradient: torch.Tensor) -> None:
        raise _Stop

    handle = model.module[0].weight.register_hook(stop)
    with pytest.raises(_Stop):
        _backward(model, samples(rank, 0))
    handle.remove()
    dist.barrier()
    model.zero_grad()
    assert_same(_backward(model, samples(rank, 1)), expected[1])


@on_ranks(2)
def test_an_error_reaches_every_rank(rank: int, size: int) -> None:
    """A rank that left parameters out answers for buckets that it never allocated: all ranks get its message."""
    model = wrap(Heads(), bucket_cap_mb=SMALL, lazy_bucket_allocation=True)
    model.module.never.requires_grad_(False)

    def train() -> None:
        for step in range(3):
            _backward(model, samples(rank, step), "l" if rank == 1 and step == 1 else "lr")

    with pytest.raises(RuntimeError, match=r"right\.weight"):
        train()
