"""Copies of tensors between the devices of one process: one to all, and the sum of all; pieces are in device_pieces.py.

On accelerators the copies go through `torch.cuda.comm`, which knows NCCL and streams. Complex tensors stay complex
(torch returns pairs of real numbers). On CPU devices, see [Note: CPU devices] in replica_devices.py, the first device
shares the source's memory and each other one gets a copy; there is nothing to coalesce: `buffer_size` is for
accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch.nn.parallel import comm

from .devices import Device, on_cpu, resolve_devices
from .pieces import as_real, cpu_copy, gather, on_first, same_kind, scatter, to_cpu, typed_like

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
            return typed_like(comm.broadcast(tensor, targets), tensor)
        return (on_first(tensor), *(cpu_copy(tensor) for _ in targets[1:]))
    assert out is not None
    same_kind(out, bool(out) and out[0].device.type == "cpu", "output")
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
        return [[typed_like([copy], tensor)[0] for copy, tensor in zip(row, tensors, strict=True)] for row in copies]
    strangers = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    if strangers:
        raise RuntimeError(f"all tensors must be on devices[0], which is {targets[0]}, but one is on {strangers[0]}")
    return [list(tensors), *([cpu_copy(tensor.detach()) for tensor in tensors] for _ in targets[1:])]


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
    if not to_cpu(inputs, destination):
        for index, tensor in enumerate(inputs):
            if tensor.device.type == "cpu":
                raise AssertionError(f"reduce_add expects all inputs to be on GPUs, but input {index} is on CPU")
        return typed_like([comm.reduce_add([as_real(tensor) for tensor in inputs], destination)], inputs[0])[0]
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
    if not all(to_cpu(row, destination) for row in rows):
        real = [[as_real(tensor) for tensor in row] for row in rows]
        sums = comm.reduce_add_coalesced(real, destination, buffer_size)
        return tuple(typed_like([total], tensor)[0] for total, tensor in zip(sums, rows[0], strict=True))
    totals = []
    for column in zip(*rows, strict=True):
        sparse = all(tensor.is_sparse for tensor in column)
        totals.append(reduce_add([t if sparse or not t.is_sparse else t.to_dense() for t in column], destination))
    return tuple(totals)
