"""Which parameters share a bucket: a pure function of their sizes, and the records that describe the result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["BucketInfo", "BucketTimes", "assign_buckets"]


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
        dtype: e.g. ``"float32"``.
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


def assign_buckets(
    sizes: Sequence[int],
    keys: Sequence[Hashable],
    caps: Sequence[int],
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Groups parameters into buckets and returns the buckets in the order of their launch.

    Gradients of one bucket travel in one flat buffer, so parameters of different `keys` never share one. A
    bucket is closed as soon as its size reaches its cap, so it may be larger. Which parameters share a bucket
    is what torch's DDP decides from the same sizes and caps.

    Args:
        sizes: bytes of each parameter, in the order of registration.
        keys: (dtype, device) of each parameter.
        caps: bytes; for each key the first cap is that of its first bucket, and so on; the last one repeats.
        order: the parameters' indices in the order in which their gradients become ready; None while that is
            unknown: the reverse order of registration then stands in for it.

    Returns:
        For each bucket the indices of its parameters.

    Example:
        >>> assign_buckets([4, 4, 4], ["float32"] * 3, [8])
        [[2], [0, 1]]
        >>> assign_buckets([4, 4, 4], ["float32"] * 3, [4, 8], order=[2, 1, 0])
        [[2], [1, 0]]
    """
    if len(sizes) != len(keys):
        raise ValueError(f"{len(sizes)} sizes, but {len(keys)} keys")
    if not caps or min(caps) < 0:
        raise ValueError(f"caps must be at least one size in bytes, got {list(caps)}")
    if order is not None and sorted(order) != list(range(len(sizes))):
        raise ValueError(f"order must hold each of the {len(sizes)} parameters once")
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for index in range(len(sizes)) if order is None else order:
        key = keys[index]
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + sizes[index]
        if filled[key] >= caps[min(count.get(key, 0), len(caps) - 1)]:
            closed.append(open_buckets.pop(key))
            filled[key] = 0
            count[key] = count.get(key, 0) + 1
    closed += open_buckets.values()
    if order is None:
        return sorted(closed, key=min, reverse=True)
    # A bucket is complete when its last gradient is: with several keys the order of closing is not that order.
    position = {index: place for place, index in enumerate(order)}
    return sorted(closed, key=lambda bucket: position[bucket[-1]])
