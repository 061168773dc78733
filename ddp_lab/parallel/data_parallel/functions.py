"""Copies between devices that autograd can differentiate, any number of times.

A broadcast's backward is a sum over the devices, a scatter's is a gather, and the reverse: each of these functions
is the derivative of another, see copies.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from . import copies as device_copies
from .devices import Device, Resolved, device_of, on_cpu, resolve_device, resolve_devices, warn_of_minus_one

__all__ = ["Broadcast", "Gather", "ReduceAddCoalesced", "Scatter"]

Tensors = tuple[torch.Tensor, ...]


class Broadcast(Function):
    """``apply(devices, *tensors)``: all tensors on the first device, then all on the second, and so on."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[Device], *tensors: torch.Tensor) -> Tensors:
        """Copies; what needs no gradient has copies that need none."""
        targets = resolve_devices(devices)
        if not on_cpu(targets) and any(tensor.device.type == "cpu" for tensor in tensors):
            raise AssertionError(
                "Broadcast function not implemented for CPU tensors: give CPU devices, or move them to "
                f"device {targets[0]}"
            )
        ctx.count = len(tensors)
        ctx.home = targets[0]
        if not tensors:
            return ()
        copies = device_copies.broadcast_coalesced(tensors, targets)
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(row[i] for row in copies for i in frozen))
        return tuple(copy for row in copies for copy in row)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sums over the devices."""
        return (None, *ReduceAddCoalesced.apply(ctx.home, ctx.count, *gradients))  # type: ignore[no-untyped-call]


class ReduceAddCoalesced(Function):
    """``apply(destination, count, *tensors)``: sums over devices, which have `count` tensors each, device by device."""

    @staticmethod
    def forward(ctx: Any, destination: Resolved, count: int, *tensors: torch.Tensor) -> Tensors:
        """Sums on `destination`."""
        rows = [tensors[start : start + count] for start in range(0, len(tensors), count)]
        ctx.targets = [destination if on_cpu([destination]) else device_of(row[0]) for row in rows]
        return device_copies.reduce_add_coalesced(rows, destination)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Copies to each device."""
        return (None, None, *Broadcast.apply(ctx.targets, *gradients))  # type: ignore[no-untyped-call]


class Scatter(Function):
    """``apply(devices, chunk_sizes, dim, tensor)``: a piece for each device."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[Device], chunk_sizes: Sequence[int] | None, dim: int, tensor: torch.Tensor
    ) -> Tensors:
        """Splits and copies; from the CPU to accelerators on streams of their own."""
        targets = resolve_devices(devices)
        ctx.dim = dim
        ctx.home = device_of(tensor)
        if on_cpu(targets) or not on_cpu([ctx.home]):
            return device_copies.scatter(tensor, targets, chunk_sizes, dim)
        streams = [_copy_stream(index) for index in targets if isinstance(index, int)]
        pieces = device_copies.scatter(tensor, targets, chunk_sizes, dim, streams)
        for piece, stream in zip(pieces, streams, strict=False):
            current = torch.accelerator.current_stream(piece.device)
            current.wait_stream(stream)
            piece.record_stream(current)
        return pieces

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Joins the pieces' gradients where the tensor was."""
        return None, None, None, Gather.apply(ctx.home, ctx.dim, *gradients)  # type: ignore[no-untyped-call]


class Gather(Function):
    """``apply(destination, dim, *tensors)``: one tensor; scalars become a vector."""

    @staticmethod
    def forward(ctx: Any, destination: Device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Joins along `dim`."""
        warn_of_minus_one(destination, 3)
        target = resolve_device(destination)
        ctx.dim = dim
        ctx.sources = [device_of(tensor) for tensor in tensors]
        ctx.scalars = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            tensors = tuple(tensor.view(1) for tensor in tensors)
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
                "and return a vector.",
                stacklevel=2,
            )
        if not on_cpu([target]) and on_cpu(ctx.sources):
            raise AssertionError("Gather function not implemented for CPU tensors: gather them on the CPU")
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        return device_copies.gather(tensors, dim, target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Sends each source its piece of the gradient."""
        pieces = Scatter.apply(ctx.sources, ctx.sizes, ctx.dim, gradient)  # type: ignore[no-untyped-call]
        return (None, None, *((piece[0] for piece in pieces) if ctx.scalars else pieces))


_copy_streams: dict[int, torch.Stream] = {}


def _copy_stream(index: int) -> torch.Stream:
    """The stream on which copies from the CPU to an accelerator run beside its other work."""
    if index not in _copy_streams:
        _copy_streams[index] = torch.Stream(index)
    return _copy_streams[index]
