"""The reducer itself, without the module around it: `_C.Reducer` on hand-made buckets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_lab import BucketStateError, native
from tests.ranks.harness import on_ranks


class Branches(nn.Module):
    """Two layers of any dtype; the second one is used on request."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32)) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 4, dtype=dtypes[0])
        self.second = nn.Linear(4, 2, dtype=dtypes[1])

    def forward(self, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.second(x.to(self.second.weight.dtype)) if second else x


def _reducer(module: nn.Module, assignment: list[list[int]], **options: Any) -> Any:
    named = list(module.named_parameters())
    return native.load().Reducer(
        parameters=[parameter for _, parameter in named],
        names=[name for name, _ in named],
        assignment=assignment,
        process_group=dist.group.WORLD,
        reducer_id=90,
        process_group_index=0,
        gradient_as_bucket_view=options.pop("gradient_as_bucket_view", False),
        **options,
    )


def _forward(reducer: Any, module: nn.Module, *inputs: Any) -> torch.Tensor:
    reducer.begin_forward(True)
    output = module(*inputs)
    reducer.end_forward()
    reducer.arm([output])
    return output


def _mean_gradients(alone: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """The mean over the ranks of what a backward without a reducer gives."""
    alone.zero_grad()
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in alone.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


@on_ranks(2)
def test_forward_and_backward_on_any_buckets(rank: int, size: int) -> None:
    """However parameters of one or two dtypes are put into buckets, gradients are the mean over the ranks."""
    f32, f64 = torch.float32, torch.float64
    for dtypes, assignment in (
        ((f32, f32), [[0, 1, 2, 3]]),
        ((f32, f32), [[3, 2], [1, 0]]),
        ((f32, f32), [[2], [0], [3], [1]]),
        ((f32, f64), [[2, 3], [0, 1]]),
        ((f64, f32), [[0], [1], [2, 3]]),
    ):
        for as_view in (False, True):
            module = Branches(dtypes)
            alone = copy.deepcopy(module)
            reducer = _reducer(module, assignment, gradient_as_bucket_view=as_view)
            for step in range(3):
                module.zero_grad(set_to_none=step == 1)
                _forward(reducer, module, _batch(rank, step)).sum().backward()
                expected = _mean_gradients(alone, alone(_batch(rank, step)).sum())
                for mine, mean in zip(module.parameters(), expected, strict=True):
                    assert torch.allclose(mine.grad, mean)
            reducer.remove_hooks()


@on_ranks(2)
def test_impossible_buckets_are_refused(rank: int, size: int) -> None:
    """Buckets of several dtypes, empty ones, parameters in two buckets or in none raise and leave the module alone."""
    mixed = Branches((torch.float32, torch.float64))
    with pytest.raises(RuntimeError, match=r"'first\.weight' is Float on cpu and 'second\.weight' is Double on cpu"):
        _reducer(mixed, [[0, 1, 2, 3]])
    module = Branches()
    for assignment, message in (
        ([[0, 1, 2, 3], []], "Empty bucket specified: bucket 1 holds no parameter"),
        ([[0, 1], [1, 2, 3]], "parameter 1 is in bucket 0 and in bucket 1"),
        ([[0, 1], [2]], "every parameter must be in a bucket"),
        ([[0, 1], [2, 3, 4]], "there is no parameter 4"),
    ):
        with pytest.raises((RuntimeError, BucketStateError), match=message):
            _reducer(module, assignment)
    with pytest.raises(RuntimeError, match="Buckets with more than one variable cannot include variables that expect"):
        _reducer(module, [[0, 1, 2, 3]], expect_sparse=[True, False, False, False])
    reducer = _reducer(module, [[0, 1, 2, 3]])
    for _ in range(2):  # a refused reducer has left no hook behind
        _forward(reducer, module, _batch(rank)).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True will create a reference cycle")
@pytest.mark.filterwarnings("ignore:Using DistributedDataParallel with create_graph=True")
@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_gradients_that_can_be_differentiated(rank: int, size: int, as_view: bool) -> None:
    """create_graph=True: gradients are averaged and keep their graph, so the mean of a penalty's gradients is exact."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    alone = copy.deepcopy(module)
    reducer = _reducer(module, [[3, 2], [1, 0]], gradient_as_bucket_view=as_view)

    def penalty(net: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        loss.backward(create_graph=True)
        gradients = [p.grad for p in net.parameters()]
        for p in net.parameters():
            p.grad = None
        return sum(gradient.square().sum() for gradient in gradients)

    for step in range(2):
        mine = penalty(module, _forward(reducer, module, _batch(rank, step).double()).square().mean())
        batch = torch.cat([_batch(r, step) for r in range(size)]).double()
        whole = penalty(alone, alone(batch).square().mean())
        assert torch.allclose(mine, whole)
        whole.backward()
        gradients = torch.autograd.grad(mine, list(module.parameters()))
        for gradient, p in zip(gradients, alone.parameters(), strict=True):
            dist.all_reduce(gradient)
            assert torch.allclose(gradient / size, p.grad)
            p.grad = None


@pytest.mark.parametrize(("hook", "rows"), [(False, None), (True, None), (False, [4, 1, 3]), (True, [1, 3, 4, 5])])
@on_ranks(2)
def test_sparse_gradients(rank: int, size: int, hook: bool, rows: list[int] | None) -> None:
    """Sparse embeddings are averaged as sparse tensors, with a hook too, and by known rows if those were given."""
    torch.manual_seed(7)
    module = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    alone = copy.deepcopy(module)
    reducer = _reducer(module, [[1, 2], [0]], expect_sparse=[True, False, False], gradient_as_bucket_view=True)
    if hook:
        reducer.register_hook(None, allreduce_hook)
    if rows is not None:
        reducer._set_sparse_metadata({"0.weight": torch.tensor(rows)})
    for step in range(3):
        module.zero_grad()
        alone.zero_grad()
        indices = torch.tensor([[3, 1, 3], [1, 4, 4]][(rank + step) % 2])
        _forward(reducer, module, indices).sum().backward()
        alone(indices).sum().backward()
        for mine, own in zip(module.parameters(), alone.parameters(), strict=True):
            assert mine.grad.layout == own.grad.layout
            mean = own.grad.to_dense()
            dist.all_reduce(mean)
            assert torch.allclose(mine.grad.to_dense(), mean / size)
        if step == 1:
            reducer.rebuild([[2, 1], [0]])  # the rows stay known
        if rows is not None:
            assert module[0].weight.grad.coalesce().indices().tolist() == [sorted(rows)]
        inspected: list[Any] = [None] * size
        dist.all_gather_object(inspected, reducer.inspect_gradients())
        assert inspected[0] == inspected[1]
        assert inspected[0][1][0] == pytest.approx(module[0].weight.grad.to_dense().norm().item())


@on_ranks(1)
def test_wrong_sparse_gradients_are_named(rank: int, size: int) -> None:
    """A dense gradient where a sparse one was expected, a missing one and unknown rows raise, naming the parameter."""
    module = nn.Embedding(6, 3, sparse=True)
    reducer = _reducer(module, [[0]], expect_sparse=[True])
    with pytest.raises(RuntimeError, match="param: weight not found in sparse metadata"):
        reducer._set_sparse_metadata({"other": torch.tensor([1, 3])})
    reducer._set_sparse_metadata({".weight": torch.tensor([1, 3])})  # torch's name of a parameter of the root
    with pytest.raises(RuntimeError, match="the gradient of 'weight' has rows that are not in the sparse metadata"):
        _forward(reducer, module, torch.tensor([5])).sum().backward()
    module = nn.Embedding(6, 3, sparse=False)
    reducer = _reducer(module, [[0]], expect_sparse=[True])
    with pytest.raises(RuntimeError, match=r"(?s)Expected variable to have sparse gradient.*'weight'"):
        _forward(reducer, module, torch.tensor([5])).sum().backward()
    module = nn.Embedding(6, 3, sparse=True)
    reducer = _reducer(module, [[0]], find_unused_parameters=True, expect_sparse=[True])
    with pytest.raises(RuntimeError, match="Expected sparse gradient to be defined"):
        _forward(reducer, lambda x: 2 * x, torch.ones(1, requires_grad=True)).sum().backward()
