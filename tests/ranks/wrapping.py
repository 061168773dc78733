"""Our class with arguments that the installed torch's may lack."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

__all__ = ["wrap"]


def wrap(module: nn.Module, **arguments: Any) -> Any:
    """`DistributedDataParallel(module, **arguments)`, whichever release of torch has the arguments."""
    from ddp_lab import DistributedDataParallel

    model = DistributedDataParallel.__new__(DistributedDataParallel)
    inspect.unwrap(DistributedDataParallel.__init__)(model, module, **arguments)
    return model
