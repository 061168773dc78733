"""Registration of our backends with torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["register"]


def register(name: str, create: Callable[..., Any], devices: Sequence[str], *, extended_api: bool = False) -> None:
    """Registers a backend that records its own collectives; can be called repeatedly.

    From torch 2.15 on each group has a hook that records its collectives, unless its backends are in a list of those
    that do so themselves. Ours do, so they belong there: otherwise each collective would be recorded twice.
    """
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, create, extended_api=extended_api, devices=list(devices))
        noted: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        noted.add(name)
