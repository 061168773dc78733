"""Replicas of a module, one for each device, whose parameters are copies that autograd connects to the originals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .copies import broadcast_coalesced
from .devices import Device, Resolved, resolve_devices
from .functions import Broadcast

__all__ = ["replicate"]

T = TypeVar("T", bound=nn.Module)
Copies = dict[torch.Tensor, torch.Tensor]


def replicate(network: T, devices: Sequence[Device], detach: bool = False) -> list[T]:
    """Copies a module to several devices.

    The replica on the first device shares its memory with `network`, so what its forward writes into parameters and
    buffers in place (the statistics of a BatchNorm) remains; what the others write is lost, as are attributes that
    any of them sets. Parameters of a replica are no longer leaves: its `parameters()` are empty, and
    `_former_parameters` of each module holds them by name.

    Args:
        network: on the first device.
        devices: accelerators or CPU devices.
        detach: don't use autograd: gradients don't reach `network`.

    Returns:
        A module for each device.

    Raises:
        RuntimeError: a Python module is a child of a ScriptModule, or a parameter is not initialized yet.
    """
    if not _can_be_replicated(network):
        raise RuntimeError(
            "Cannot replicate network where python modules are children of ScriptModule: script the whole of it"
        )
    targets = resolve_devices(devices)
    if not targets:
        return []
    modules = list(network.modules())
    empty = [{module: module._replicate_for_data_parallel() for module in modules} for _ in targets]
    differentiable, plain = _split(network, detach)
    copies = [
        {**with_grad, **without}
        for with_grad, without in zip(
            _differentiable_copies(differentiable, targets), _plain_copies(plain, targets), strict=True
        )
    ]
    for table, tensors in zip(empty, copies, strict=True):
        for module, replica in table.items():
            _fill(replica, module, table, tensors)
    return [table[network] for table in empty]


def _split(network: nn.Module, detach: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that autograd's Broadcast copies, and those copied without it: buffers without gradient, or all."""
    parameters, buffers = list(network.parameters()), list(network.buffers())
    if detach:
        return [], [*parameters, *buffers]
    return (
        [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)],
        [buffer for buffer in buffers if not buffer.requires_grad],
    )


def _differentiable_copies(tensors: list[torch.Tensor], targets: Sequence[Resolved]) -> list[Copies]:
    flat = Broadcast.apply(targets, *tensors) if tensors else ()  # type: ignore[no-untyped-call]
    count = len(tensors)
    return [dict(zip(tensors, flat[i * count : (i + 1) * count], strict=True)) for i in range(len(targets))]


def _plain_copies(tensors: list[torch.Tensor], targets: Sequence[Resolved]) -> list[Copies]:
    if not tensors:
        return [{} for _ in targets]
    return [dict(zip(tensors, row, strict=True)) for row in broadcast_coalesced(tensors, targets)]


def _fill(replica: Any, module: nn.Module, table: dict[nn.Module, nn.Module], tensors: Copies) -> None:
    """Sets the children, parameters and buffers of one module's replica."""
    replica._former_parameters = {}
    for name, child in module._modules.items():
        if child is None:
            replica._modules[name] = None
        else:
            setattr(replica, name, table[child])
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            setattr(replica, name, tensors[parameter])  # no leaf: a plain attribute
            replica._former_parameters[name] = tensors[parameter]
    for name, buffer in module._buffers.items():
        if buffer is None:
            replica._buffers[name] = None
        else:
            setattr(replica, name, tensors[buffer])


def _can_be_replicated(network: nn.Module) -> bool:
    """False if a ScriptModule has a Python module among its descendants, whose copies it could not call."""
    script = torch.jit.ScriptModule
    return all(
        isinstance(child, script)
        for module in network.modules()
        if isinstance(module, script)
        for child in module.modules()
    )
