"""Ours in torch's place: signature, methods, state_dict, no_sync, buffers, scripts under torchrun."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from ddp_lab.parallel.core.arguments import Arguments, ReducerOptions
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks
from tests.ranks.wrapping import FORWARD_SYNC, wrap

# Inherited methods that need no reducer of torch's: they read attributes that ours sets.
INHERITED = {
    "_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_get_active_ddp_module",
    "_get_data_parallel_params", "_inside_ddp_forward", "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "_distributed_rank", "gather", "scatter", "to_kwargs", "train",
}  # fmt: skip
# Steps of torch's own constructor, forward, a mode or join: nothing that ours runs, or lets a user run, calls them.
UNREACHABLE = {
    "_check_sync_bufs_post_fwd", "_check_sync_bufs_pre_fwd", "_sync_buffers",
    "_distributed_broadcast_coalesced", "_sync_module_buffers",
    "_check_and_sync_module_buffers", "_check_comm_hook", "_check_global_requires_backward_grad_sync",
    "_clear_grad_buffer", "_ddp_init_helper", "_delayed_all_reduce_hook", "_find_common_rank",
    "_fire_reducer_autograd_hook", "_get_parameters", "_lazy_init",
    "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce", "_module_wait_for_copy_hook",
    "_passing_sync_batchnorm_handle", "_register_accum_grad_hook", "_register_delay_all_reduce_hook",
    "_root_copy_hook", "_setup_in_backward_optimizers", "_sync_final_model",
}  # fmt: skip


class _Annotated:
    """Has what Python itself gives every class with annotations, `__annotate_func__` for example."""

    number: int


def test_the_signature_is_torchs() -> None:
    """The constructor shows the installed torch's signature and takes each of its arguments."""
    assert inspect.signature(DistributedDataParallel) == inspect.signature(TorchDDP)
    ours = inspect.signature(Arguments).parameters
    theirs = inspect.signature(TorchDDP).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    defaults = {name: p.default for name, p in theirs.items()}
    if not FORWARD_SYNC:
        defaults["broadcast_buffers"] = None  # its successor decides
    assert {name: ours[name].default for name in theirs} == defaults


def test_options_of_the_reducer_are_arguments() -> None:
    """Each option of the reducer is an argument, with the same type and default, and an attribute of the model."""
    arguments = {one.name: (one.type, one.default) for one in dataclasses.fields(Arguments)}
    for option in dataclasses.fields(ReducerOptions):
        assert arguments[option.name] == (option.type, option.default)
        assert isinstance(vars(DistributedDataParallel)[option.name], property)


def test_every_method_of_torchs_is_accounted_for() -> None:
    """Each method of torch's class is replaced by ours, or known to need no reducer of torch's."""
    theirs = {
        name
        for name, value in vars(TorchDDP).items()
        if callable(value) or isinstance(value, (property, classmethod, staticmethod))
    }
    ours = {name for base in DistributedDataParallel.__mro__ if "ddp_lab" in base.__module__ for name in vars(base)}
    assert theirs - ours - INHERITED - UNREACHABLE - {"_active_ddp_module"} - set(vars(_Annotated)) == set()


@on_ranks(2)
def test_attributes_and_methods(rank: int, size: int) -> None:
    """State dict, isinstance and attributes are torch's."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(net)
    assert isinstance(model, TorchDDP)
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert model.module is net
    assert model.join_process_group is dist.group.WORLD
    assert model.join_device == torch.device("cpu")
    assert model.train() is model
    assert model.eval().training is False
    assert model.broadcast_buffers is True
    assert repr(model).startswith("DistributedDataParallel(")
    parameters, sparse = model._build_params_for_reducer()
    assert model._build_debug_param_to_name_mapping(parameters)[0] == "0.weight"
    assert sparse == [False] * 4
    assert list(model.named_module_buffers) == [name for name, _ in net.named_buffers()]
    model._check_reducer_finalized()
    model._remove_autograd_hooks()
    model(torch.randn(3, 4)).sum().backward()  # as a plain module now


@on_ranks(1)
def test_positions_and_hooks(rank: int, size: int) -> None:
    """Arguments are taken in torch's order; a comm hook's signature is checked."""
    DistributedDataParallel(nn.Linear(2, 2), None, None, 0, None, True, dist.group.WORLD, 5, False)
    DistributedDataParallel(nn.Linear(2, 2), device_ids=[], bucket_cap_mb_list=[], device_mesh=None)
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"can't be called as hook\(state, bucket\)"):
        model.register_comm_hook(None, lambda state: None)


@on_ranks(2)
def test_state_is_broadcast_from_rank_0(rank: int, size: int) -> None:
    """Parameters and buffers become rank 0's, buffers alone again at each forward; ignored ones are left alone."""

    def net() -> nn.Module:
        torch.manual_seed(rank)
        made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        made.register_buffer("own", torch.full((2,), float(rank)))
        return made

    def same(tensor: torch.Tensor) -> bool:
        return all(torch.equal(other, tensor) for other in everywhere(tensor.detach()))

    model = DistributedDataParallel(net())
    assert all(same(tensor.float()) for tensor in model.state_dict().values())
    assert model.module.own.tolist() == [0.0, 0.0]
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        assert all(same(p.grad) for p in model.parameters())
    model.module.own = torch.full((2,), 10.0 + rank)  # assigned anew: found at the next forward
    model(torch.randn(5, 4))
    assert model.module.own.tolist() == [10.0, 10.0]
    with torch.no_grad():
        model.module[0].weight.add_(rank)
    model.eval()
    model.module.own.add_(rank)
    model(torch.randn(5, 4))
    assert model.module.own.tolist() == [10.0, 10.0]
    assert not same(model.module[0].weight)

    kept = wrap(net(), forward_sync_buffers=False)
    assert kept.module.own.tolist() == [0.0, 0.0]
    kept.module.own.fill_(rank)
    kept(torch.randn(5, 4)).sum().backward()
    assert kept.module.own.tolist() == [rank, rank]

    apart = DistributedDataParallel(net(), init_sync=False)
    assert apart.module.own.tolist() == [rank, rank]
    assert size == 1 or not same(apart.module[0].weight)

    module = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "own"])
    ignoring = DistributedDataParallel(module)
    assert module.own.tolist() == [rank, rank]
    ignoring(torch.randn(5, 4)).square().sum().backward()
    assert not same(module[0].weight.grad)
    assert same(module[0].bias.grad)
