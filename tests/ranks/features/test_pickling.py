"""Copies of a model: deepcopy, pickle, torch.save; the default group only."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import wrap


def _mean_of_ranks(rank: int, size: int) -> float:
    return (size - 1) / 2


def _through_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _through_torch_save,
}


@pytest.mark.parametrize("given", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_a_copy_trains_by_itself(rank: int, size: int, how: str, given: dict[str, Any]) -> None:
    """__getstate__, __setstate__: a copy has its own parameters and reducer, the mode of the original, and averages."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False), **given)
    x = torch.full((1, 3), float(rank))
    model(x).sum().backward()
    other = COPIES[how](model)
    assert isinstance(other, DistributedDataParallel)
    assert other.find_unused_parameters == model.find_unused_parameters
    assert other.static_graph == model.static_graph
    assert torch.equal(other.module.weight, model.module.weight)
    assert other.module.weight is not model.module.weight
    for each in (model, other, model):
        for _ in range(3):
            each.zero_grad()
            each(x).sum().backward()
            assert each.module.weight.grad.unique().tolist() == [_mean_of_ranks(rank, size)]


@on_ranks(2)
def test_other_groups_are_refused(rank: int, size: int) -> None:
    """A model of another group than the default one can't be copied, in torch's words."""
    group = dist.new_group()
    for cls in (DistributedDataParallel, TorchDDP):
        model = cls(nn.Linear(3, 1), process_group=group)
        with pytest.raises(
            RuntimeError, match="DDP Pickling/Unpickling are only supported when using DDP with the defa"
        ):
            copy.deepcopy(model)


@on_ranks(1)
def test_delayed_parameters_are_refused(rank: int, size: int) -> None:
    """A model whose parameters are averaged late can't be copied: the copy would not average them."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    late = [("1.weight", net[1].weight)]
    model = wrap(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net[0].weight)
    with pytest.raises(RuntimeError, match="delay_all_reduce_named_params can't be copied"):
        copy.deepcopy(model)


def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 0)
    return future


@on_ranks(1)
def test_a_comm_hook_is_not_copied(rank: int, size: int) -> None:
    """A copy has no comm hook, and a warning says so."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    model.register_comm_hook(None, hook)
    with pytest.warns(UserWarning, match="has no comm hook: register it again"):
        other = copy.deepcopy(model)
    other.register_comm_hook(None, hook)


@on_ranks(1)
def test_a_model_of_an_earlier_release_is_refused(rank: int, size: int) -> None:
    """One that was pickled whole before has other attributes: it is told what to save instead."""
    model = wrap(nn.Linear(3, 1))
    state = {name: value for name, value in model.__getstate__().items() if name != "_settings"}
    with pytest.raises(ValueError, match=r"pickled by an earlier release of ddp_lab: save and load its state_dict\(\)"):
        type(model).__new__(type(model)).__setstate__(state)


@on_ranks(1)
def test_settings_are_copied(rank: int, size: int) -> None:
    """A copy has what the model has now, also what was set after it was wrapped, and its own from then on."""
    model = wrap(nn.Linear(3, 1), forward_sync_buffers=False, bucket_cap_mb=3)
    model.require_backward_grad_sync = False
    model._set_static_graph()
    model.reconfigure(bucket_cap_mb=2)
    other = copy.deepcopy(model)
    assert (other.forward_sync_buffers, other.broadcast_buffers) == (False, False)
    assert other.require_backward_grad_sync is False
    assert other.static_graph
    assert other.bucket_bytes_cap == 2 * 2**20
    other.require_backward_grad_sync = True
    assert model.require_backward_grad_sync is False
