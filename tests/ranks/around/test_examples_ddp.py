"""The examples and notes of DDP's reference, each as a program on real ranks: join, no_sync, hooks, buffers, ..."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.conftest import Ranks


def _linear(rank: int) -> nn.Linear:
    torch.manual_seed(rank)  # another model on each rank: the constructor makes them equal
    return nn.Linear(4, 2)


def _inputs(rank: int, count: int = 1, samples: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(samples, 4, generator=generator) for _ in range(count)]


def _mean(tensor: torch.Tensor, size: int) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / size


def _same_on_all_ranks(tensor: torch.Tensor, size: int) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(everyone, tensor.contiguous())
    return all(torch.equal(each, everyone[0]) for each in everyone)


# -- construct and train


def _construct_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    torch.manual_seed(0)
    expected = nn.Linear(4, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in _inputs(rank, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert all(_same_on_all_ranks(p.detach(), size) for p in model.parameters())


def test_construct_and_train(ranks: Ranks) -> None:
    """Example: wrap a model on each rank; it starts as rank 0's and stays equal, though only gradients travel."""
    ranks(2, _construct_on_rank)


def _sum_loss_on_rank(rank: int, size: int, reduction: str) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    alone = copy.deepcopy(model.module)
    getattr(model(_inputs(rank)[0]).square(), reduction)().backward()
    whole = torch.cat([_inputs(r)[0] for r in range(size)])
    getattr(alone(whole).square(), reduction)().backward()
    factor = size if reduction == "sum" else 1
    torch.testing.assert_close(model.module.weight.grad * factor, alone.weight.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_summed_losses_are_smaller(ranks: Ranks, reduction: str) -> None:
    """Note: M ranks with N samples each have the gradient of M*N samples; M times smaller if losses are summed."""
    ranks(2, _sum_loss_on_rank, reduction)


class Mixed(nn.Module):
    """Layers of float16, bfloat16 and float32, one of them channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.middle = nn.Linear(12, 4, dtype=torch.float16)
        self.brain = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.brain(self.middle(self.conv(x).flatten(1).half()).bfloat16()).float()


def _mixed_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(0)
    module = Mixed()
    model = DistributedDataParallel(copy.deepcopy(module))
    for step in range(3):
        model.zero_grad()
        x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        local = copy.deepcopy(module)
        local(x).square().mean().backward()
        for (name, mine), own in zip(model.module.named_parameters(), local.parameters(), strict=True):
            assert mine.grad.dtype == mine.dtype
            torch.testing.assert_close(mine.grad, _mean(own.grad, size), rtol=1e-2, atol=1e-2, msg=name)
    assert model.module.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_mixed_precision_parameters_and_strides(ranks: Ranks) -> None:
    """Note: float16, bfloat16 and float32 parameters in one model, channels-last ones too, are averaged as they are."""
    ranks(2, _mixed_on_rank)


def _buffers_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    module = nn.BatchNorm1d(4)
    model = DistributedDataParallel(module)
    for x in _inputs(rank, 3):
        model(x).square().sum().backward()
    assert not _same_on_all_ranks(module.running_mean, size)  # each saw its own samples in the last forward
    model(_inputs(rank)[0])  # the broadcast before it: what the first of them saw before
    with torch.no_grad():
        module.weight.add_(rank)  # never broadcast after construction
    model(_inputs(rank)[0])
    assert not _same_on_all_ranks(module.weight.detach(), size)
    model.eval()
    mean = module.running_mean.clone()
    dist.broadcast(mean, 0)
    model(_inputs(rank)[0])
    assert torch.equal(module.running_mean, mean)


def test_buffers_are_broadcast_and_parameters_are_not(ranks: Ranks) -> None:
    """Note: before each forward buffers become rank 0's; parameters are never broadcast after construction."""
    ranks(2, _buffers_on_rank)


# -- no_sync, join


def _no_sync_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    alone = copy.deepcopy(model.module)
    *accumulated, another = _inputs(rank, 3)
    with model.no_sync():
        for x in accumulated:
            model(x).sum().backward()  # no synchronisation
    for x in accumulated:
        alone(x).sum().backward()
    assert torch.equal(model.module.weight.grad, alone.weight.grad)
    model(another).sum().backward()  # synchronises all three
    alone(another).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, _mean(alone.weight.grad, size))


def test_no_sync(ranks: Ranks) -> None:
    """Example: gradients accumulate on the rank under no_sync; the first backward after it averages them."""
    ranks(2, _no_sync_on_rank)


def _join_on_rank(rank: int, size: int, by_initial: bool) -> float:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    inputs = [torch.tensor([1.0]) for _ in range(10 + rank)]  # rank 1 has one more
    gradients = []
    with model.join(divide_by_initial_world_size=by_initial):
        for _ in range(5):
            for x in inputs:
                model.zero_grad()
                model(x).sum().backward()
                gradients.append(model.module.weight.grad.item())
    assert len(gradients) == 5 * (10 + rank)
    assert gradients[: 5 * 10] == [1.0] * 50
    if rank == 1:
        assert gradients[50:] == [0.5 if by_initial else 1.0] * 5
    return float(model.module.weight)


@pytest.mark.parametrize("by_initial", [True, False])
def test_join_with_uneven_inputs(ranks: Ranks, by_initial: bool) -> None:
    """Example: 10 and 11 inputs, five times: nobody hangs; the joined rank counts or not, and models end equal."""
    first, second = ranks(2, _join_on_rank, by_initial)
    assert first == second


def _throw_on_rank(rank: int, size: int) -> int:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    done = 0

    def train() -> None:
        nonlocal done
        with model.join(throw_on_early_termination=True):
            for x in _inputs(rank, 2 + rank):
                model(x).sum().backward()
                done += 1

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    return done


def test_join_that_throws(ranks: Ranks) -> None:
    """Join's parameter throw_on_early_termination: every rank raises when the first one has no inputs left."""
    assert ranks(2, _throw_on_rank) == [2, 2]


def _disabled_join_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    with model.join(enable=False):
        for x in _inputs(rank, 2):
            model(x).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, _mean(model.module.weight.grad, size))


def test_join_switched_off(ranks: Ranks) -> None:
    """Join's parameter enable=False: even inputs train as without it."""
    ranks(2, _disabled_join_on_rank)


def _join_hook_on_rank(rank: int, size: int) -> int:
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook

    from ddp_lab import DistributedDataParallel

    class Counter(Joinable):
        """Counts the iterations of all ranks, also those in which this one has no inputs any more."""

        def __init__(self) -> None:
            super().__init__()
            self.total = 0

        def __call__(self) -> None:
            Join.notify_join_context(self)
            self.add(1)

        def add(self, mine: int) -> None:
            count = torch.tensor([mine])
            dist.all_reduce(count)
            self.total += int(count)

        def join_hook(self, **kwargs: Any) -> JoinHook:
            assert kwargs["divide_by_initial_world_size"] is False
            counter = self

            class Hook(JoinHook):
                def main_hook(self) -> None:
                    counter.add(0)

            return Hook()

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return dist.group.WORLD

    model, counter = DistributedDataParallel(_linear(rank)), Counter()
    with Join([counter, model], divide_by_initial_world_size=False):
        for x in _inputs(rank, 3 + 2 * rank):
            counter()
            model(x).sum().backward()
    assert all(_same_on_all_ranks(p.detach(), size) for p in model.parameters())
    return counter.total


def test_join_hook_beside_another_joinable(ranks: Ranks) -> None:
    """Join hook: DDP joins together with a class of the user's, and both get the same keyword arguments."""
    assert ranks(2, _join_hook_on_rank) == [3 + 5, 3 + 5]


# -- comm hooks


def _noop_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    def noop(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(_linear(rank))
    model.register_comm_hook(state=None, hook=noop)
    alone = copy.deepcopy(model.module)
    for x in _inputs(rank, 3):
        model(x).sum().backward()
        alone(x).sum().backward()
        assert torch.equal(model.module.weight.grad, alone.weight.grad)


def test_a_hook_that_does_nothing(ranks: Ranks) -> None:
    """Example: a hook that returns the bucket as it is leaves each rank its own gradients, not divided."""
    ranks(2, _noop_on_rank)


def _encode_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    def encode_and_decode(state: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        encoded = bucket.buffer().to(torch.bfloat16)
        future = dist.all_reduce(encoded, async_op=True).get_future()

        def decode(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return done.value()[0].to(torch.float32) / state

        return future.then(decode)

    model = DistributedDataParallel(_linear(rank), bucket_cap_mb=0.00001)
    model.register_comm_hook(state=size, hook=encode_and_decode)
    for x in _inputs(rank, 3):
        model.zero_grad()
        model(x).square().mean().backward()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        alone(x).square().mean().backward()
        torch.testing.assert_close(model.module.weight.grad, _mean(alone.weight.grad, size), rtol=0.02, atol=0.02)
        assert _same_on_all_ranks(model.module.weight.grad, size)


def test_a_hook_that_encodes_and_decodes(ranks: Ranks) -> None:
    """Example: gradients travel encoded; the hook divides; a callback of the future decodes."""
    ranks(2, _encode_on_rank)


def _twice_on_rank(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank))
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, allreduce_hook)


def test_a_second_hook_is_refused(ranks: Ranks) -> None:
    """Warning of the reference: a hook can be registered once."""
    ranks(2, _twice_on_rank)


# -- unused parameters, static graphs, checkpoints, views


class Branches(nn.Module):
    """Two branches, of which a forward uses one, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)


def _unused_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    alone = copy.deepcopy(model.module)
    for step, x in enumerate(_inputs(rank, 4)):
        left = (rank + step) % 2 == 0
        model(x, left).sum().backward()
        alone.zero_grad()
        alone(x, left).sum().backward()
        assert model.module.never.weight.grad is None
        for name in ("left", "right"):
            own = getattr(alone, name).weight.grad
            expected = _mean(torch.zeros(2, 4) if own is None else own, size)
            torch.testing.assert_close(getattr(model.module, name).weight.grad, expected)
        model.zero_grad()


def test_find_unused_parameters(ranks: Ranks) -> None:
    """Parameter find_unused_parameters: each rank uses another branch; what nobody uses keeps no gradient."""
    ranks(2, _unused_on_rank)


def _static_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    for x in _inputs(rank, 12):
        model(x).sum().backward()
    assert model._get_ddp_logging_data().get("can_set_static_graph")
    static = DistributedDataParallel(copy.deepcopy(net), static_graph=True)
    model.zero_grad()
    for x in _inputs(rank, 3):
        model(x).sum().backward()
        static(x).sum().backward()
    for mine, other in zip(model.parameters(), static.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_logging_data_say_that_the_graph_is_static(ranks: Ranks) -> None:
    """Example: train, ask `_get_ddp_logging_data()` for can_set_static_graph, then train with static_graph=True."""
    ranks(2, _static_on_rank)


class Checkpointed(nn.Module):
    """Runs its layer once or twice under a checkpoint; one layer may stay unused."""

    def __init__(self, reentrant: bool, times: int, unused: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        if unused:
            self.extra = nn.Linear(4, 4)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, torch.tanh(x), use_reentrant=self.reentrant)
        return x


def _checkpoint_on_rank(rank: int, size: int, module: Checkpointed, arguments: dict[str, Any]) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(module, **arguments)
    for x in _inputs(rank, 3):
        model.zero_grad()
        model(x).square().mean().backward()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        alone(x).square().mean().backward()
        for name in ("first", "layer"):
            expected = _mean(getattr(alone, name).weight.grad, size)
            torch.testing.assert_close(getattr(model.module, name).weight.grad, expected)


@pytest.mark.parametrize(
    ("reentrant", "times", "unused", "arguments"),
    [
        (False, 1, False, {}),
        (False, 2, True, {"find_unused_parameters": True}),
        (True, 1, False, {}),
        (True, 2, True, {"static_graph": True}),
        (False, 2, True, {"static_graph": True}),
    ],
)
def test_checkpointing(ranks: Ranks, reentrant: bool, times: int, unused: bool, arguments: dict[str, Any]) -> None:
    """Note: non-reentrant checkpoints work without limits, reentrant ones once, and all of them with a static graph."""
    ranks(2, _checkpoint_on_rank, Checkpointed(reentrant, times, unused), arguments)


def _views_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel(_linear(rank), gradient_as_bucket_view=True)
    for x in _inputs(rank, 3):
        model(x).sum().backward()
    weight, bias = model.module.weight.grad, model.module.bias.grad
    assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        weight.detach_()
    model.zero_grad(set_to_none=False)
    assert not weight.any()


def test_gradients_that_are_views(ranks: Ranks) -> None:
    """Parameter gradient_as_bucket_view: gradients share the bucket's memory; they can't be detached but zeroed."""
    ranks(2, _views_on_rank)


# -- process groups


def _group_on_rank(rank: int, size: int) -> None:
    from ddp_lab import DistributedDataParallel

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    model = DistributedDataParallel(_linear(rank), process_group=mine)
    alone = copy.deepcopy(model.module)
    model(_inputs(rank)[0]).sum().backward()
    alone(_inputs(rank)[0]).sum().backward()
    total = alone.weight.grad.clone()
    dist.all_reduce(total, group=mine)
    torch.testing.assert_close(model.module.weight.grad, total / 2)


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    """Parameter process_group: two models train at the same time, each on its own half of the ranks."""
    ranks(4, _group_on_rank)
