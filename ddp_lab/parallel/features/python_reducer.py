"""torch.compile's mode without a C++ reducer: `torch._dynamo.config.optimize_ddp = "python_reducer"`.

[Note: the Python reducer]
In this mode each gradient is averaged by a hook written in Python with a functional collective, so that compiled
autograd sees it, and inductor fuses the collectives of many gradients (into buckets of `bucket_cap_mb`). It is chosen
when the model is wrapped. The C++ reducer is there for questions about the model, but has no hooks: it records and
averages nothing, buckets are never rebuilt, and unused parameters just bring no gradient. Buffers are not broadcast
after the construction. A comm hook is called as ``hook(state, (gradient, parameter))``. All of this is as in torch.
So is it that torch.compile looks into a call of the model: `forward` is the one below, not the class's, which it is
told to leave alone ([Note: what torch.compile sees]).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from ..core.synchronizer import GradientSynchronizer

__all__ = ["install", "is_chosen"]


def is_chosen() -> bool:
    """Whether models are to be built for this mode now. Asks torch._dynamo only if something has imported it."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and config.optimize_ddp == "python_reducer"


def install(model: torch.nn.Module, sync: GradientSynchronizer) -> list[Any]:
    """Takes the reducer's hooks off, gives each trained parameter one of its own, and leaves the call to the module.

    Args:
        model: the wrapper, whose forward is replaced.
        sync: the wrapper's.

    Returns:
        The handles of the parameters' hooks.
    """
    from torch._inductor import config

    config._fuse_ddp_communication = True
    config._fuse_ddp_bucket_size = sync.caps.others // 2**20
    sync.reducer.remove_hooks()
    model.forward = types.MethodType(forward, model)
    return [
        parameter.register_post_accumulate_grad_hook(lambda parameter: _average(sync, parameter))
        for parameter in sync.trained.tensors
    ]


def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Runs the module, and nothing else."""
    return self.module(*inputs, **kwargs)


def _average(sync: GradientSynchronizer, parameter: torch.Tensor) -> None:
    import torch.distributed._functional_collectives as functional

    if not sync.wanted or parameter.grad is None:
        return
    if sync.hooks:
        for hook, state in sync.hooks:
            hook(state, (parameter.grad, parameter))  # type: ignore[operator]
        return
    share = parameter.grad / sync.group.size()
    parameter.grad.copy_(functional.all_reduce(share, "sum", sync.group))
