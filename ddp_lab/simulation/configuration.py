"""What the simulator is asked to try, and the buckets that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bucketing import assign_buckets
from .workload import Workload

__all__ = ["Assignment", "Configuration", "Hook", "caps_of"]

_MEBIBYTE = 1024 * 1024
_FIRST_CAP, _OTHER_CAPS = 1 * _MEBIBYTE, 25 * _MEBIBYTE  # torch's defaults
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Hook:
    """A comm hook, as far as it costs time.

    Attributes:
        bytes_factor: communicated bytes over the bucket's (0.5 for fp16).
        ns_per_byte: computation for each byte of the bucket, before it is sent.
        ns: computation for each bucket, before it is sent.
        after_ns_per_byte: computation for each byte of the bucket once it has arrived.
    """

    bytes_factor: float = 1.0
    ns_per_byte: float = 0.0
    ns: float = 0.0
    after_ns_per_byte: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """What is to be tried. The defaults are the constructor's of `DistributedDataParallel`.

    Attributes:
        bucket_cap_mb: MiB; a number, one for each bucket (the last one repeats), or None: a first bucket of 1 MiB and
            others of 25. 0 is a bucket for each parameter, `math.inf` one for all.
        order: parameters as buckets are to be filled; None: the order of readiness; "registration": its reverse.
        hook: a comm hook in the place of the recorded one (`Hook()`: a plain all-reduce); None: as recorded.
        sync_every: gradients are averaged once in so many backwards (`no_sync` for the others); times are then
            averages over them, and what is outside of forward and backward happens once.
        world_size: ranks; None: as recorded. The recorded ranks stand for all.
        overlap: False: no bucket is launched before the backward's computation is over.
        jitter_ns: standard deviation of each rank's computation from step to step beyond the recorded ranks. All wait
            for the slowest of n: `jitter_ns` * sqrt(2 ln n) is added to the step (the bound on the expected maximum
            of n normal deviates).
    """

    bucket_cap_mb: float | Sequence[float] | None = None
    order: Sequence[int] | str | None = None
    hook: Hook | None = None
    sync_every: int = 1
    world_size: int | None = None
    overlap: bool = True
    jitter_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, got {self.sync_every}")
        if self.world_size is not None and self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if isinstance(self.order, str) and self.order != "registration":
            raise ValueError(f'order={self.order!r}: "registration", None or the parameters\' indices')


def caps_of(bucket_cap_mb: float | Sequence[float] | None) -> tuple[int, ...]:
    """Caps in bytes, in the order of launch, as the constructor makes them of its argument."""
    if bucket_cap_mb is None:
        return (_FIRST_CAP, _OTHER_CAPS)
    given = bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else (bucket_cap_mb,)
    caps = tuple(int(min(cap * _MEBIBYTE, _UNLIMITED)) for cap in given)
    if not caps or min(caps) < 0:
        raise ValueError(f"bucket_cap_mb must be at least 0, got {bucket_cap_mb}")
    return caps


@dataclass(frozen=True)
class Assignment:
    """Which parameters share a bucket."""

    buckets: tuple[tuple[int, ...], ...]
    bucket_of: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, workload: Workload, configuration: Configuration, known: dict[Any, Assignment]) -> Assignment:
        order: tuple[int, ...] | None = workload.order
        if configuration.order == "registration":
            order = None
        elif configuration.order is not None:
            order = tuple(int(index) for index in configuration.order)
        caps = caps_of(configuration.bucket_cap_mb)
        key = (caps, order if configuration.order is not None else "ready")
        if key not in known:
            found = assign_buckets(workload.sizes.tolist(), workload.keys, caps, order)
            bucket_of = np.empty(len(workload.sizes), np.int32)
            bucket_of[[index for bucket in found for index in bucket]] = np.repeat(
                np.arange(len(found), dtype=np.int32), [len(bucket) for bucket in found]
            )
            size = np.bincount(bucket_of, workload.sizes, len(found)).astype(np.int64)
            known[key] = cls(tuple(map(tuple, found)), bucket_of, size)
        return known[key]
