"""Uneven inputs: what a rank that has run out of inputs does while others still train.

[Note: join]
Inside `with model.join():` ranks may run different numbers of iterations. `torch.distributed.algorithms.join.Join`
keeps count: each forward of a rank that trains (*active*), and each turn of one that does not (*joined*), begins with
a one-element all-reduce; the sum says how many are active, and when it is zero everybody leaves. In between a joined
rank must meet every collective of an active rank's iteration, in its order, for each `Joinable` of the context. For
ours the order is

1. `_meet` (here): one all-reduce of a row per iteration: how many are active, whether this backward is synchronised,
   whether gradients are on, and which ranks are active: buffers come from the largest of these.
2. the rebuild of the buckets, if one is due (a joined rank counts its parameters as ready in the order of registration)
3. buffers, where they are synchronised before the forward, and then where after it
4. the backward, if it is synchronised: `Reducer::shadow_backward` sends zeros for each bucket, through the comm hook if
   there is one, and takes part in the map of used parameters.

The row's first element is the number of active ranks, and its work goes to the reducer, which divides by it where
`divide_by_initial_world_size` is False: also where the model is not the first Joinable of the context. At the end the
last rank to join (of several the largest) broadcasts its model.

Not met are collectives that DDP does not know: those of the model itself, as in SyncBatchNorm. With them a context
needs `throw_on_early_termination`, and we say so before the first forward of the context can hang.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.utils import _sync_module_states

from ..core import process_groups

if TYPE_CHECKING:
    from ..core.model_state import ModelState

__all__ = ["before_forward", "buffer_source", "check_sync_batchnorm", "divisor", "make_join_hook"]

_RANKS = 3  # index of the first rank's element in the row of `_meet`


class Meeting(NamedTuple):
    """The row of one iteration, summed over the ranks once `work` is done."""

    row: torch.Tensor
    work: dist.Work


class DDPJoinHook(JoinHook):
    """A joined rank's share of one model in the iterations of the others. See [Note: join]."""

    def __init__(self, model: ModelState) -> None:
        super().__init__()
        self._model = model

    def main_hook(self) -> None:
        """Takes part in one iteration of the ranks that still train."""
        model = self._model
        _, sync, grad, *_ = _settle(_meet(model, active=False, sync=False))
        if grad and sync and model._live is not None:
            model._live.look(model)
        if grad:
            model._rebuild_if_due(bool(sync))
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers()
        if model._check_sync_bufs_post_fwd():
            model._sync_buffers()
        model.require_forward_param_sync = bool(sync)
        if sync:
            model.reducer.shadow_backward()
            model.reducer.mark_all_ready()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcasts the model of the last rank that joined; of several, of the largest."""
        model = self._model
        candidate = torch.tensor([_rank(model) if is_last_joiner else -1], device=model.device)
        process_groups.all_reduce(candidate, model.process_group, dist.ReduceOp.MAX)
        model._authoritative_rank = int(candidate.item())
        _sync_module_states(
            module=model.module,
            process_group=model.process_group,
            broadcast_bucket_size=model.broadcast_bucket_size,
            src=model._authoritative_rank,
            params_and_buffers_to_ignore=model.parameters_to_ignore,
            broadcast_buffers=model.forward_sync_buffers,
        )
        # Forwards after the context meet nobody; torch leaves this on.
        model._join_config = type(model._join_config).construct_disabled_join_config()


def make_join_hook(model: ModelState, divide_by_initial_world_size: bool = True) -> DDPJoinHook:
    """What `Join` runs on this rank once it has run out of inputs.

    Args:
        model: the model.
        divide_by_initial_world_size: divide gradients by the size of the process group; False: by the number of
            ranks that still train.
    """
    model.logger._set_uneven_input_join()
    model._divide_by_initial_world_size = divide_by_initial_world_size
    model._join_warned = False
    return DDPJoinHook(model)


def before_forward(model: ModelState) -> None:
    """Tells joined ranks that this one begins an iteration, and what there will be to take part in.

    The first collectives of each forward inside a join context; none outside.

    Raises:
        RuntimeError: a rank has run out of inputs, and the context asked for `throw_on_early_termination`.
    """
    config = model._join_config
    if not config.enable:
        return
    if not model._join_warned:
        check_sync_batchnorm(model, config.throw_on_early_termination)
    Join.notify_join_context(model)
    sync = torch.is_grad_enabled() and model.require_backward_grad_sync
    model._meeting = _meet(model, active=True, sync=sync)
    if sync:
        model.reducer.set_forward_pass_work(model._meeting.work, model._divide_by_initial_world_size)


def buffer_source(model: ModelState) -> int:
    """The rank, in the model's group, whose buffers count in this iteration: rank 0 outside a join context."""
    if not model._join_config.enable:
        return 0
    active = _settle(model._meeting)[_RANKS:]
    return max(rank for rank, is_active in enumerate(active) if is_active)


def divisor(model: ModelState) -> int:
    """What a sum of this backward's gradients over the ranks is to be divided by."""
    if not model._join_config.enable or model._divide_by_initial_world_size:
        return model.process_group.size()
    return int(_settle(model._meeting)[0])


def check_sync_batchnorm(model: ModelState, throw_on_early_termination: bool) -> None:
    """Warns, once for a context, if the model holds SyncBatchNorm and uneven inputs are to be tolerated."""
    if throw_on_early_termination:
        return
    names = [name for name, child in model.module.named_modules() if isinstance(child, torch.nn.SyncBatchNorm)]
    if not names:
        return
    model._join_warned = True
    warnings.warn(
        f"join: '{names[0]}' is a SyncBatchNorm, whose forward communicates; a rank that has run out of inputs does "
        "not take part in that, so the other ranks will hang. Use model.join(throw_on_early_termination=True), which "
        "ends the loop on all ranks as soon as one has no more inputs.",
        stacklevel=4,
    )


def _meet(model: ModelState, *, active: bool, sync: bool) -> Meeting:
    size = _RANKS + model.process_group.size()
    row = torch.zeros(size, dtype=torch.float32, device=model.device)
    if active:
        row[0] = 1
        row[1] = sync
        row[2] = torch.is_grad_enabled()
        row[_RANKS + _rank(model)] = 1
    work = process_groups.all_reduce_async(row, model.process_group)
    meeting = Meeting(row, work)
    model._meeting = meeting
    return meeting


def _settle(meeting: Meeting) -> list[float]:
    """The row, once all ranks have contributed."""
    process_groups.finish(meeting.work)
    return list(meeting.row.tolist())


def _rank(model: ModelState) -> int:
    return int(model.process_group.rank())
