"""Which backends a benchmark can compare, and a group of the ranks on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import comm

__all__ = ["available", "groups", "memory_of"]


def available(device: str = "cpu") -> list[str]:
    """Names that `torch.distributed` knows, can use here, and takes for tensors of this device; ours among them."""
    comm.register()
    names = [name for name, devices in dist.Backend.backend_capability.items() if device in devices]
    return sorted(name for name in names if name != "fake" and dist.is_backend_available(name))


def groups(names: Sequence[str]) -> dict[str, Any]:
    """A group of all ranks on each backend; called on every rank of a Gloo world, which is the group for ``"gloo"``."""
    comm.register()
    return {name: dist.group.WORLD if name == "gloo" else dist.new_group(backend=name) for name in names}


def memory_of(group: Any, like: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the same shape and type in memory of the group's backend; None if it has none to give."""
    backend = group._get_backend(like.device)
    if not backend.supports_tensor_alloc(like.device):
        return None
    made: torch.Tensor = backend.allocate_tensor(like.numel(), dtype=like.dtype, device=like.device)
    return made
