"""Gradients on real ranks: equal to torch's DistributedDataParallel, and to one process on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.ranks.conftest import Ranks
from tests.ranks.models import MODELS, batch_of, loss_of

STEPS = 4


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    bucket_cap_mb: float | None = None
    as_view: bool = False
    set_to_none: bool = True
    accumulate: int = 1
    zero: bool = True


def _snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.module.named_parameters()}
    return grads | {f"buffer {name}": b.clone() for name, b in model.module.named_buffers()}


def _train(model: torch.nn.Module, name: str, rank: int, variant: Variant) -> list[dict[str, torch.Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(STEPS):
        if variant.zero:
            optimizer.zero_grad(set_to_none=variant.set_to_none)
        for part in range(variant.accumulate):
            last = part == variant.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model(batch_of(MODELS[name], rank, 10 * step + part))).backward()
        seen.append(_snapshot(model))
        optimizer.step()
    return seen


def _assert_equal(ours: list[Any], torchs: list[Any], what: str) -> None:
    for step, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            other = theirs[name]
            assert (gradient is None) == (other is None), f"{what}, step {step}: {name}"
            if gradient is not None:
                assert gradient.stride() == other.stride(), f"{what}, step {step}: strides of {name}"
                assert torch.equal(gradient, other), f"{what}, step {step}: {name} differs"


def _pair(name: str, register: Callable[[Any, int], None] | None = None, **arguments: Any) -> tuple[Any, Any]:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(7)
    module = MODELS[name].build()
    pair = (DistributedDataParallel(copy.deepcopy(module), **arguments), TorchDDP(copy.deepcopy(module), **arguments))
    for index, model in enumerate(pair):
        if register is not None:
            register(model, index)
    return pair


def _grid_on_rank(rank: int, size: int, name: str, variants: list[Variant]) -> int:
    for variant in variants:
        ours, torchs = _pair(name, bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=variant.as_view)
        mine, theirs = (_train(model, name, rank, variant) for model in (ours, torchs))
        _assert_equal(mine, theirs, f"{name} {variant}")
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
    from ddp_lab import DistributedDataParallel

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


def _hook_setup(kind: str) -> Callable[[Any, int], None]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    def register(model: Any, index: int) -> None:
        if kind == "allreduce":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        elif kind == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif kind == "fp16 over powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
        elif kind == "quantized":
            model.register_comm_hook(torch.distributed.group.WORLD, quantization_pertensor_hook)
        else:
            model._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, kind))

    return register


HOOKS = ["ALLREDUCE", "FP16_COMPRESS", "allreduce", "fp16", "fp16 over powersgd", "powersgd"]


def _hook_on_rank(rank: int, size: int, kind: str) -> None:
    # PowerSGD's callbacks wait for collectives on Gloo's two threads: with several buckets it hangs under torch too
    cap = None if "powersgd" in kind else 0.0005
    # and the two together overflow fp16 on the convolutions
    names = ("mlp", "shared", "frozen") + (() if kind == "fp16 over powersgd" else ("conv", "channels_last"))
    for name in names:
        for variant in (Variant(cap), Variant(None, as_view=True), Variant(cap, accumulate=2)):
            seen = []
            for model in _pair(
                name, _hook_setup(kind), bucket_cap_mb=variant.bucket_cap_mb, gradient_as_bucket_view=variant.as_view
            ):
                torch.manual_seed(3)  # PowerSGD draws random numbers
                seen.append(_train(model, name, rank, variant))
            _assert_equal(*seen, f"{kind} {name} {variant}")


@pytest.mark.parametrize("kind", HOOKS)
def test_torchs_comm_hooks_run_unchanged(ranks: Ranks, kind: str) -> None:
    """Torch's own comm hooks give on our reducer, bit by bit, the gradients that they give on torch's."""
    ranks(2, _hook_on_rank, kind)


def _own_hook_on_rank(rank: int, size: int) -> None:
    """A hook that returns another tensor than the buffer, in another order of arrival."""
    from ddp_lab import DistributedDataParallel

    seen: list[tuple[int, bool, int, list[tuple[int, ...]]]] = []
    model: Any = None

    def hook(state: str, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert state == "state"
        assert model.buckets()[bucket.index()].bytes == bucket.buffer().nbytes  # the model may be asked meanwhile
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters()), [g.shape for g in bucket.gradients()]))
        future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2.0)

    for as_view in (False, True):
        torch.manual_seed(7)
        model = DistributedDataParallel(MODELS["mlp"].build(), bucket_cap_mb=0.0005, gradient_as_bucket_view=as_view)
        plain = DistributedDataParallel(copy.deepcopy(model.module), bucket_cap_mb=0.0005)
        model.register_comm_hook("state", hook)
        for step in range(3):
            seen.clear()
            model.zero_grad()
            plain.zero_grad()
            x = batch_of(MODELS["mlp"], rank, step)
            loss_of(model(x)).backward()
            loss_of(plain(x)).backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad * 2 * size)
        assert [index for index, *_ in seen] == list(range(len(model.buckets())))
        assert [last for _, last, *_ in seen] == [False] * (len(seen) - 1) + [True]


def test_a_hook_of_the_users(ranks: Ranks) -> None:
    """A user's hook sees buckets in launch order, undivided, and what its future holds becomes the gradient."""
    ranks(2, _own_hook_on_rank)
