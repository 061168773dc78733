"""Buckets, order and comm hook change between the same two backwards on all ranks, whatever the ranks do meanwhile."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from ddp_lab import DistributedDataParallel
from ddp_lab.protocol.messages import Change
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks

SMALL = 1e-4  # MiB: a layer of 5 x 5 floats


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])


def _model(**arguments: Any) -> Any:
    return DistributedDataParallel(_net(), **arguments)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def _step(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    model(_batch(rank, step)).square().sum().backward()


def _expect_average(model: Any, step: int, ranks: list[int], tolerance: float = 0.0) -> None:
    """The gradients are those of the same module on all ranks' batches, averaged."""
    alone = copy.deepcopy(model.module)
    sums = [torch.zeros_like(p) for p in alone.parameters()]
    for rank in ranks:
        alone.zero_grad()
        alone(_batch(rank, step)).square().sum().backward()
        for total, p in zip(sums, alone.parameters(), strict=True):
            total += p.grad / len(ranks)
    for p, total in zip(model.module.parameters(), sums, strict=True):
        assert torch.allclose(p.grad, total, rtol=1e-5 + tolerance, atol=1e-5 + tolerance)


CHANGES: dict[str, tuple[dict[str, Any], int, str | None, float]] = {
    "cap": ({"bucket_cap_mb": SMALL}, 4, None, 0.0),
    "first bucket": ({"first_bucket_mb": SMALL}, 2, None, 0.0),
    "list": ({"bucket_cap_mb_list": [SMALL, 1.0]}, 2, None, 0.0),
    "order": ({"order": "registration", "bucket_cap_mb": SMALL}, 4, None, 0.0),
    "fp16": ({"comm_hook": "fp16"}, 1, "BuiltinCommHookType.FP16_COMPRESS", 2e-2),
    "bf16": ({"comm_hook": "bf16"}, 1, "bf16_compress_hook", 1e-1),
    "powersgd": ({"comm_hook": "powersgd"}, 1, "powerSGD_hook", 1e9),
    "own": ({"comm_hook": "mine", "bucket_cap_mb": SMALL}, 4, "_own_hook", 0.0),
}


def _own_hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
@on_ranks(2)
def test_everything_can_be_changed_and_changed_back(rank: int, size: int, kind: str, as_view: bool) -> None:
    """After each kind of change the buckets and the hook are the new ones, and the gradients the ranks' average."""
    what, buckets, hook, tolerance = CHANGES[kind]
    DistributedDataParallel.register_named_comm_hook("mine", _own_hook, lambda model: [])
    model = _model(gradient_as_bucket_view=as_view)
    for step in range(3):
        _step(model, rank, step)
    before = model.buckets()[0].generation
    model.reconfigure(**what)
    found = model.configuration()
    assert (found["buckets"], found["comm_hook"]) == (buckets, hook)
    assert model.buckets()[0].generation == before + 1
    if kind == "order":
        assert model.buckets()[0].parameters == ("0.weight", "0.bias")
    for step in range(3, 6):
        _step(model, rank, step)
        _expect_average(model, step, list(range(size)), tolerance)
    if kind == "own":
        assert model._comm_hooks[-1][1] == list(range(buckets)) * 3
    model.reconfigure(comm_hook="none", bucket_cap_mb=25, order="ready")
    assert (model.configuration()["buckets"], model.configuration()["comm_hook"]) == (1, None)
    _step(model, rank, 7)
    _expect_average(model, 7, list(range(size)))


def _expect_nothing_changed(model: Any) -> None:
    assert model._live.applied is None
    assert model.configuration()["bucket_cap_mb"] == 25


@pytest.mark.filterwarnings("ignore:register_comm_hook:UserWarning")
@on_ranks(2)
def test_what_can_not_be_is_refused(rank: int, size: int) -> None:
    """What makes no sense is refused in words on every rank, and nothing has changed."""
    model = _model()
    said: dict[str, str] = {}

    def refused(kind: str, **what: Any) -> None:
        try:
            model.reconfigure(**what)
        except (RuntimeError, ValueError) as error:
            said[kind] = str(error)

    refused("nothing")
    refused("cap", bucket_cap_mb=0)
    refused("both", bucket_cap_mb=1, bucket_cap_mb_list=[1])
    refused("order", order="alphabetical")
    refused("names", order=["0.weight"])
    refused("hook", comm_hook="fp61")
    refused("power", comm_hook="powersgd", bucket_cap_mb=SMALL)
    refused("different", bucket_cap_mb=1 + rank)
    loss = model(_batch(rank, 0)).sum()
    loss.register_hook(lambda gradient: refused("backward", bucket_cap_mb=1))
    loss.backward()
    _expect_nothing_changed(model)
    model.register_comm_hook(None, noop_hook)
    refused("uncoupled", bucket_cap_mb=1)
    assert "no change was given" in said["nothing"]
    assert "must be positive" in said["cap"]
    assert "bucket_cap_mb_list can't be combined" in said["both"]
    assert "registration" in said["order"]
    assert "each of the 8 trained parameters" in said["names"]
    assert "did you mean 'fp16'?): choose one of 'none', 'fp16'" in said["hook"]
    assert "PowerSGD hangs on Gloo with several buckets" in said["power"]
    assert "different arguments on rank 1" in said["different"]
    assert "during a backward" in said["backward"]
    assert "do not synchronise in each backward" in said["uncoupled"]


# -- live: each rank is told at another moment


def _tell(model: Any, rank: int, name: str, **what: Any) -> None:
    model._live.prepare(name, Change(**what))


def _plain(model: Any, rank: int, step: int) -> None:
    _step(model, rank, step)


def _accumulating(model: Any, rank: int, step: int) -> None:
    """Another number of forwards under no_sync on each rank."""
    model.zero_grad()
    with model.no_sync():
        for _ in range(1 + (rank + step) % 3):
            model(_batch(rank, step)).sum().backward()
    model.zero_grad()
    model(_batch(rank, step)).square().sum().backward()


def _looking(model: Any, rank: int, step: int) -> None:
    """Rank 0, and later rank 1, also run forwards that have no backward."""
    if (rank, step % 2) in ((0, 0), (1, 1)):
        model(_batch(rank, step))
    _step(model, rank, step)


def _two_at_once(model: Any, rank: int, step: int) -> None:
    """Two forwards, then two backwards."""
    model.zero_grad()
    model(_batch(rank, 50))
    losses = [model(_batch(rank, number)).square().sum() for number in (60, step)]
    losses[0].backward()
    model.zero_grad()
    losses[1].backward()


def _by_hand(model: Any, rank: int, step: int) -> None:
    """Only under no_sync, with sync_gradients()."""
    model.zero_grad()
    with model.no_sync():
        model(_batch(rank, step)).square().sum().backward()
    model.sync_gradients()


def _failing(model: Any, rank: int, step: int) -> None:
    """On each rank another backward fails, before or after the first gradient, and is run again."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    if step % 2 == rank:
        model.zero_grad()
        last = model.module[3]
        hooked = (last.weight if rank else last.bias).register_hook(fail)
        with contextlib.suppress(ValueError):
            model(_batch(rank, step)).square().sum().backward()
        hooked.remove()
    _step(model, rank, step)


LOOPS: dict[str, Callable[[Any, int, int], None]] = {
    "plain": _plain,
    "no_sync": _accumulating,
    "forwards without a backward": _looking,
    "two at once": _two_at_once,
    "sync_gradients": _by_hand,
    "backwards that fail": _failing,
}


# Re-armed and failing backwards are tested without options.
LIVE = [
    *((kind, {}) for kind in LOOPS),
    *(
        (kind, {option: True})
        for kind in ("plain", "no_sync", "forwards without a backward", "sync_gradients")
        for option in ("find_unused_parameters", "static_graph")
    ),
]


@pytest.mark.parametrize(("kind", "options"), LIVE)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True:UserWarning")
@on_ranks(3)
def test_all_ranks_change_after_the_same_backward(rank: int, size: int, kind: str, options: dict[str, Any]) -> None:
    """Told at different moments, all ranks make each change after equally many backwards, and average rightly."""
    signals = dist.new_group(list(range(size)))  # for what the test itself has to agree on
    model = _model(**options)
    made = []
    steps = itertools.count()
    for number, what in enumerate(({"bucket_cap_mb": SMALL}, {"comm_hook": "fp16"}, {"bucket_cap_mb": 1.0})):
        for moment in range(8):
            if moment == 2:
                dist.barrier(signals)
            if moment == (2 if rank == 0 else rank % 2):  # rank 0 is told last
                _tell(model, rank, f"{kind} {number}", **what)
            step = next(steps)
            LOOPS[kind](model, rank, step)
            _expect_average(model, step, list(range(size)), 2e-2 if number else 0.0)
        assert not model._live.waiting
        assert model._live.applied.name == f"{kind} {number}"
        made.append((model._live.applied.after, len(model._sync.assignment)))
    first, *others = everywhere(made)
    assert others == [first] * 2
    assert [buckets for _, buckets in first] == [4, 4, 1]
    assert len({after for after, _ in first}) == 3


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_ranks_without_inputs_change_too(rank: int, size: int, late: bool) -> None:
    """Inside join() all ranks change together, also when the rank that decides has run out of inputs, and even if it
    hears of the change after its last input: then it decides in the backwards that it shadows."""
    model = _model()
    if rank == 1 or not late:
        _tell(model, rank, "join", bucket_cap_mb=SMALL)
    with model.join():
        for step in range(7 if rank == 1 else 1 if late else 3):
            _step(model, rank, step)
        if rank == 0 and late:
            _tell(model, rank, "join", bucket_cap_mb=SMALL)
    assert len(model._sync.assignment) == 4
    assert len(set(everywhere(model._live.applied.after))) == 1


@on_ranks(3)
def test_a_model_of_some_ranks(rank: int, size: int) -> None:
    """A model on some ranks changes on these, with the first of them deciding."""
    group, after = dist.new_group([1, 2]), None
    if rank:
        model = _model(process_group=group)
        if rank == 2:
            _tell(model, rank, "subgroup", bucket_cap_mb=SMALL)
        for step in range(6):
            if step == 2:
                dist.barrier(group)
                if rank == 1:
                    _tell(model, rank, "subgroup", bucket_cap_mb=SMALL)
            _step(model, rank, step)
            _expect_average(model, step, [1, 2])
        assert len(model._sync.assignment) == 4
        after = model._live.applied.after
    _, first, second = everywhere(after)
    assert first == second


@on_ranks(2)
def test_a_change_can_be_withdrawn_until_it_is_decided(rank: int, size: int) -> None:
    """What is withdrawn before a forward leaves no trace; what has been made stays."""
    model = _model()
    _tell(model, rank, "first", bucket_cap_mb=SMALL)
    gone = model._live.withdraw("first")
    for step in range(3):
        _step(model, rank, step)
    assert len(model._sync.assignment) == 1
    dist.barrier()
    _tell(model, rank, "second", bucket_cap_mb=SMALL)
    for step in range(2):
        _step(model, rank, step)
    kept = model._live.withdraw("second")
    assert len(model._sync.assignment) == 4
    assert (gone, kept) == (True, False)


@on_ranks(2)
def test_a_new_group_finds_the_ranks_in_different_states(rank: int, size: int) -> None:
    """If a failure struck when rank 0 had made a change, of which rank 1 had only heard, that one makes it with the new
    group."""
    model = _model(find_unused_parameters=False)
    for step in range(2):
        _step(model, rank, step)
    if rank == 0:
        from ddp_lab.parallel.live import change

        decision = change.decide(model._sync, change.Change(bucket_cap_mb=SMALL, comm_hook="fp16"))
        model._live._carry_out(decision, "half")
    else:
        _tell(model, rank, "half", bucket_cap_mb=SMALL, comm_hook="fp16")
    model._update_process_group(dist.new_group(list(range(size))))
    for step in range(4):
        _step(model, rank, step)
        _expect_average(model, step, list(range(size)), 2e-2)
    assert model.configuration()["comm_hook"] == "BuiltinCommHookType.FP16_COMPRESS"
    assert len(model._sync.assignment) == 4
    assert len(set(everywhere((int(model.reducer.generation()), int(model.reducer.finished()))))) == 1


@pytest.mark.filterwarnings("ignore:The parameters of:UserWarning")
@on_ranks(2)
def test_the_model_changes_in_the_same_forward(rank: int, size: int) -> None:
    """A model whose parameters change in the forward in which the buckets are to change takes both."""
    model = _model()
    _tell(model, rank, "changed", bucket_cap_mb=SMALL, order="registration")
    for step in range(6):
        if step == 2:  # the change is due in this forward
            model.module[0].requires_grad_(False)
        model.zero_grad()
        model(_batch(rank, step)).square().sum().backward()
    assert len(model._sync.assignment) == 3
    assert len(set(everywhere(model._live.applied.after))) == 1
