"""Uneven inputs: the join context on real ranks, compared with torch's class."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

import ddp_lab
from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same, assert_same_on_all_ranks, mlp, same_as_torch, samples, state_of
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import FORWARD_SYNC

SMALL = 0.0005  # MiB: several buckets


class Branched(nn.Module):
    """One of two heads is used, by the inputs' first row: unused parameters differ by rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.left, self.right, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.body(x)
        return self.left(body) if x[0, 0] > 0 else self.right(body)


def normed() -> nn.Module:
    """Has buffers that each forward changes."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


BUILD: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "branched": Branched, "normed": normed}

# name: model, constructor arguments, join arguments, iterations by rank
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[int]]] = {
    "last rank trains longest": ("mlp", {}, {}, [1, 2, 3, 6]),
    "rank 0 trains longest": ("mlp", {}, {}, [6, 2, 2, 1]),
    "some have nothing": ("mlp", {}, {}, [0, 3, 0, 4]),
    "none has anything": ("mlp", {}, {}, [0, 0, 0, 0]),
    "even": ("mlp", {}, {}, [3, 3, 3, 3]),
    "divided by who trains": ("mlp", {}, {"divide_by_initial_world_size": False}, [1, 2, 3, 6]),
    "bucket views": ("mlp", {"gradient_as_bucket_view": True}, {}, [2, 1, 5, 3]),
    "buffers": ("normed", {}, {}, [2, 1, 5, 3]),
    "buffers left alone": ("normed", {"forward_sync_buffers": False}, {}, [2, 1, 5, 3]),
    "unused parameters": ("branched", {"find_unused_parameters": True}, {}, [1, 4, 2, 6]),
    "unused, divided by who trains": (
        "branched",
        {"find_unused_parameters": True},
        {"divide_by_initial_world_size": False},
        [6, 1, 4, 2],
    ),
    "disabled": ("mlp", {}, {"enable": False}, [3, 3, 3, 3]),
}


def _train(model: Any, rank: int, iterations: int) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(iterations):
        optimizer.zero_grad()
        model(samples(rank, step)).square().mean().backward()
        optimizer.step()
        # A joined rank of torch's adds to the map of used parameters what was used in the iteration before: some that
        # nobody used get zeros there, and keep no gradient with ours. The weights do not differ.
        seen.append(dict(model.state_dict()) if model.find_unused_parameters else state_of(model))
    return seen


@pytest.mark.parametrize("name", [name for name in CASES if FORWARD_SYNC or name != "buffers left alone"])
@on_ranks(4)
def test_uneven_inputs(rank: int, size: int, name: str) -> None:
    """Ranks with different numbers of batches train as with torch's class, and end with the last one's model."""
    build, arguments, joined, iterations = CASES[name]

    def program(wrap: Any) -> Any:
        torch.manual_seed(1)
        model = wrap(BUILD[build](), bucket_cap_mb=SMALL, **arguments)
        seen = []
        for _ in range(2):  # two epochs: the second begins with models that are equal again
            with model.join(**joined):
                seen.append(_train(model, rank, iterations[rank]))
        last = getattr(model, "_authoritative_rank", None)
        return seen, {key: value.clone() for key, value in model.state_dict().items()}, last

    _, state, last = same_as_torch(program)
    if arguments.get("forward_sync_buffers", True):
        assert_same_on_all_ranks(state)
    longest = max(iterations)
    if joined.get("enable", True):
        assert last == max(rank for rank, own in enumerate(iterations) if own == longest)


@on_ranks(4)
def test_static_graph(rank: int, size: int) -> None:
    """With a static graph joined ranks shadow the first backward too, even one that never had inputs (torch's dies).
    Its buckets are rebuilt a step later, so sums may round differently in that step."""

    def train(static: bool) -> list[Any]:
        model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL, static_graph=static)
        with model.join():
            seen = _train(model, rank, [0, 4, 2, 6][rank])
        return [*seen, dict(model.state_dict())]

    assert_same(train(True), train(False), exact=False)


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_comm_hooks_of_joined_ranks(rank: int, size: int, unused: bool) -> None:
    """A joined rank sends zeros through the comm hook, whose state advances with the others': compression, PowerSGD."""

    def program(wrap: Any, power: Any = None) -> Any:
        torch.manual_seed(1)
        # PowerSGD communicates from callbacks: with several buckets over Gloo their order may differ between ranks
        cap = 25 if power else SMALL
        model = wrap(BUILD["branched" if unused else "mlp"](), bucket_cap_mb=cap, find_unused_parameters=unused)
        if power:
            model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with model.join():
            seen = _train(model, rank, [6, 2][rank])
        return [*seen, dict(model.state_dict())]

    same_as_torch(program)
    # Joined ranks of torch's fail in this hook.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    assert_same_on_all_ranks(program(DistributedDataParallel, state)[-1])
    steps = torch.tensor([state.iter])
    dist.broadcast(steps, 0)
    assert steps.item() == state.iter > 2


@pytest.mark.parametrize("build", list(BUILD))
@on_ranks(4)
def test_iterations_without_synchronisation(rank: int, size: int, build: str) -> None:
    """Joined ranks shadow no backward of an iteration under no_sync, and go on shadowing after it."""

    def program(wrap: Any) -> Any:
        torch.manual_seed(1)
        model = wrap(BUILD[build](), bucket_cap_mb=SMALL, find_unused_parameters=build == "branched")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range([9, 3, 5, 1][rank]):
                with model.no_sync() if step % 3 else contextlib.nullcontext():
                    model(samples(rank, step)).square().mean().backward()
                if step % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return dict(model.state_dict())

    assert_same_on_all_ranks(same_as_torch(program))


@on_ranks(2)
def test_forwards_without_gradients(rank: int, size: int) -> None:
    """An evaluating forward inside the context is shadowed as what it is: no rank waits for a backward of it."""
    model = DistributedDataParallel(normed(), bucket_cap_mb=SMALL)
    with model.join():
        for step in range(1 + 3 * rank):
            model(samples(rank, step)).square().mean().backward()
            with torch.no_grad():
                model(samples(rank, step))  # torch's joined ranks would wait for a backward here
    assert_same_on_all_ranks(dict(model.state_dict()))


@on_ranks(4)
def test_throw_on_early_termination(rank: int, size: int) -> None:
    """The first rank without inputs ends the loop on all ranks, in the same iteration, with torch's errors."""
    iterations = [4, 2, 3, 2]

    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        done = []

        def train() -> None:
            for step in range(iterations[rank]):
                model(samples(rank, step)).square().mean().backward()
                done.append(step)

        expected = "exhausted all inputs" if iterations[rank] == min(iterations) else "at least one rank that exhausted"
        with pytest.raises(RuntimeError, match=expected), model.join(throw_on_early_termination=True):
            train()
        return len(done), state_of(model)

    steps, state = same_as_torch(program)
    assert steps == min(iterations)
    assert_same_on_all_ranks(state)


@pytest.mark.parametrize("divide", [True, False])
@on_ranks(4)
def test_together_with_zero(rank: int, size: int, divide: bool) -> None:
    """In one context with ZeroRedundancyOptimizer, which broadcasts its shards in every step, nothing hangs."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def program(wrap: Any) -> Any:
        model = wrap(mlp(), bucket_cap_mb=SMALL)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
        with Join([model, optimizer], divide_by_initial_world_size=divide):
            for step in range([5, 2, 1, 3][rank]):
                model(samples(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict())

    assert_same_on_all_ranks(same_as_torch(program))


@on_ranks(2)
def test_protocol(rank: int, size: int) -> None:
    """An exception inside the context leaves it unchanged; device and group are the model's; groups must agree."""
    model = DistributedDataParallel(mlp())

    def fail() -> None:
        model(samples(rank, 0)).square().mean().backward()
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"), model.join():
        fail()
    assert model.join_device == torch.device("cpu")
    assert model.join_process_group is dist.group.WORLD
    with pytest.raises(ValueError, match="multiple process groups"):
        Join([model, DistributedDataParallel(mlp(), process_group=dist.new_group())])


@on_ranks(2)
def test_a_second_backward_is_refused(rank: int, size: int) -> None:
    """Inside join() a second backward of one forward raises: ranks without inputs would miss it; outside it works."""
    model = ddp_lab.DistributedDataParallel(mlp())
    with model.join():
        loss = model(samples(rank, 0)).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    model(samples(rank, 0)).square().mean().backward()
    loss = model(samples(rank, 1)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    text = str(caught.value)
    assert text.startswith("a second backward can't be synchronised inside join()")


@on_ranks(2)
def test_sync_batchnorm_is_warned_of_before_it_hangs(rank: int, size: int) -> None:
    """join with SyncBatchNorm and without throw_on_early_termination: says so, once, at the latest in the forward."""

    def warned(context: Callable[[Any], Any]) -> list[str]:
        model = DistributedDataParallel(mlp())
        # After wrapping, since the constructor refuses it on the CPU. It is not called.
        model.module.norm = nn.SyncBatchNorm(4, affine=False, track_running_stats=False)
        model.module.forward = lambda x: model.module[2](model.module[1](model.module[0](x))) @ model.module[4].weight.T
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with context(model):
                for step in range(2):
                    model(samples(rank, step)).sum()
        return [str(one.message) for one in caught if "SyncBatchNorm" in str(one.message)]

    (message,) = warned(lambda model: model.join())
    assert "'norm' is a SyncBatchNorm" in message
    assert "throw_on_early_termination=True" in message
    assert len(warned(lambda model: Join([model]))) == 1
