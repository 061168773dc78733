"""Under torch.compile: the module is compiled, our forward around it is not, as with torch's own class.

[Note: what torch.compile sees]
torch.compile leaves the file of torch's class alone by its name, and so compiles the wrapped module as a graph of its
own, which its DDPOptimizer splits along the buckets. For ours the same is asked for function by function. The two that
call the module are skipped themselves, what they call is not; all others are skipped with everything they call, or
torch.compile would find the code that they share with other modules and spend seconds on it. Inside a compiled function
a call of the model is a graph break. Nothing here imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection

from torch._C._dynamo import eval_frame

__all__ = ["is_loaded", "skip_frames"]


def is_loaded() -> bool:
    """Whether anything in this process can have been compiled."""
    return "torch._dynamo" in sys.modules


def skip_frames(cls: type, callers: Collection[str]) -> None:
    """Keeps torch.compile from looking into the functions of a class, of its parts, and of the modules they are in.

    Args:
        cls: the wrapper class.
        callers: names of its methods that call the wrapped module, which is compiled.
    """
    package = f"{__name__.split('.')[0]}.parallel."
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    alone, with_callees = eval_frame._FrameExecStrategy(skip, default), eval_frame._FrameExecStrategy(skip, skip)
    for name in {base.__module__ for base in cls.__mro__ if base.__module__.startswith(package)}:
        module = sys.modules[name]
        classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        for holder in (module, *classes):
            for value in vars(holder).values():
                function = getattr(value, "__wrapped__", value)
                if isinstance(function, types.FunctionType) and function.__module__ == name:
                    strategy = alone if holder is cls and function.__name__ in callers else with_callees
                    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    cls.forward._torchdynamo_disable = True  # type: ignore[attr-defined]
