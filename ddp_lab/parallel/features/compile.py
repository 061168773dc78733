"""Support for torch.compile: frames that it skips, and its mode with a Python reducer.

[Note: what torch.compile sees]
torch.compile skips the file of torch's class by its name, and so compiles the wrapped module as a graph of its own,
which its DDPOptimizer splits along the buckets. For our class we request the same for each function. The two that call
the module are skipped themselves, but not their callees; all others are skipped with everything they call, otherwise
torch.compile would spend seconds on code that they share with other modules. Inside a compiled function a call of the
model is a graph break. Nothing here imports torch._dynamo, which takes seconds.

[Note: the Python reducer]
In this mode each gradient is averaged by a hook written in Python with a functional collective, so that compiled
autograd sees it, and inductor fuses the collectives of many gradients (into buckets of `bucket_cap_mb`). It is chosen
when the model is wrapped. The C++ reducer exists for queries about the model, but has no hooks: it records
and averages nothing, buckets are never rebuilt, and unused parameters simply have no gradient. Buffers are not
broadcast after the construction. A comm hook is called as ``hook(state, (gradient, parameter))``. All of this is as in
torch. As there, torch.compile traces into a call of the model: `_forward` is the one below, not the class's, which it
is told to skip ([Note: what torch.compile sees]).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from ..core.synchronizer import GradientSynchronizer

__all__ = ["install_python_reducer", "is_loaded", "python_reducer_is_chosen", "skip_frames"]


def is_loaded() -> bool:
    """Whether anything in this process can have been compiled."""
    return "torch._dynamo" in sys.modules


def skip_frames(cls: type, *parts: type, callers: Collection[str]) -> None:
    """Keeps torch.compile from tracing into the functions of a class, of its parts, and of their modules.

    Args:
        cls: the wrapper class.
        parts: classes of what it is made of.
        callers: names of its methods that call the wrapped module, which is compiled.
    """
    package = f"{__name__.split('.')[0]}.parallel."
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    alone, with_callees = eval_frame._FrameExecStrategy(skip, default), eval_frame._FrameExecStrategy(skip, skip)
    for name in {base.__module__ for base in (*cls.__mro__, *parts) if base.__module__.startswith(package)}:
        module = sys.modules[name]
        classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        for holder in (module, *classes):
            for value in vars(holder).values():
                function = getattr(value, "__wrapped__", value)
                if isinstance(function, types.FunctionType) and function.__module__ == name:
                    strategy = alone if holder is cls and function.__name__ in callers else with_callees
                    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    cls.forward._torchdynamo_disable = True  # type: ignore[attr-defined]


def python_reducer_is_chosen() -> bool:
    """Whether models are now built for the Python reducer. Uses torch._dynamo only if it was imported."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and config.optimize_ddp == "python_reducer"


def install_python_reducer(model: torch.nn.Module, sync: GradientSynchronizer) -> list[Any]:
    """Removes the reducer's hooks, gives each trained parameter its own, and reduces the call to the module's.

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
    model.forward = types.MethodType(_forward, model)
    return [
        parameter.register_post_accumulate_grad_hook(lambda parameter: _average(sync, parameter))
        for parameter in sync.trained.tensors
    ]


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
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
