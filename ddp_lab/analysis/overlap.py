"""How much communication the backward's own computation hides.

A bucket's collective runs from its launch to its reduction. The part that lies before the end of the rank's own
backward computation (event kind ``finalize_begin``) is *hidden*: it costs nothing. The rest is *exposed*: the rank
does nothing but wait. Overlapping the two is what buckets are for; Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (VLDB 2020), section 5.1 and figure 6, measure the same split by running
without communication. Here it follows from the events of one run.

All times are in nanoseconds on one axis.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["algorithm_bandwidth", "covered", "split"]

_Times = npt.NDArray[np.int64]


def split(launched: _Times, reduced: _Times, compute_end: _Times) -> tuple[_Times, _Times]:
    """Splits collectives into their hidden and exposed parts.

    Args:
        launched: begin of each collective.
        reduced: its end, same shape, not before its begin.
        compute_end: end of the rank's backward computation; broadcast to that shape.

    Returns:
        Hidden and exposed nanoseconds, both ≥ 0; their sum is ``reduced - launched``.
    """
    boundary = np.clip(compute_end, launched, reduced)
    return boundary - launched, reduced - boundary


def covered(begin: _Times, end: _Times, valid: npt.NDArray[np.bool_]) -> _Times:
    """Time during which at least one interval of a row is open (overlapping intervals count once).

    Args:
        begin: shape ``[rows, intervals]``.
        end: same shape.
        valid: same shape; the intervals that count.

    Returns:
        Nanoseconds, shape ``[rows]``; 0 for a row without valid intervals.
    """
    if begin.shape[1] == 0:
        return np.zeros(len(begin), np.int64)
    latest = np.iinfo(np.int64).max
    start = np.where(valid, begin, latest)
    stop = np.where(valid, np.maximum(end, begin), latest)
    order = np.argsort(start, axis=1, kind="stable")
    start, stop = np.take_along_axis(start, order, 1), np.take_along_axis(stop, order, 1)
    before = np.maximum.accumulate(stop, axis=1)[:, :-1]  # end of everything that began earlier
    start[:, 1:] = np.maximum(start[:, 1:], before)
    # Invalid intervals are at `latest` on both sides: they add nothing.
    return np.asarray(np.maximum(stop - start, 0).sum(axis=1))


def algorithm_bandwidth(size: npt.NDArray[np.int64], duration: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of a buffer over the time its collective took, in GB/s (10⁹ bytes); NaN where no time passed.

    This is what the caller of an all-reduce gets ("algbw" in nccl-tests), not the traffic of each link, which is
    2 (n − 1) / n times as much for a ring of n ranks.
    """
    speed = np.full(np.broadcast(size, duration).shape, np.nan)
    np.divide(size, duration, out=speed, where=np.asarray(duration) > 0)
    return speed
