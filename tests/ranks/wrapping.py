"""Our class with arguments that the installed torch's may lack, and a mark for tests that need torch's to have them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_lab import DistributedDataParallel
from ddp_lab.parallel.core.arguments import Arguments

__all__ = ["FORWARD_SYNC", "needs_forward_sync", "wrap"]

FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
needs_forward_sync = pytest.mark.skipif(not FORWARD_SYNC, reason="this release of torch has no forward_sync_buffers")


def wrap(module: nn.Module, **arguments: Any) -> Any:
    """`DistributedDataParallel(module, **arguments)`, whichever release of torch has the arguments."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    inspect.unwrap(DistributedDataParallel.__init__)(model, Arguments(module, **arguments))
    return model
