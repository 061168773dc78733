"""A model that changes after it was wrapped: torch silently averages something else; ours adapts and says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from ddp_lab.parallel.core import adaptation
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks
from tests.ranks.provoking import assert_trains
from tests.ranks.wrapping import wrap


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def _same(tensor: torch.Tensor) -> bool:
    return all(torch.equal(other, tensor) for other in everywhere(tensor.detach()))


def _step(model: Any, rank: int) -> None:
    model.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()


def _changes() -> dict[str, tuple[Callable[[nn.Sequential, int], Any], str]]:
    """What is done to the module on each rank, and what the warning must say."""

    def freeze(net: nn.Sequential, rank: int) -> None:
        net[1].requires_grad_(False)

    def unfreeze(net: nn.Sequential, rank: int) -> None:
        net[1].requires_grad_(True)

    def add(net: nn.Sequential, rank: int) -> None:
        torch.manual_seed(rank)
        net.append(nn.Linear(4, 4))

    def remove(net: nn.Sequential, rank: int) -> None:
        del net[2]

    def reassign(net: nn.Sequential, rank: int) -> None:
        torch.manual_seed(rank)
        net[0].weight = nn.Parameter(torch.randn(4, 4))

    def replace_child(net: nn.Sequential, rank: int) -> None:
        torch.manual_seed(rank)
        net[0] = nn.Linear(4, 4, bias=False)

    return {
        "freeze": (freeze, r"frozen: '1\.bias', '1\.weight'"),
        "unfreeze": (unfreeze, r"no longer frozen: '1\.bias', '1\.weight'"),
        "add": (add, r"added: '3\.bias', '3\.weight'"),
        "remove": (remove, r"removed: '2\.bias', '2\.weight'"),
        "reassign": (reassign, r"reassigned: '0\.weight'"),
        "replace_child": (replace_child, r"removed: '0\.bias'; reassigned: '0\.weight'"),
    }


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("name", ["freeze", "unfreeze", "add", "remove", "reassign", "replace_child"])
@on_ranks(2)
def test_changes_are_adopted(rank: int, size: int, name: str, as_view: bool) -> None:
    """A parameter frozen, unfrozen, added, removed or reassigned after wrapping: a warning names it, and all ranks
    average what is trained now; new tensors are rank 0's."""
    change, message = _changes()[name]
    net = _net()
    if name == "unfreeze":
        net[1].requires_grad_(False)
    model = DistributedDataParallel(net, gradient_as_bucket_view=as_view)
    _step(model, rank)
    _step(model, rank)
    steps, generation = model.reducer.step(), model.reducer.generation()
    change(net, rank)
    with pytest.warns(UserWarning, match=message):
        _step(model, rank)
    for _ in range(2):  # silent from here on; and the buckets are rebuilt once more
        assert all(_same(p) for p in net.parameters())
        assert all(_same(p.grad) for p in net.parameters() if p.requires_grad)
        assert all(p.grad is None for p in net.parameters() if not p.requires_grad)
        _step(model, rank)
    assert model.reducer.step() == steps + 3
    assert model.reducer.generation() > generation
    assert sorted(name for bucket in model.buckets() for name in bucket.parameters) == sorted(
        name for name, p in net.named_parameters() if p.requires_grad
    )
    assert_trains(model, rank)


@on_ranks(2)
def test_a_late_buffer(rank: int, size: int) -> None:
    """A buffer added after wrapping is named in a warning and broadcast from then on; one assigned anew is silently."""
    model = DistributedDataParallel(_net())
    _step(model, rank)
    model.module[1].register_buffer("late", torch.full((2,), float(rank)))
    with pytest.warns(UserWarning, match=r"buffers added: '1\.late'"):
        _step(model, rank)
    assert model.module[1].late.tolist() == [0.0, 0.0]
    model.module[1].late = torch.full((2,), 5.0 + rank)  # assigned anew: no change of the structure
    _step(model, rank)
    assert model.module[1].late.tolist() == [5.0, 5.0]


@on_ranks(2)
def test_ranks_that_change_differently(rank: int, size: int) -> None:
    """Another layer frozen on each rank: all ranks raise the same error, which names the parameter."""
    model = DistributedDataParallel(_net())
    _step(model, rank)
    model.module[rank].requires_grad_(False)
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught:
        _step(model, rank)
    assert everywhere(str(caught.value)) == [str(caught.value)] * 2
    assert "rank 0: parameter '0.weight' of shape [4, 4], float32, frozen" in str(caught.value)


@on_ranks(2)
def test_a_critic_frozen_in_every_other_step(rank: int, size: int) -> None:
    """A model whose parameters are all frozen for a step, as a critic's while the generator trains, goes on silently
    with the reducer it has."""
    torch.manual_seed(0)
    generator = DistributedDataParallel(nn.Linear(4, 4))
    critic = DistributedDataParallel(nn.Linear(4, 1))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            critic.requires_grad_(False)
            critic(generator(x)).sum().backward()
            critic.requires_grad_(True)
            critic(generator(x).detach()).sum().backward()
    for parameter in (*generator.parameters(), *critic.parameters()):
        assert _same(parameter.grad)
    assert critic.reducer.generation() == 1  # the rebuild after its first backward, no more


@on_ranks(2)
def test_ignored_parameters_may_change(rank: int, size: int) -> None:
    """What DDP was told to ignore can be replaced without a word, and stays a rank's own."""
    net = _net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
    model = DistributedDataParallel(net)
    _step(model, rank)
    net[2] = nn.Linear(4, 4)
    _step(model, rank)
    assert _same(net[0].weight.grad)
    assert not _same(net[2].weight.grad)


@on_ranks(2)
def test_one_rank_that_changes_alone(rank: int, size: int) -> None:
    """A layer frozen on one rank alone: that rank warns of whom it waits for, long before the group's timeout. Then it
    says what has changed where, and has sent nothing that the other rank could take for a gradient."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = DistributedDataParallel(_net(), process_group=group)
    _step(model, rank)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adaptation, "_HINT_SECONDS", 0.1)
            model.module[1].requires_grad_(False)
            with (
                pytest.warns(UserWarning, match=r"changed on rank 0 \(frozen: .* and not yet on rank 1"),
                pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as caught,
            ):
                _step(model, rank)
        assert "have changed on rank 0 (frozen: '1.bias', '1.weight') and not on rank 1" in str(caught.value)
    dist.barrier()


CONVERTED: list[dict[str, Any]] = [
    {}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"batched_grad_copy": True}
]  # fmt: skip


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("options", CONVERTED, ids=str)
@on_ranks(2)
def test_another_dtype(rank: int, size: int, options: dict[str, Any], steps_before: int) -> None:
    """A model that is converted after wrapping, before or after its first steps: one warning, and averages of the new
    dtype from the next step on."""
    net, local = _net(), _net()
    model = wrap(net, **options)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(steps_before):
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        local.to(dtype)
        for step in range(3):
            model.zero_grad(set_to_none=step != 1)
            local.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x.to(dtype)).square().sum().backward()
            said = [str(one.message) for one in caught if "have changed since" in str(one.message)]
            assert len(said) == (step == 0)
            name = str(dtype).removeprefix("torch.")
            assert all(f"now {name} on cpu: '0.bias', '0.weight'" in text for text in said)
            local(x.to(dtype)).square().sum().backward()
            for mine, other in zip(net.parameters(), local.parameters(), strict=True):
                dist.all_reduce(other.grad)
                assert mine.grad.dtype == dtype
                torch.testing.assert_close(mine.grad, other.grad / size)
                assert _same(mine.grad)


@on_ranks(2)
def test_mixed_precision_is_no_change(rank: int, size: int) -> None:
    """The low-precision copies that a forward puts into the parameters do not count as a change of the model."""
    from torch.nn.parallel.distributed import _MixedPrecision

    model = DistributedDataParallel(_net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _step(model, rank)
            first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))  # the second begins in low precision
            (first + second).sum().backward()
    assert all(_same(p.grad) for p in model.parameters())


@on_ranks(2)
def test_optimizers_in_backward_of_another_dtype(rank: int, size: int) -> None:
    """Optimizers in the backward go on stepping, and drop the gradients, after the model was converted."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = DistributedDataParallel(_net())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    _step(model, rank)
    model.double()
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    with pytest.warns(UserWarning, match="now float64 on cpu"):
        model(x).square().sum().backward()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is None
        assert not torch.equal(old, parameter)
        assert _same(parameter)


def _emptied_and_loaded(net: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.to("meta").to_empty(device="cpu")
    net.load_state_dict(state)


# What leaves every parameter as it was, but for the node that accumulates its gradient.
CONVERSIONS: dict[str, Callable[[nn.Sequential], object]] = {
    "double and float": lambda net: net.double().float(),
    "half and float": lambda net: net.half().float(),
    "a part": lambda net: net[0].double().float(),
    "type": lambda net: net.type(torch.float64).type(torch.float32),
    "to and back": lambda net: net.to(torch.bfloat16).to(torch.float32),
    "twice": lambda net: net.double().float().half().float(),
    "cpu": lambda net: net.cpu(),
    "frozen and thawed": lambda net: net.requires_grad_(False).requires_grad_(True),
    "frozen, converted, thawed": lambda net: net.requires_grad_(False).double().float().requires_grad_(True),
    "new data": lambda net: [setattr(one, "data", one.data.clone()) for one in net.parameters()],
    "new data of another type": lambda net: [
        setattr(one, "data", one.data.to(dtype)) for dtype in (torch.float64, torch.float32) for one in net.parameters()
    ],
    "emptied and loaded": _emptied_and_loaded,
    "detached": lambda net: [one.detach_().requires_grad_() for one in net.parameters()],
}


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "bucket_cap_mb": 0.00001},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
@on_ranks(2)
def test_gradients_are_averaged_after_a_conversion(rank: int, size: int, options: dict[str, Any]) -> None:
    """Between two steps, with and without zeroed gradients and accumulation, in silence."""
    for name, convert in CONVERSIONS.items():
        net = _net()
        model = DistributedDataParallel(net, **options)
        for step in range(6):
            if step in (1, 4):  # before and after the buckets are rebuilt
                convert(net)
            if step == 3 and "static_graph" not in options:
                with model.no_sync():
                    _step(model, rank)
            model.zero_grad(set_to_none=step != 2)
            model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
            assert all(_same(one.grad) for one in net.parameters()), f"{name}, step {step}"
