"""What a model's buckets are: frozen records for the user, a description for the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import agreement, process_groups

__all__ = ["BucketInfo", "BucketTimes", "buffer_of", "describe", "times_of"]


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket's way through one backward happened, in milliseconds from the backward's begin.

    Attributes:
        first_ready_ms: the first gradient of the bucket was ready.
        ready_ms: the last one was.
        launched_ms: its collective was started.
        reduced_ms: its collective was complete, as the host sees it.
        backward_ms: the whole backward, until every bucket was written back.
    """

    first_ready_ms: float
    ready_ms: float
    launched_ms: float
    reduced_ms: float
    backward_ms: float


@dataclass(frozen=True)
class BucketInfo:
    """One bucket of a model.

    Attributes:
        index: its place in the order of launch, the same on all ranks.
        parameters: qualified names of the parameters whose gradients travel in it, in buffer order.
        bytes: size of its buffer.
        dtype: of its buffer, e.g. ``"float32"``; with mixed precision not that of the parameters.
        device: e.g. ``"cuda:0"``.
        rebuilt: whether the order of readiness (after the first backward) decided the assignment.
        generation: number of the assignment, 0 for the first; events carry it.
        times: of the last backward that finished; None if there was none with this assignment.
    """

    index: int
    parameters: tuple[str, ...]
    bytes: int
    dtype: str
    device: str
    rebuilt: bool
    generation: int
    times: BucketTimes | None


def buffer_of(tensors: Sequence[torch.Tensor], mixed_precision: Any) -> dict[str, Any]:
    """Bytes, dtype and device of the buffer in which the gradients of these tensors travel."""
    dtype = tensors[0].dtype
    if mixed_precision is not None:
        dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype or dtype
    return {
        "bytes": sum(tensor.numel() for tensor in tensors) * dtype.itemsize,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(tensors[0].device),
    }


def times_of(times: tuple[int, ...]) -> BucketTimes | None:
    """From what the reducer tells, in nanoseconds: the begin of the backward and the five moments."""
    begin, *later = times
    return BucketTimes(*((moment - begin) / 1e6 for moment in later)) if begin else None


def describe(
    buckets: Sequence[Sequence[int]],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    mixed_precision: Any = None,
    **facts: Any,
) -> dict[str, Any]:
    """The description of an assignment (see tutorials/site/descriptions.md).

    Args:
        buckets: for each bucket the indices of its parameters.
        parameters: by qualified name, in the order of registration.
        group: the model's process group.
        mixed_precision: the model's, None without.
        facts: what else it says.
    """
    tensors = list(parameters.values())
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return {
        "type": "assignment",
        "process_group": agreement.process_group_index(group),
        "group_ranks": process_groups.global_ranks(group),
        "backend": process_groups.backend_name(group),
        "parameters": [
            {
                "index": index,
                "name": name,
                "shape": list(tensor.shape),
                "numel": tensor.numel(),
                "bytes": sizes[index],
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": str(tensor.device),
            }
            for index, (name, tensor) in enumerate(parameters.items())
        ],
        "buckets": [
            {
                "bucket": bucket,
                **buffer_of([tensors[index] for index in members], mixed_precision),
                "parameters": list(members),
            }
            for bucket, members in enumerate(buckets)
        ],
        **facts,
    }
