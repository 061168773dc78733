"""Pieces of a tensor to several devices, and joined again; and what the copies of device_copies.py share with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import comm

from .devices import Device, on_cpu, resolve_device, resolve_devices, warn_of_minus_one

__all__ = ["gather", "scatter"]

Tensor: TypeAlias = torch.Tensor


def scatter(
    tensor: Tensor,
    devices: Iterable[Device] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Splits a tensor along one dimension and sends a piece to each device.

    Args:
        tensor: on the CPU or an accelerator.
        devices: where the pieces go; there are fewer pieces than devices if `tensor` is too short. A piece that
            stays on its device is a view.
        chunk_sizes: length of each piece; None: equal ones, the last may be shorter.
        dim: the dimension to split.
        streams: for each accelerator the stream on which to copy; without effect on CPU devices, which have none.
        out: tensors to copy the pieces into, instead of `devices` and `chunk_sizes`.

    Returns:
        The pieces, or `out`.

    Raises:
        RuntimeError: contradictory arguments, or sizes that don't add up.
    """
    if out is not None:
        return _scatter_into(tensor, out, devices, chunk_sizes, dim, streams)
    if devices is None:
        raise RuntimeError("Exactly one of 'devices' and 'out' must be specified, but got devices=None and out=None")
    targets = resolve_devices(devices)
    if not targets:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is not None and len(chunk_sizes) != len(targets):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(targets)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    if not on_cpu(targets):
        sizes = None if chunk_sizes is None else list(chunk_sizes)
        wrapped = dim % max(tensor.dim(), 1) if dim < 0 else dim  # a pair of real numbers has one dimension more
        return typed_like(comm.scatter(as_real(tensor), targets, sizes, wrapped, streams), tensor)
    pieces = tensor.chunk(len(targets), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return (on_first(pieces[0]), *(cpu_copy(piece) for piece in pieces[1:]))


def _scatter_into(
    tensor: Tensor, out: Sequence[Tensor], devices: object, chunk_sizes: object, dim: int, streams: Any
) -> tuple[Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    if not any(target.device.type == "cpu" for target in out):
        comm.scatter(as_real(tensor), dim=dim, streams=streams, out=[as_real(target) for target in out])
        return tuple(out)
    same_kind(out, out[0].device.type == "cpu", "output")
    dim = dim % max(tensor.dim(), 1)
    for index, target in enumerate(out):
        expected = list(tensor.shape)
        if target.dim() == tensor.dim():
            expected[dim] = target.shape[dim]
        if list(target.shape) != expected:
            raise RuntimeError(
                f"Output tensor at index {index} has incorrect shape: {list(target.shape)}. Expected same shape except "
                f"for scatter dim {dim} as the source tensor: {list(tensor.shape)}"
            )
    sizes = [target.shape[dim] for target in out]
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim "
            f"{dim}. Expected {tensor.shape[dim]}, but got total size {sum(sizes)}"
        )
    for target, piece in zip(out, tensor.split(sizes, dim), strict=True):
        target.copy_(piece)
    return tuple(out)


def gather(
    tensors: Iterable[Tensor], dim: int = 0, destination: Device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Joins tensors that are on different devices along one dimension.

    Args:
        tensors: of one dtype, and one shape but for `dim`.
        dim: the dimension along which they are joined.
        destination: where the result is wanted. None: the current accelerator, or the CPU if all tensors are there.
        out: a tensor of the result's shape to copy into, instead of `destination`.

    Returns:
        The result, or `out`.

    Raises:
        RuntimeError: no tensors, shapes that don't fit, or both `destination` and `out`.
    """
    tensors = list(tensors)
    if out is not None and destination is not None:
        raise RuntimeError(
            f"'destination' must not be specified when 'out' is specified, but got destination={destination}"
        )
    expected = _joined_shape(tensors, dim)
    if out is not None:
        if list(out.shape) != expected:
            raise RuntimeError(f"Expected out tensor to have shape {expected}, but got {list(out.shape)}")
        start = 0
        for tensor in tensors:
            out.narrow(dim, start, tensor.shape[dim]).copy_(tensor, non_blocking=not out.is_cpu)
            start += tensor.shape[dim]
        return out
    warn_of_minus_one(destination, 3)
    if all(tensor.device.type == "cpu" for tensor in tensors) and (destination is None or to_cpu([], destination)):
        return torch.cat(tensors, dim)
    same_kind(tensors, False, "input")
    target = "cpu" if destination is not None and to_cpu([], destination) else destination
    wrapped = dim % max(tensors[0].dim(), 1) if dim < 0 else dim
    return typed_like([comm.gather([as_real(tensor) for tensor in tensors], wrapped, target)], tensors[0])[0]


def _joined_shape(tensors: Sequence[Tensor], dim: int) -> list[int]:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    dimensions = tensors[0].dim()
    for index, tensor in enumerate(tensors):
        if tensor.dim() != dimensions:
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at index "
                f"{index} has {tensor.dim()} dimensions, (expected {dimensions})"
            )
        expected = list(tensors[0].shape)
        expected[dim] = tensor.shape[dim]
        if list(tensor.shape) != expected:
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {list(tensor.shape)}, but expected {expected}"
            )
    total = list(tensors[0].shape)
    total[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return total


# -- shared with device_copies.py


def same_kind(tensors: Sequence[Tensor], cpu: bool, role: str) -> None:
    for index, tensor in enumerate(tensors):
        if (tensor.device.type == "cpu") != cpu:
            kind = "CPU" if cpu else "CUDA"
            raise RuntimeError(
                f"Expected all {role} tensors to be {kind} tensors, but {role} tensor at index {index} has device "
                f"'{tensor.device}'"
            )


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def typed_like(results: Iterable[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.view_as_complex(result) if tensor.is_complex() else result for result in results)


def cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def on_first(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def to_cpu(tensors: Sequence[Tensor], destination: Device | None) -> bool:
    """Whether this is a sum on the CPU: all tensors are there, and so is the destination if one is named."""
    cpu = destination is None or not isinstance(resolve_device(destination), int)
    return cpu and all(tensor.device.type == "cpu" for tensor in tensors)
