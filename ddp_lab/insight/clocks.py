"""How far apart the clocks of two hosts are, from collectives that ranks on both took part in.

[Note: buckets as barriers]
No rank has a bucket reduced before every rank has launched it. So with d added to the second host's times, for every
bucket of every step: ``reduced there + d >= launched here`` and ``launched there + d <= reduced here``. The tightest of
these bounds leave an interval for d that is about as wide as the fastest all-reduce is long. Its middle is taken.
Nothing is communicated for it, and it works for whatever was recorded. Clocks that drift apart make the bounds
contradict each other: the width is then negative, and says by how much at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ClockOffset", "Moments", "clock_offset"]


@dataclass(frozen=True)
class Moments:
    """When the ranks of one clock launched and had reduced each bucket of each step.

    Attributes:
        keys: ``[n]`` int64, ascending: which bucket of which step.
        launched_ns: ``[n]`` int64: the last of the ranks' launches.
        reduced_ns: ``[n]`` int64: the first of the ranks to have it reduced.
    """

    keys: npt.NDArray[np.int64]
    launched_ns: npt.NDArray[np.int64]
    reduced_ns: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClockOffset:
    """What to add to another clock's times.

    Attributes:
        ns: to be added.
        uncertain_ns: the offset may be so much more or less.
        buckets: how many collectives it was taken from.
    """

    ns: int
    uncertain_ns: int
    buckets: int


def clock_offset(reference: Moments, other: Moments) -> ClockOffset | None:
    """How far `other`'s clock is behind that of `reference`; None if no bucket was reduced on both."""
    _, here, there = np.intersect1d(reference.keys, other.keys, assume_unique=True, return_indices=True)
    if not len(here):
        return None
    at_least = int((reference.launched_ns[here] - other.reduced_ns[there]).max())
    at_most = int((reference.reduced_ns[here] - other.launched_ns[there]).min())
    return ClockOffset((at_least + at_most) // 2, abs(at_most - at_least) // 2, len(here))
