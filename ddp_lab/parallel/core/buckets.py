"""A model's buckets: records for the user, a description for the timeline; and detection of a changed order.

[Note: an order that drifts]
Buckets are built in the order in which gradients became ready in the first backward. If later backwards produce them in
another order (layers are dropped, the graph depends on the data), a bucket waits for its last gradient while others
could be launched. With `rebuild_buckets_on_reorder(threshold)`, rank 0 compares, every few synchronised steps, the
order of the last backward with that of the buckets. A broadcast order tells the ranks whether to rebuild, so all
rebuild in the same forward. Nothing is communicated in the steps between.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import process_groups

__all__ = ["BucketInfo", "BucketTimes", "OrderFollower", "buffer_of", "describe", "out_of_place", "times_of"]


@dataclass(frozen=True)
class BucketTimes:
    """The times of a bucket in one backward, in milliseconds from the backward's begin.

    Attributes:
        first_ready_ms: the first gradient of the bucket was ready.
        ready_ms: the last one was.
        launched_ms: its collective was started.
        reduced_ms: its collective was complete, as seen by the host.
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
        parameters: qualified names of the parameters whose gradients are in it, in buffer order.
        bytes: size of its buffer.
        dtype: of its buffer, e.g. ``"float32"``; with mixed precision not that of the parameters.
        device: e.g. ``"cuda:0"``.
        rebuilt: whether the bucket layout follows the order of readiness (after the first backward).
        generation: version of the bucket layout, 0 for the first; events contain it.
        times: of the last finished backward; None if there was none with this layout.
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
    """Bytes, dtype and device of the buffer for the gradients of these tensors."""
    dtype = tensors[0].dtype
    if mixed_precision is not None:
        dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype or dtype
    return {
        "bytes": sum(tensor.numel() for tensor in tensors) * dtype.itemsize,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(tensors[0].device),
    }


def times_of(times: tuple[int, ...]) -> BucketTimes | None:
    """From the reducer's times in nanoseconds: the begin of the backward and the five moments."""
    begin, *later = times
    return BucketTimes(*((moment - begin) / 1e6 for moment in later)) if begin else None


def describe(
    buckets: Sequence[Sequence[int]],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    mixed_precision: Any = None,
    sparse: Collection[int] = (),
    **facts: Any,
) -> dict[str, Any]:
    """The description of a bucket layout (see tutorials/site/descriptions.md).

    Args:
        buckets: for each bucket the indices of its parameters.
        parameters: by qualified name, in the order of registration.
        group: the model's process group.
        mixed_precision: the model's, None without.
        sparse: indices of the parameters whose gradients are sparse.
        facts: further fields.
    """
    tensors = list(parameters.values())
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return {
        "type": "assignment",
        "process_group": process_groups.group_index(group),
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
                **({"sparse": True} if index in sparse else {}),
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


@dataclass
class OrderFollower:
    """When to check the order, and which difference counts.

    Attributes:
        threshold: the share of parameters out of place (0 to 1) above which buckets are rebuilt.
        every: interval of checks in synchronised forwards.
        since: forwards since the last check.
    """

    threshold: float
    every: int
    since: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be a share between 0 and 1, got {self.threshold}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    def is_due(self) -> bool:
        """Counts a forward; returns whether a check is due."""
        self.since += 1
        if self.since < self.every:
            return False
        self.since = 0
        return True

    def drifted(
        self, arrived: list[int], held: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> list[int] | None:
        """The new order if it has changed, as seen by rank 0; the same on all ranks.

        Args:
            arrived: the indices of the parameters in the order in which gradients arrived last.
            held: the same in the order of the buckets.
            group: the ranks.
            device: of the group's collectives.
        """
        complete = sorted(arrived) == sorted(held)
        if not complete or out_of_place(arrived, held) <= self.threshold:
            arrived = [-1] * len(held)
        order = torch.tensor(arrived, dtype=torch.int64, device=device)
        process_groups.broadcast(order, group)
        return None if int(order[0]) < 0 else [int(index) for index in order.tolist()]


def out_of_place(arrived: Sequence[int], held: Sequence[int]) -> float:
    """The share of parameters that must move to turn one order into the other.

    These are all but a longest common subsequence, so one late gradient counts once, however far it has moved.
    """
    place = {index: position for position, index in enumerate(held)}
    ends: list[int] = []  # ends[n]: the smallest end of an increasing run of n + 1 places
    for index in arrived:
        at = bisect.bisect_left(ends, place[index])
        ends[at : at + 1] = [place[index]]
    return 1 - len(ends) / len(held) if held else 0.0
