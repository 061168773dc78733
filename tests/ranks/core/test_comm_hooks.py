"""Comm hooks: torch's own give on our reducer what they give on torch's; a hook of the user's gets what it needs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.models import MODELS, batch_of, loss_of
from tests.ranks.provoking import assert_trains, batch
from tests.ranks.training import Variant, assert_equal, pair, train

Register = Callable[[Any], None]


def _power(hook: Callable[..., Any], **options: Any) -> Register:
    def register(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5, **options)
        model.register_comm_hook(state, hook)

    return register


def _plain(hook: Callable[..., Any], state: Any = None) -> Register:
    return lambda model: model.register_comm_hook(state, hook)


def _local_sgd(model: Any) -> None:
    group = dist.new_subgroups(1)[0]
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, group, 2), post_localSGD_hook.post_localSGD_hook
    )


def _of_type(kind: str) -> Register:
    return lambda model: ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType[kind], model, None)


HOOKS: dict[str, Register] = {
    "builtin ALLREDUCE": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin FP16_COMPRESS": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    "allreduce": _plain(default_hooks.allreduce_hook),
    "fp16": _plain(default_hooks.fp16_compress_hook),
    # by its own name it is refused where there is no NCCL
    "bf16": _plain(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    "fp16 wrapper": _plain(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": _plain(
        lambda state, bucket: default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)
    ),
    "powersgd": _power(powerSGD_hook.powerSGD_hook, matrix_approximation_rank=2),
    "powersgd cold": _power(powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False),
    "fp16 over powersgd": _power(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "noop": _plain(noop_hook),
    "post_localSGD": _local_sgd,
    **{kind: _of_type(kind) for kind in ("POWER_SGD", "BATCHED_POWER_SGD")},
}
# Some need NCCL (they expect its form of gathered tensors), or are broken in some releases of torch.
FRAGILE: dict[str, Register] = {
    "batched powersgd": _power(powerSGD_hook.batched_powerSGD_hook),
    "quantized per tensor": _plain(quantization_pertensor_hook),
    "quantized per channel": _plain(quantization_perchannel_hook),
}
# Their callbacks wait for collectives on Gloo's two threads: with several buckets they hang under torch too.
ONE_BUCKET = ("power", "POWER")


@pytest.mark.parametrize("each", ["one way", pytest.param("every way", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", HOOKS)
@on_ranks(2)
def test_torchs_hooks_run_unchanged(rank: int, size: int, kind: str, each: str) -> None:
    """Each hook of torch's gives on our reducer, in each step, bit by bit the gradients that it gives on torch's: each
    model trained in one way, and together in all."""
    one_bucket = any(word in kind for word in ONE_BUCKET)
    cap = None if one_bucket else 0.0005
    # Where the order within a gradient matters torch's hooks see channels-last ones permuted; fp16 overflows on conv.
    names = ("mlp", "shared", "frozen") + (() if one_bucket else ("conv", "channels_last"))
    variants = (Variant(cap), Variant(None, as_view=True), Variant(cap, accumulate=2))
    for place, name in enumerate(names):
        for variant in variants if each == "every way" else [variants[place % 3]]:
            seen = []
            models = pair(
                name,
                lambda model, index: HOOKS[kind](model),
                bucket_cap_mb=variant.bucket_cap_mb,
                gradient_as_bucket_view=variant.as_view,
            )
            for model in models:
                torch.manual_seed(3)  # PowerSGD draws random numbers
                seen.append(train(model, name, rank, variant))
            assert_equal(*seen, f"{kind} {name} {variant}")


@pytest.mark.parametrize("kind", FRAGILE)
@on_ranks(2)
def test_torchs_fragile_hooks_fare_alike(rank: int, size: int, kind: str) -> None:
    """Where a hook of torch's works, its gradients are torch's; where its own code fails, it fails the same way."""
    outcomes: list[Any] = []
    for model in pair("mlp", lambda model, index: FRAGILE[kind](model)):
        torch.manual_seed(3)
        try:
            outcomes.append(train(model, "mlp", rank, Variant()))
        except (RuntimeError, AssertionError, IndexError) as error:
            outcomes.append((type(error), str(error).splitlines()[:1]))
    if isinstance(outcomes[0], list) and isinstance(outcomes[1], list):
        assert_equal(*outcomes, kind)
    else:
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_powersgd_of_channels_last_parameters(rank: int, size: int, as_view: bool) -> None:
    """PowerSGD compresses channels-last weights as the matrices that they are: as if they were row-major."""

    def gradients(last: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 2))
        net = net.to(memory_format=torch.channels_last) if last else net
        model = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
        _power(powerSGD_hook.powerSGD_hook)(model)
        torch.manual_seed(3)
        for step in range(6):
            model.zero_grad()
            x = torch.randn(5, 3, 7, 7, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            for p in model.parameters():
                assert p.grad.stride() == p.stride()
        return [p.grad for p in model.parameters()]

    for row_major, strided in zip(gradients(False), gradients(True), strict=True):
        assert torch.allclose(row_major, strided, rtol=1e-4, atol=1e-6)


def _check_gradients(
    names: dict[int, str], alone: nn.Module, state: Any, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    assert isinstance(bucket, dist.GradBucket)
    assert not bucket.buffer().is_complex()
    own = dict(alone.named_parameters())
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        expected = own[names[id(parameter)]].grad
        assert gradient.dtype == expected.dtype
        assert torch.equal(gradient, expected)
        gradient.mul_(2)  # a view: what is written here is what the ranks average
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value() / 2)


@on_ranks(2)
def test_a_hook_sees_each_gradient_as_it_is(rank: int, size: int) -> None:
    """`bucket.gradients()` are views with the values of complex and channels-last gradients, unlike torch's."""

    class Twisted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.ParameterList(nn.Parameter(torch.randn(n, 2, dtype=torch.complex64)) for n in (3, 2))
            self.wide = nn.Parameter(torch.randn(2, 3, dtype=torch.complex128).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((p.conj() * p * x).abs().sum() for p in [*self.pair, self.wide])

    channels_last = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2)).to(
        memory_format=torch.channels_last
    )
    for net, x in ((Twisted(), torch.tensor(1.0 + rank)), (channels_last, torch.randn(2, 3, 4, 4))):
        for as_view in (False, True):
            alone = copy.deepcopy(net)
            model = DistributedDataParallel(copy.deepcopy(net), gradient_as_bucket_view=as_view, bucket_cap_mb=1e-4)
            check = functools.partial(_check_gradients, {id(p): n for n, p in model.module.named_parameters()}, alone)
            model.register_comm_hook(None, check)
            for _ in range(3):
                model.zero_grad()
                alone.zero_grad()
                alone(x).sum().backward()
                model(x).sum().backward()
                for mine, own in zip(model.parameters(), alone.parameters(), strict=True):
                    mean = own.grad.clone()
                    dist.all_reduce(torch.view_as_real(mean) if mean.is_complex() else mean)
                    assert mine.grad.stride() == mine.stride()
                    assert torch.allclose(mine.grad, mean / size)


@on_ranks(2)
def test_a_hook_may_replace_and_keep_the_buffer(rank: int, size: int) -> None:
    """`set_buffer` of another dtype changes what `buffer` and `gradients` give; a bucket outlives its model."""
    kept: list[dist.GradBucket] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        kept.append(bucket)
        bucket.set_buffer(bucket.buffer().double())
        assert all(gradient.dtype == torch.float64 for gradient in bucket.gradients())
        return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value().float())

    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
    shapes = [tuple(parameter.shape) for parameter in kept[0].parameters()]
    del model
    assert [tuple(gradient.shape) for gradient in kept[0].gradients()] == shapes  # a hook may keep its bucket


@pytest.mark.parametrize("kind", ["allreduce", "builtin ALLREDUCE", "noop", "post_localSGD"])
@on_ranks(2)
def test_complex_parameters_with_a_hook(rank: int, size: int, kind: str) -> None:
    """With a hook, buckets of float32, float64, bfloat16 and complex64 give torch's gradients."""
    for as_view in (False, True):
        models = pair("mixed_dtypes", lambda model, index: HOOKS[kind](model), gradient_as_bucket_view=as_view)
        assert_equal(*(train(model, "mixed_dtypes", rank, Variant(None, as_view)) for model in models), kind)


def _future_of(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def _averaged_in_double(bucket: dist.GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value().double())


@on_ranks(2)
def test_results_that_do_not_fit_are_errors(rank: int, size: int) -> None:
    """A hook that raises, or whose result has another type or shape, is an error that names hook and bucket; one of
    another dtype, a warning, which is said once; its values are used. After each of them the model trains on."""
    answer: Callable[[Any], Any]

    def halved(state: None, bucket: dist.GradBucket) -> Any:
        return answer(bucket)

    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)))
    model.register_comm_hook(None, halved)
    no_future = r"must return a torch.futures.Future object, but got builtins.int"
    fits = r"does not fit: '.*halved' returned \[5\] on cpu for bucket 0 \(.*\), whose gradients are 13 elements"
    warning = r"'.*halved' returned Half for bucket 0 .*, whose gradients are Float"
    for answer, told in (  # noqa: B007 - the hook calls it
        (lambda bucket: 3, pytest.raises(RuntimeError, match=no_future)),
        (
            lambda bucket: _future_of([bucket.buffer()] * 2),
            pytest.raises(RuntimeError, match="must hold one tensor"),
        ),
        (lambda bucket: _future_of(bucket.buffer()[:5].clone()), pytest.raises(RuntimeError, match=fits)),
        (lambda bucket: 1 / 0, pytest.raises(ZeroDivisionError)),
        (lambda bucket: _future_of(bucket.buffer().half()), pytest.warns(UserWarning, match=warning)),
    ):
        with told:
            model(batch(rank)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = _averaged_in_double
        assert_trains(model, rank)
    answer = functools.partial(default_hooks.allreduce_hook, None)
    assert_trains(model, rank)


@on_ranks(2)
def test_a_late_hook_is_warned_about(rank: int, size: int) -> None:
    """A hook that is registered after the first backward is accepted, with a warning that says what it missed."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.register_comm_hook(None, noop_hook)
    model(torch.randn(4, 3)).sum().backward()
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(UserWarning, match=r"register_comm_hook\(noop_hook\) was called after 1 synchronised backward"):
        model.register_comm_hook(None, noop_hook)


@on_ranks(2)
def test_a_hook_of_the_users(rank: int, size: int) -> None:
    """A user's hook sees buckets in launch order, undivided, and what its future holds becomes the gradient."""
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
