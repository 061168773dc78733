"""Do the replicas hold the same model: on demand, and while it trains."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_lab
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import wrap


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 2))


def _train(model: Any, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["0.weight", "2.bias", "3.weight"])
@on_ranks(3)
def test_one_bit_is_found_with_its_name_and_rank(rank: int, size: int, name: str) -> None:
    """After training nothing differs; one bit of one parameter on one rank is found on all ranks, by name and rank.
    Batch norm's statistics differ after a forward: pending for the wrapper, drift for the module alone."""
    model = wrap(_net(), bucket_cap_mb=0.0001)
    _train(model, rank, 3)
    clean = model.check_drift()
    tensor = dict([*model.module.named_parameters(), *model.module.named_buffers()])[name]
    if rank == size - 1:
        with torch.no_grad():
            tensor.view(-1)[-1].view(torch.int32).bitwise_xor_(1)  # the last bit
    assert clean.ok
    assert clean.first is None
    assert set(clean.pending) == {"1.running_mean", "1.running_var"}
    drifted, plain = model.check_drift(), ddp_lab.check_drift(model.module)
    assert not drifted.ok
    assert drifted.first == plain.first == name  # parameters come before buffers
    assert drifted.groups == (tuple(range(size - 1)), (size - 1,))
    assert drifted.differing == (name,)
    assert name in str(drifted)
    assert f"rank {size - 1}" in str(drifted)
    assert plain.differing == (name, "1.running_mean", "1.running_var")
    assert plain.pending == ()


@on_ranks(2)
def test_different_structures_are_refused(rank: int, size: int) -> None:
    """Modules of different shapes are no drift but an error, on all ranks."""
    with pytest.raises(RuntimeError) as caught:
        ddp_lab.check_drift(nn.Linear(3 + rank, 2))
    text = str(caught.value)
    assert "different parameters or buffers" in text


@on_ranks(3)
def test_a_group_of_its_own(rank: int, size: int) -> None:
    """Ranks in the report are those of the job, not places in the group."""
    group = dist.new_group([1, 2])
    if rank:
        module = _net()
        if rank == 2:
            with torch.no_grad():
                module[0].weight.mul_(2)
        assert ddp_lab.check_drift(module, group).groups == ((1,), (2,))


@pytest.mark.parametrize("action", ["warn", "raise"])
@on_ranks(2)
def test_a_watch_tells_once_on_all_ranks(rank: int, size: int, action: str) -> None:
    """Drift that begins after step 3 is told at the check before step 6, once, or raised there on all ranks."""
    model = wrap(_net(), bucket_cap_mb=0.0001)
    watch = model.watch_drift(every=3, action=action)
    told: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    raised = -1
    for step in range(10):
        if step == 4 and rank == 1:
            with torch.no_grad():
                model.module[2].weight.add_(1.0)
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(torch.ones(4, 6) * (1 + step)).square().mean().backward()
            except RuntimeError as error:
                told.append(str(error))
                raised = step
                break
        told += [str(one.message) for one in caught]
        optimizer.step()
    assert watch.last is not None
    assert watch.seconds > 0
    copied = copy.deepcopy(model)
    copied(torch.ones(4, 6))  # not watched
    checks = watch.checks
    watch.remove()
    assert len(told) == 1
    assert "'2.weight'" in told[0]
    assert checks == (2 if action == "raise" else 3)
    assert raised == (6 if action == "raise" else -1)


@on_ranks(1)
def test_arguments_are_checked(rank: int, size: int) -> None:
    """Watches refuse what they do not know."""
    model = wrap(_net())
    with pytest.raises(ValueError, match="at least 1"):
        model.watch_drift(every=0)
    with pytest.raises(ValueError, match='"warn" or "raise"'):
        model.watch_drift(action="shout")
    with pytest.raises(ValueError, match="at least 1"):
        model.watch_gradients(every=0)
    with pytest.raises(ValueError, match='"warn" or "raise"'):
        model.watch_gradients(nonfinite="shout")
