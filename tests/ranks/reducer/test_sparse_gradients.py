"""Gradients of sparse embeddings: averaged as sparse tensors, by known rows if those were given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks


@pytest.mark.parametrize(("hook", "rows"), [(False, None), (True, None), (False, [4, 1, 3]), (True, [1, 3, 4, 5])])
@on_ranks(2)
def test_sparse_gradients(rank: int, size: int, hook: bool, rows: list[int] | None) -> None:
    """Sparse embeddings are averaged as sparse tensors, with a hook too, and by known rows if those were given, which
    stay known when the buckets change. Inspected, they have equal checksums and their own norm."""
    torch.manual_seed(7)
    alone = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    model = DistributedDataParallel(copy.deepcopy(alone), gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    if rows is not None:
        model._set_sparse_metadata({"0.weight": torch.tensor(rows)})
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        indices = torch.tensor([[3, 1, 3], [1, 4, 4]][(rank + step) % 2])
        model(indices).sum().backward()
        alone(indices).sum().backward()
        for mine, own in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad.layout == own.grad.layout
            mean = own.grad.to_dense()
            dist.all_reduce(mean)
            assert torch.allclose(mine.grad.to_dense(), mean / size)
        table = model.module[0].weight.grad
        if rows is not None:
            assert table.coalesce().indices().tolist() == [sorted(rows)]
        inspected = everywhere(model.reducer.inspect_gradients())
        assert inspected[0] == inspected[1]
        assert table.to_dense().norm().item() in [pytest.approx(norm) for norm, *_ in inspected[0]]
        if step == 1:
            model.reconfigure(bucket_cap_mb=1e-5)


@on_ranks(1)
def test_wrong_sparse_gradients_are_named(rank: int, size: int) -> None:
    """A dense gradient where a sparse one was expected, and unknown rows raise, naming the parameter."""
    model = DistributedDataParallel(nn.Embedding(6, 3, sparse=True))
    with pytest.raises(RuntimeError, match="param: weight not found in sparse metadata"):
        model._set_sparse_metadata({"other": torch.tensor([1, 3])})
    model._set_sparse_metadata({".weight": torch.tensor([1, 3])})  # torch's name of a parameter of the root
    with pytest.raises(RuntimeError, match="the gradient of 'weight' has rows that are not in the sparse metadata"):
        model(torch.tensor([5])).sum().backward()
    model = DistributedDataParallel(nn.Embedding(6, 3, sparse=True))
    model.module.sparse = False
    with pytest.raises(RuntimeError, match=r"(?s)Expected variable to have sparse gradient.*'weight'"):
        model(torch.tensor([5])).sum().backward()
    unused: Any = nn.ModuleList([nn.Embedding(6, 3, sparse=True), nn.Linear(1, 1)])
    unused.forward = lambda x: unused[1](x)
    model = DistributedDataParallel(unused, find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="Expected sparse gradient to be defined"):
        model(torch.ones(1, 1)).sum().backward()
