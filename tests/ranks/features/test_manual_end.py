"""require_manual_backward_finalization: backwards whose averages the caller fetches with finalize_backward()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from tests.ranks.compare import assert_same, gradients_of, samples
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import wrap

SMALL = 0.0005  # MiB: several buckets
ANY = {
    "nothing else": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "mixed precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    "mixed views": {
        "mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16),
        "gradient_as_bucket_view": True,
    },
}  # fmt: skip


class Net(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def _manual(**arguments: Any) -> Any:
    model = wrap(Net(), bucket_cap_mb=SMALL, **arguments)
    model.require_manual_backward_finalization = True
    return model


def _train(model: Any, rank: int, *, unused: bool) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(5):
        if step != 3:
            optimizer.zero_grad()
        if step == 2:
            with model.no_sync():
                model(samples(rank, 50)).square().sum().backward()
            assert next(model.parameters()).dtype == torch.float32
        loss = model(samples(rank, step), not unused or (step + rank) % 2 == 0).square().sum()
        loss.backward()
        if model.require_manual_backward_finalization:
            if step == 4:  # what needs no gradients may come in between
                with torch.no_grad():
                    model(samples(rank, 60))
            model.finalize_backward()
        seen.append(gradients_of(model))
        optimizer.step()
        assert next(model.parameters()).dtype == torch.float32
    return [*seen, dict(model.state_dict())]


@pytest.mark.parametrize("given", ANY.values(), ids=ANY)
@on_ranks(2)
def test_gradients_are_the_same(rank: int, size: int, given: dict[str, Any]) -> None:
    """After finalize_backward() gradients and trained parameters are those of backwards that end by themselves."""
    unused = "find_unused_parameters" in given
    expected = _train(wrap(Net(), bucket_cap_mb=SMALL, **given), rank, unused=unused)
    assert_same(_train(_manual(**given), rank, unused=unused), expected)


@on_ranks(1)
def test_the_backward_waits_for_nothing(rank: int, size: int) -> None:
    """backward() returns while no bucket is reduced, with this rank's gradients; finalize_backward() fetches them."""
    order: list[str] = []
    futures: list[torch.futures.Future[torch.Tensor]] = []
    buffers: list[torch.Tensor] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        futures.append(torch.futures.Future())
        buffers.append(bucket.buffer())
        return futures[-1]

    model = _manual()
    model.register_comm_hook(None, hook)
    model(samples(rank, 0)).sum().backward()
    order.append("backward has returned")
    own = gradients_of(model)
    assert model.reducer.in_flight()
    for future, buffer in zip(futures, buffers, strict=True):
        future.set_result(torch.full_like(buffer, 5.0))
    assert_same(gradients_of(model), own)
    model.finalize_backward()
    assert order == ["backward has returned"]
    assert all(bool((p.grad == 5.0).all()) for p in model.parameters())
    assert not model.reducer.in_flight()


@pytest.mark.parametrize("name", ["nothing else", "unused", "static", "lazy views"])
@on_ranks(2)
def test_in_a_hook_of_the_backward(rank: int, size: int, name: str) -> None:
    """Where should_finalize_after_backward allows it, a hook finds the averages before the backward is over."""
    given = ANY[name]
    expected, model = wrap(Net(), bucket_cap_mb=SMALL, **given), _manual(**given)
    after = []
    for step in range(3):
        for each in (expected, model):
            each.zero_grad()
        expected(samples(rank, step)).sum().backward()
        inside: list[Any] = []

        def finalize(gradient: torch.Tensor, inside: list[Any] = inside) -> None:
            model.finalize_backward()
            inside.extend(gradients_of(model))

        x = samples(rank, step).requires_grad_() * 1
        output = model(x)
        after.append(model.should_finalize_after_backward)
        if not after[-1]:
            x.register_hook(finalize)
        output.sum().backward()
        if after[-1]:
            model.finalize_backward()
        else:
            assert_same(inside, gradients_of(expected))
        assert_same(gradients_of(model), gradients_of(expected))
        model._check_reducer_finalized()
    assert after[-1] is False
    assert after[0] is ("find_unused_parameters" not in given)


def _refused(function: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        function()


@on_ranks(2)
def test_what_is_refused_leaves_the_averages(rank: int, size: int) -> None:
    """Calls at a wrong time raise RuntimeError, say what to do, and the pending backward can still be ended."""
    model = wrap(Net(), bucket_cap_mb=SMALL)
    assert model.require_manual_backward_finalization is False
    assert model.should_finalize_after_backward is False
    _refused(model.finalize_backward, "called but manual backward finalization is not required")
    model.require_manual_backward_finalization = True
    _refused(model.finalize_backward, "no gradient reduction requires finalization")
    x = samples(rank, 0)
    output = model(x)
    with pytest.raises(RuntimeError, match="cannot be set after forward"):
        model.require_manual_backward_finalization = False
    model.require_manual_backward_finalization = True  # as it is
    _refused(model.finalize_backward, "no gradient reduction requires finalization")
    output.sum().backward(retain_graph=True)
    _refused(model._check_reducer_finalized, "Expected to have finalized the prior backward pass")
    _refused(lambda: model(x), "Expected to have finalized the prior backward pass.*it is still possible now")
    _refused(output.sum().backward, "Expected to have finalized the prior backward pass")
    with model.no_sync():
        _refused(lambda: model(x), "Expected to have finalized the prior backward pass")
    _refused(model.sync_gradients, "during a backward")
    _refused(model.inspect_gradients, "during a backward")
    model.module.first.bias.requires_grad_(False)
    _refused(lambda: model(x), "Expected to have finalized the prior backward pass")
    model.module.first.bias.requires_grad_(True)
    model.finalize_backward()
    model._check_reducer_finalized()
    average = model.module.second.weight.grad.clone()
    dist.all_reduce(average)
    assert torch.equal(average / size, model.module.second.weight.grad)
    with model.no_sync():
        model(x).sum().backward()
        _refused(model.finalize_backward, "no gradient reduction requires finalization")
    model.require_manual_backward_finalization = False
    model(x).sum().backward()
    model._check_reducer_finalized()


@on_ranks(2)
def test_too_early(rank: int, size: int) -> None:
    """finalize_backward() before all gradients are there raises, and names the parameters that are missing."""
    model = _manual()
    hidden: list[torch.Tensor] = []
    model.module.first.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    output = model(samples(rank, 0))
    hidden[0].register_hook(lambda gradient: model.finalize_backward())
    _refused(output.sum().backward, r"called before all DDP buckets were ready(.|\n)*first\.weight")
    dist.barrier()
    model.module.first._forward_hooks.clear()
    model.zero_grad()
    model(samples(rank, 1)).sum().backward()
    model.finalize_backward()


@on_ranks(2)
def test_it_stays_required(rank: int, size: int) -> None:
    """Copies, a changed model and another group keep it; join's other ranks and sync_gradients need no call."""
    model = _manual()
    model(samples(rank, 0)).sum().backward()
    model.reducer.abandon()
    _refused(model.finalize_backward, r"was abandoned \(abandon_backward\)")
    twin = copy.deepcopy(model)
    assert twin.require_manual_backward_finalization
    model.module.first.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"first\.bias"):
        output = model(samples(rank, 1))
    output.sum().backward()
    assert model.reducer.in_flight()
    model.finalize_backward()
    model._update_process_group(dist.group.WORLD)
    model.zero_grad()
    with model.join():
        for step in range(1 + rank):
            model(samples(rank, step)).sum().backward()
            model.finalize_backward()
    with model.no_sync():
        model(samples(rank, 3)).sum().backward()
    model.sync_gradients()
    model._check_reducer_finalized()


@on_ranks(1)
def test_delayed_parameters_alone(rank: int, size: int) -> None:
    """A model without a reducer of ours refuses it, as torch does."""
    net = Net()
    named = list(net.named_parameters())
    model = wrap(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.first.weight)
    with pytest.raises(RuntimeError, match="not supported when all DDP parameters"):
        model.require_manual_backward_finalization = True
    model.require_manual_backward_finalization = False
    _refused(model.finalize_backward, "not supported when all DDP parameters")


@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="torch has it from 2.15 on")
@on_ranks(2)
def test_as_torch(rank: int, size: int) -> None:
    """Gradients before and after finalize_backward() and when it may be called are torch's."""
    found = []
    for cls in (TorchDDP, None):
        torch.manual_seed(3)
        net = Net()
        model: Any = cls(net) if cls else wrap(net)
        model.require_manual_backward_finalization = True
        seen: list[Any] = []
        for step in range(3):
            model.zero_grad()
            output = model(samples(rank, step))
            seen.append(model.should_finalize_after_backward)
            output.sum().backward()
            seen.append(gradients_of(model))
            model.finalize_backward()
            seen.append(gradients_of(model))
        found.append(seen)
    assert_same(found[1], found[0])
