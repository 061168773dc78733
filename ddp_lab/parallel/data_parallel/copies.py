"""Copies of tensors between the devices of one process: one to all, the sum of all, and pieces.

On accelerators the copies go through `torch.cuda.comm`, which knows NCCL and streams. Complex tensors stay complex
(torch returns pairs of real numbers). On CPU devices, see [Note: CPU devices] in devices.py, the first device
shares the source's memory and each other one gets a copy; there is nothing to coalesce: `buffer_size` is for
accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import comm

from .devices import Device, on_cpu, resolve_device, resolve_devices, warn_of_minus_one

__all__ = ["broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter"]

Tensor: TypeAlias = torch.Tensor
COALESCED_BYTES = 10 * 1024 * 1024


# -- one to all


def broadcast(
    tensor: Tensor, devices: Iterable[Device] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Copies a tensor to several devices.

    Args:
        tensor: of any shape and dtype.
        devices: where copies are wanted; the first gets `tensor` itself if it is there.
        out: tensors of the same shape to copy into, instead of `devices`.

    Returns:
        One tensor for each device, or `out`.

    Raises:
        RuntimeError: both or none of `devices` and `out` were given; a tensor of `out` has another shape, or is on
            another kind of device than the rest.
    """
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    if devices is not None:
        targets = resolve_devices(devices)
        if not on_cpu(targets):
            return _typed_like(comm.broadcast(tensor, targets), tensor)
        return (_on_first(tensor), *(_cpu_copy(tensor) for _ in targets[1:]))
    assert out is not None
    _same_kind(out, bool(out) and out[0].device.type == "cpu", "output")
    for index, target in enumerate(out):
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but "
                f"output tensor at index {index} has shape {list(target.shape)}"
            )
        target.copy_(tensor, non_blocking=True)
    return tuple(out)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Iterable[Device], buffer_size: int = COALESCED_BYTES
) -> list[list[Tensor]]:
    """Copies several tensors to several devices, small ones together.

    Args:
        tensors: of any shapes and dtypes, dense or sparse, all on ``devices[0]``.
        devices: where copies are wanted; the first gets the tensors themselves.
        buffer_size: bytes that travel in one copy between accelerators.

    Returns:
        For each device the list of its tensors. No two of them share a version counter.

    Raises:
        RuntimeError: a tensor is not on ``devices[0]``.
    """
    targets = resolve_devices(devices)
    if not on_cpu(targets):
        copies = comm.broadcast_coalesced(tensors, targets, buffer_size)
        return [[_typed_like([copy], tensor)[0] for copy, tensor in zip(row, tensors, strict=True)] for row in copies]
    strangers = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    if strangers:
        raise RuntimeError(f"all tensors must be on devices[0], which is {targets[0]}, but one is on {strangers[0]}")
    return [list(tensors), *([_cpu_copy(tensor.detach()) for tensor in tensors] for _ in targets[1:])]


# -- all to one


def reduce_add(inputs: Iterable[Tensor], destination: Device | None = None) -> Tensor:
    """Sums tensors that are on different devices.

    Args:
        inputs: tensors of one shape, dtype and layout.
        destination: where the sum is wanted; one of the inputs must be there. None: the current device.

    Returns:
        The sum; a single input is returned as it is.

    Raises:
        AssertionError: an input is on the CPU and the destination is not.
        ValueError: the inputs' sizes differ, or there are none.
        RuntimeError: no input is on the destination.
    """
    inputs = list(inputs)
    if not inputs:
        raise ValueError("reduce_add expects at least one tensor")
    if not _to_cpu(inputs, destination):
        for index, tensor in enumerate(inputs):
            if tensor.device.type == "cpu":
                raise AssertionError(f"reduce_add expects all inputs to be on GPUs, but input {index} is on CPU")
        return _typed_like([comm.reduce_add([_as_real(tensor) for tensor in inputs], destination)], inputs[0])[0]
    for index, tensor in enumerate(inputs):
        if tensor.shape != inputs[0].shape:
            got, expected = ("x".join(map(str, each.shape)) for each in (tensor, inputs[0]))
            raise ValueError(f"input {index} has invalid size: got {got}, but expected {expected}")
    if len(inputs) == 1:
        return inputs[0]
    total = inputs[0] + inputs[1]
    for tensor in inputs[2:]:
        total.add_(tensor)
    return total


def reduce_add_coalesced(
    inputs: Iterable[Sequence[Tensor]], destination: Device | None = None, buffer_size: int = COALESCED_BYTES
) -> tuple[Tensor, ...]:
    """Sums the tensors of each position over devices, small ones together.

    Args:
        inputs: for each device the list of its tensors. A position where all are sparse has a sparse sum, one
            where only some are has a dense one.
        destination: see `reduce_add`.
        buffer_size: bytes that travel in one copy between accelerators.

    Returns:
        The sum for each position.

    Raises:
        ValueError: the devices have different numbers of tensors, or sizes differ.
    """
    rows = [list(row) for row in inputs]
    if not all(_to_cpu(row, destination) for row in rows):
        real = [[_as_real(tensor) for tensor in row] for row in rows]
        sums = comm.reduce_add_coalesced(real, destination, buffer_size)
        return tuple(_typed_like([total], tensor)[0] for total, tensor in zip(sums, rows[0], strict=True))
    totals = []
    for column in zip(*rows, strict=True):
        sparse = all(tensor.is_sparse for tensor in column)
        totals.append(reduce_add([t if sparse or not t.is_sparse else t.to_dense() for t in column], destination))
    return tuple(totals)


# -- pieces


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
        return _typed_like(comm.scatter(_as_real(tensor), targets, sizes, wrapped, streams), tensor)
    pieces = tensor.chunk(len(targets), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return (_on_first(pieces[0]), *(_cpu_copy(piece) for piece in pieces[1:]))


def _scatter_into(
    tensor: Tensor, out: Sequence[Tensor], devices: object, chunk_sizes: object, dim: int, streams: Any
) -> tuple[Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    if not any(target.device.type == "cpu" for target in out):
        comm.scatter(_as_real(tensor), dim=dim, streams=streams, out=[_as_real(target) for target in out])
        return tuple(out)
    _same_kind(out, out[0].device.type == "cpu", "output")
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
    if all(tensor.device.type == "cpu" for tensor in tensors) and (destination is None or _to_cpu([], destination)):
        return torch.cat(tensors, dim)
    _same_kind(tensors, False, "input")
    target = "cpu" if destination is not None and _to_cpu([], destination) else destination
    wrapped = dim % max(tensors[0].dim(), 1) if dim < 0 else dim
    return _typed_like([comm.gather([_as_real(tensor) for tensor in tensors], wrapped, target)], tensors[0])[0]


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


# -- what they share


def _same_kind(tensors: Sequence[Tensor], cpu: bool, role: str) -> None:
    for index, tensor in enumerate(tensors):
        if (tensor.device.type == "cpu") != cpu:
            kind = "CPU" if cpu else "CUDA"
            raise RuntimeError(
                f"Expected all {role} tensors to be {kind} tensors, but {role} tensor at index {index} has device "
                f"'{tensor.device}'"
            )


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _typed_like(results: Iterable[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.view_as_complex(result) if tensor.is_complex() else result for result in results)


def _cpu_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _on_first(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _to_cpu(tensors: Sequence[Tensor], destination: Device | None) -> bool:
    """Whether this is a sum on the CPU: all tensors are there, and so is the destination if one is named."""
    cpu = destination is None or not isinstance(resolve_device(destination), int)
    return cpu and all(tensor.device.type == "cpu" for tensor in tensors)
