"""Optimizers that step during the backward: less memory for gradients, and the step is overlapped.

[Note: optimizers in the backward]
There are two variants. `torch.distributed.optim._apply_optimizer_in_backward` gives each parameter its own optimizers
and hooks its accumulator, which is too early with DDP: there the gradient is still this rank's own. So `install`
takes these hooks off and registers a comm hook: as soon as a bucket is summed it divides, steps the optimizers of the
bucket's parameters with their averaged gradients, and drops these gradients, which the reducer then leaves undefined.
`_register_fused_optim` instead runs one functional optimizer after torch's all-reduce hook, and keeps the gradients.

Both are the model's one comm hook. The step runs where the collective completes, on a stream of the future's own on
devices, and the end of the backward waits for it. Accumulation under `no_sync` works with the first way (gradients
simply stay until the synchronised backward), since nothing steps without communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..core.synchronizer import GradientSynchronizer

__all__ = ["apply_optimizer_in_backward_hook", "attach_reducer", "has_optimizers", "install", "register_fused_optim"]

Future = torch.futures.Future[torch.Tensor]


def has_optimizers(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether `_apply_optimizer_in_backward` was called on any of the parameters."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def install(sync: GradientSynchronizer) -> None:
    """Moves the optimizers of the model's parameters behind the average over the ranks. Once, if there are any.

    Raises:
        RuntimeError: the model has another comm hook already.
    """
    if not has_optimizers(sync.module_parameters):
        return
    handles = torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
    for parameter in sync.module_parameters:
        for handle in handles.get(parameter, []):
            handle.remove()
    sync.attach_hook(apply_optimizer_in_backward_hook, weakref.ref(sync))
    sync.describe()
    attach_reducer(sync)


def attach_reducer(sync: GradientSynchronizer) -> None:
    """Tells the model's reducer, which may be new, which parameters' optimizers drop their gradients."""
    if any(hook is apply_optimizer_in_backward_hook for hook, _ in sync.hooks):
        stepping = [index for index, p in enumerate(sync.trained.tensors) if hasattr(p, "_in_backward_optimizers")]
        sync.reducer._set_optimizer_in_backward(stepping)


def apply_optimizer_in_backward_hook(
    reference: weakref.ReferenceType[GradientSynchronizer], bucket: GradBucket
) -> Future:
    """A comm hook: averages the bucket, then steps the in-backward optimizers of its parameters."""
    sync = reference()
    assert sync is not None
    divisor = sync.divisor

    def step(summed: Future) -> torch.Tensor:
        summed.value()  # raises what the collective raised
        buffer: torch.Tensor = bucket.buffer().div_(divisor)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            if not optimizers:
                continue
            parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
        return buffer

    future: Future = sync.reducer._run_allreduce_hook(bucket)
    return future.then(step)


def register_fused_optim(
    model: TorchDDP,
    optim: type[torch.optim.Optimizer],
    *args: Any,
    optim_params: Iterable[torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Steps an optimizer of class `optim` on each bucket's parameters as soon as the bucket is averaged.

    Args:
        model: has no comm hook.
        optim: a class with a functional version in `torch.distributed.optim`.
        *args: of the optimizer, without the parameters.
        optim_params: the parameters to optimize; None for all of the model's.
        **kwargs: of the optimizer.

    Raises:
        RuntimeError: the optimizer can't be overlapped, or the model has a comm hook.
    """
    # imported here: it imports torch.nn.parallel.DistributedDataParallel, and FSDP with it
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
    try:
        overlapped.register_ddp(model)
    except NotImplementedError as error:
        raise RuntimeError(f"{optim} does not support overlapped DDP: {error}") from error
