"""Uneven inputs: the actions of a rank that has run out of inputs while others still train.

[Note: join]
Inside `with model.join():` ranks may run different numbers of iterations. `torch.distributed.algorithms.join.Join`
keeps count: each forward of a training rank (*active*), and each turn of one that is not (*joined*), begins with a
one-element all-reduce; the sum is the number of active ranks, and when it is zero all leave. In between a joined rank
must match every collective of an active rank's iteration, in its order, for each `Joinable` of the context. For ours
the order is

1. `UnevenInputs.meet`: one all-reduce of a row per iteration: how many are active, whether this backward is
   synchronised, whether gradients are on, and which ranks are active: buffers come from the largest of these.
2. the rebuild of the buckets, if one is due (a joined rank counts its parameters as ready in the order of registration)
3. buffers, if they are synchronised before the forward, and then if after it
4. the backward, if it is synchronised: `Reducer::shadow_backward` sends zeros for each bucket, through the comm hook if
   there is one, and takes part in the map of used parameters.

The row's first element is the number of active ranks, and its `Work` goes to the reducer, which divides by it if
`divide_by_initial_world_size` is False: also if the model is not the first Joinable of the context. At the end the last
rank to join (the largest of several) broadcasts its model.

Collectives that DDP does not know are not matched: those of the model itself, as in SyncBatchNorm. With them a context
needs `throw_on_early_termination`, and a warning says so before the first forward of the context can hang.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _sync_module_states

from ..core import process_groups
from ..core.arguments import BROADCAST_BYTES
from ..core.synchronizer import GradientSynchronizer

__all__ = ["DDPJoinHook", "before_forward", "check_sync_batchnorm"]


class DDPJoinHook(JoinHook):
    """A joined rank's part in the others' iterations, for one model. See [Note: join].

    Args:
        sync: the model's.
        look: the actions of an active rank before a synchronised backward.
        divide_by_initial_world_size: divide gradients by the size of the process group; False: by the number of
            ranks that still train.
    """

    def __init__(
        self, sync: GradientSynchronizer, look: Callable[[], None], *, divide_by_initial_world_size: bool
    ) -> None:
        super().__init__()
        self._sync = sync
        self._look = look
        sync.inputs.divide_by_initial_world_size = divide_by_initial_world_size
        sync.inputs.warned = False

    def main_hook(self) -> None:
        """Takes part in one iteration of the ranks that still train."""
        sync = self._sync
        sync.inputs.meet(sync.group, sync.device, active=False, sync=False)
        _, synchronised, grad, *_ = sync.inputs.settle()
        if grad and synchronised:
            self._look()
        if grad:
            sync.rebuild_if_due(bool(synchronised))
        if sync.buffers.due():
            sync.synchronize_buffers()
        sync.buffers.wanted = bool(synchronised)
        if synchronised:
            sync.reducer.shadow_backward()
            sync.reducer.mark_all_ready()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcasts the model of the last rank that joined; the largest of several."""
        sync = self._sync
        candidate = sync.group.rank() if is_last_joiner else -1
        (sync.inputs.last_joiner,) = process_groups.maximum([candidate], sync.group, sync.device)
        _sync_module_states(
            module=sync.module,
            process_group=sync.group,
            broadcast_bucket_size=BROADCAST_BYTES,
            src=sync.inputs.last_joiner,
            params_and_buffers_to_ignore=sync.ignored,
            broadcast_buffers=sync.buffers.enabled,
        )
        sync.inputs.leave()


def before_forward(model: Joinable, sync: GradientSynchronizer) -> None:
    """Tells joined ranks that this one begins an iteration, and with which collectives.

    The first collectives of each forward inside a join context.

    Args:
        model: the Joinable of the context.
        sync: the model's.

    Raises:
        RuntimeError: a rank has run out of inputs, and the context has `throw_on_early_termination`.
    """
    inputs = sync.inputs
    if not inputs.warned:
        check_sync_batchnorm(sync)
    Join.notify_join_context(model)
    synchronised = torch.is_grad_enabled() and sync.wanted
    inputs.meet(sync.group, sync.device, active=True, sync=synchronised)
    if synchronised:
        sync.reducer.set_forward_pass_work(inputs.work, inputs.divide_by_initial_world_size)


def check_sync_batchnorm(sync: GradientSynchronizer) -> None:
    """Warns, once per context, if the model contains SyncBatchNorm and uneven inputs are allowed."""
    if sync.inputs.config.throw_on_early_termination:
        return
    names = [name for name, child in sync.module.named_modules() if isinstance(child, torch.nn.SyncBatchNorm)]
    if not names:
        return
    sync.inputs.warned = True
    warnings.warn(
        f"join: '{names[0]}' is a SyncBatchNorm, whose forward communicates; a rank that has run out of inputs does "
        "not take part in that, so the other ranks will hang. Use model.join(throw_on_early_termination=True), which "
        "ends the loop on all ranks as soon as one has no more inputs.",
        stacklevel=4,
    )
