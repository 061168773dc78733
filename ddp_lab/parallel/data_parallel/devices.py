"""Which devices replicas are on: accelerators by index, or CPU "devices".

[Note: CPU devices]
`DataParallel` and everything under it runs on accelerators, as torch's, and on CPU "devices": names such as
``"cpu:0"`` and ``"cpu:1"``, or ``"cpu"`` several times, which number themselves by position. To torch all of them
are one device, so a tensor can't say which it is on. Here the first device of a list is the one that the source is
on: it gets the source itself (or a view of it), each other device gets a copy of its own. That is what happens on
accelerators, so a program that writes to a replica's tensors behaves alike on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch._utils import _get_device_index

__all__ = ["Device", "Resolved", "device_of", "on_cpu", "resolve_device", "resolve_devices", "warn_of_minus_one"]

Device: TypeAlias = int | str | torch.device
Resolved: TypeAlias = int | torch.device  # an accelerator's index, or a CPU device


def resolve_device(device: Device, position: int = 0) -> Resolved:
    """An accelerator's index, or ``torch.device("cpu", index)``; -1 stands for the CPU.

    Args:
        device: as the user names it.
        position: the index of a CPU device that has none.
    """
    if device == -1:
        return torch.device("cpu", 0)
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu":
        index = torch.device(device).index
        return torch.device("cpu", position if index is None else index)
    return int(_get_device_index(device, True))


def resolve_devices(devices: Iterable[Device]) -> list[Resolved]:
    """The same for a list of devices.

    Raises:
        ValueError: CPU devices and accelerators in one list.
    """
    resolved = [resolve_device(device, position) for position, device in enumerate(devices)]
    if len({isinstance(device, int) for device in resolved}) > 1:
        raise ValueError(f"CPU devices and accelerators can't be used together, but got {resolved}")
    return resolved


def on_cpu(devices: Sequence[Resolved]) -> bool:
    """Whether resolved devices are CPU devices."""
    return bool(devices) and not isinstance(devices[0], int)


def device_of(tensor: torch.Tensor) -> Resolved:
    """The device that a tensor is on, resolved."""
    return torch.device("cpu", 0) if tensor.device.type == "cpu" else tensor.get_device()


def warn_of_minus_one(device: Device | None, stacklevel: int) -> None:
    """Warns if a destination is -1, torch's old name of the CPU."""
    if device == -1:
        warnings.warn(
            "Using -1 to represent CPU tensor is deprecated. Please use a device object or string instead, e.g., "
            '"cpu".',
            FutureWarning,
            stacklevel=stacklevel,
        )
