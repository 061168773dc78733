"""find_unused_parameters: which parameters count as unused, on which ranks, and what happens to their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import DistributedDataParallel
from tests.ranks.compare import assert_same_on_all_ranks, gradients_of, same_as_torch, samples
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import wrap

CAP = 2e-4  # MiB: a bucket for each parameter or two


class Branches(nn.Module):
    """Three layers of which a forward may skip two, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, second: bool = True, third: bool = True) -> torch.Tensor:
        x = self.first(x)
        if second:
            x = torch.tanh(self.second(x))
        return self.third(x) if third else x


def _random_branches(wrap: type, rank: int, arguments: dict[str, Any]) -> list[Any]:
    model = wrap(Branches(), find_unused_parameters=True, bucket_cap_mb=CAP, **arguments)
    seen: list[Any] = []
    for step in range(14):
        coin = torch.Generator().manual_seed(100 * step + rank)
        second, third = (bool(torch.rand((), generator=coin) < share) for share in (0.4, 0.7))
        local = step in (3, 7, 8)  # accumulated: used in the window, perhaps not in its last forward
        if step % 5 == 0:
            model.zero_grad(set_to_none=step % 2 == 0)
        if local:
            with model.no_sync():
                model(samples(rank, step), second, third).square().sum().backward()
            continue
        model(samples(rank, step), second, third).square().sum().backward()
        seen.append(gradients_of(model))
        seen.append(model.reducer._get_local_used_map().tolist())
    return seen


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_branches_by_rank(rank: int, size: int, arguments: dict[str, Any]) -> None:
    """Branches that differ by rank and step, also under no_sync: gradients and used map are torch's."""
    same_as_torch(lambda wrap: _random_branches(wrap, rank, arguments), exact=size == 2)


@on_ranks(2)
def test_gradients_of_globally_unused_parameters_are_left_alone(rank: int, size: int) -> None:
    """What no rank used keeps its gradient, even one that differs by rank; what one rank used is averaged on all."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=CAP)
    for p in model.module.never.parameters():
        p.grad = torch.full_like(p, float(rank))
    for step in range(3):
        model(samples(rank, step), second=rank == 1 and step == 2).sum().backward()
        assert all(p.grad.eq(rank).all() for p in model.module.never.parameters())  # type: ignore[union-attr]
        assert (model.module.second.weight.grad is None) == (step < 2)


@on_ranks(2)
def test_one_backward_of_several_forwards(rank: int, size: int) -> None:
    """A parameter is unused if none of the forwards since the last backward reaches it (torch raises here)."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=CAP)
    for step in range(3):
        model.zero_grad()
        loss = model(samples(rank, step), second=True, third=False).sum()
        loss = loss + model(samples(rank, step + 50), second=False, third=True).sum()
        loss.backward()
        expected = Branches()
        sum_ = expected(samples(rank, step), True, False).sum() + expected(samples(rank, step + 50), False, True).sum()
        sum_.backward()
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            if other.grad is not None:
                dist.all_reduce(other.grad)
                torch.testing.assert_close(mine.grad, other.grad / size)


@on_ranks(2)
def test_unused_parameter_that_gets_a_gradient_is_named(rank: int, size: int) -> None:
    """A parameter used outside forward alone counts as unused: its gradient raises, and the next step works."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=CAP)
    loss = model(samples(rank, 0), second=False).sum() + model.module.second.weight.sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    model.zero_grad()
    model(samples(rank, 1)).sum().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in model.module.named_parameters() if p.grad is not None})
    text = str(raised.value)
    assert text.startswith("Expected to mark a variable ready only once.")
    assert "'second.weight'" in text
    assert "unused" in text


@on_ranks(2)
def test_a_skipped_bucket_keeps_its_views(rank: int, size: int) -> None:
    """A bucket that is not communicated keeps the gradients that are views of it, undivided (torch halves them)."""
    model = DistributedDataParallel(
        Branches(),
        find_unused_parameters=True,
        bucket_cap_mb=1e-5,
        skip_all_reduce_unused_params=True,
        gradient_as_bucket_view=True,
    )
    for step in range(2):
        model(samples(rank, step), second=True).sum().backward()
    held = model.module.second.weight.grad.clone()  # type: ignore[operator]
    model(samples(rank, 2), second=False).sum().backward()
    assert torch.equal(model.module.second.weight.grad, held)  # type: ignore[arg-type]


@pytest.mark.parametrize("skip", [False, True])
@on_ranks(2)
def test_buckets_of_unused_parameters_are_skipped_on_request(rank: int, size: int, skip: bool) -> None:
    """skip_all_reduce_unused_params: a bucket whose parameters are all unused is not communicated."""
    model = DistributedDataParallel(
        Branches(), find_unused_parameters=True, bucket_cap_mb=1e-5, skip_all_reduce_unused_params=skip
    )
    for step in range(3):
        model(samples(rank, step), second=False).sum().backward()
    assert_same_on_all_ranks({"first": model.module.first.weight.grad})  # type: ignore[dict-item]
    assert model.module.second.weight.grad is None
    assert (model.reducer.report()["num_buckets_reduced"] < len(model.buckets())) == skip


@on_ranks(2)
def test_whether_the_graph_could_be_static(rank: int, size: int) -> None:
    """_ddp_graph_static: true while the same parameters are unused in each forward."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    answers = []
    for second in (False, False, True):
        model(samples(rank, 0), second=second).sum().backward()
        answers.append(model.reducer._ddp_graph_static())
    assert answers == [True, True, False]


@on_ranks(2)
def test_batched_copies_of_a_failed_backward(rank: int, size: int) -> None:
    """Gradients that a failed backward has noted for a batched copy don't come back where they are unused next."""
    model = wrap(Branches(), find_unused_parameters=True, batched_grad_copy=True, bucket_cap_mb=1)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.module.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(samples(rank, 0), second=True).sum().backward()
    handle.remove()
    dist.barrier()
    model.zero_grad()
    model(samples(rank, 1), second=rank == 0).sum().backward()
    of_rank_0 = Branches()
    of_rank_0(samples(0, 1)).sum().backward()
    torch.testing.assert_close(model.module.second.bias.grad, of_rank_0.second.bias.grad / size)
