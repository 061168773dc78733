"""Who is late, in which bucket: read from the times at which gradients became ready.

Wall time can't name a straggler: in a synchronised backward every rank waits for the last one, so all of them take
equally long. What differs is when each rank had a bucket's gradients: the late rank's own computation reached them
late, and from that bucket on it is behind. The *first* place where it falls behind names the layer.

All times are in nanoseconds on one axis (one host's monotonic clock, or aligned clocks); 0 means missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Late", "find_late", "last_counts", "waits"]

_Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Late:
    """One place where one rank falls behind the others.

    Attributes:
        rank: position of the rank in the arrays.
        place: position of the bucket (or parameter) whose computation is late; -1: the rank comes late to its
            backward (input data, forward, or what the cell does between the steps).
        delay_ns: how much it falls behind there; median over the steps in which it does.
        share: fraction of the steps in which it does, 0 to 1.
    """

    rank: int
    place: int
    delay_ns: float
    share: float


def waits(launched: _Times) -> _Times:
    """How long each rank's launched collective waited for the last rank's launch.

    Args:
        launched: launch times, shape ``[..., ranks]``, none missing.

    Returns:
        Same shape; 0 for the last rank.
    """
    return np.asarray(launched.max(axis=-1, keepdims=True) - launched)


def last_counts(launched: _Times) -> npt.NDArray[np.int64]:
    """How often each rank was the last to launch.

    Args:
        launched: launch times, shape ``[n, ranks]``, none missing.

    Returns:
        Shape ``[ranks]``; sums to n (the lowest rank counts where several are equal).
    """
    return np.bincount(launched.argmax(axis=-1), minlength=launched.shape[-1])


def find_late(begin: _Times, ready: _Times, *, minimum_ns: float = 1e6, minimum_share: float = 0.5) -> list[Late]:
    """Finds where a rank's own computation falls behind that of the other ranks.

    For every rank and step, the time from one place to the next is compared with the median of the other ranks'
    (with two ranks: with the other's). So a delay counts once, at the place that caused it, though every later
    bucket of that rank is late as well.

    Args:
        begin: when each rank's backward began, shape ``[ranks, steps]``.
        ready: when each bucket (or each parameter's gradient) became ready, shape ``[ranks, steps, places]``.
        minimum_ns: smaller delays are taken for noise.
        minimum_share: fraction of the steps in which a rank has to be late at one place.

    Returns:
        The late places, longest total delay first; empty for a single rank.
    """
    ranks, steps, places = ready.shape
    if ranks < 2 or steps == 0:
        return []
    excess = np.empty((ranks, steps, places + 1))
    excess[:, :, 0] = _excess(np.where(begin > 0, begin.astype(np.float64), np.nan))
    if places:
        excess[:, :, 1:] = _excess(_own_time(begin, ready))
    found = []
    counted = np.isfinite(excess).sum(axis=1)
    late = np.nan_to_num(excess, nan=0.0) >= minimum_ns
    share = late.sum(axis=1) / np.maximum(counted, 1)
    for rank, place in np.argwhere((share >= minimum_share) & (counted > 0)):
        delay = np.median(excess[rank, late[rank, :, place], place])
        found.append(Late(int(rank), int(place) - 1, float(delay), float(share[rank, place])))
    return sorted(found, key=lambda one: -one.delay_ns * one.share)


def _own_time(begin: _Times, ready: _Times) -> npt.NDArray[np.float64]:
    """Time from one place to the next, in the usual order of readiness; NaN where one of them is missing."""
    known = np.where((ready > 0) & (begin > 0)[:, :, None], ready.astype(np.float64), np.nan)
    since_begin = known - begin[:, :, None]
    usual = _nanmedian(since_begin.reshape(-1, ready.shape[2]).T)
    order = np.argsort(np.nan_to_num(usual, nan=np.inf), kind="stable")
    ordered = since_begin[:, :, order]
    before = np.zeros_like(ordered)
    # A rank may have reached some places in another order: it can't be late before it was there.
    before[:, :, 1:] = np.maximum.accumulate(np.nan_to_num(ordered, nan=0.0), axis=2)[:, :, :-1]
    before[:, :, 1:][np.isnan(ordered[:, :, :-1])] = np.nan  # unknown how long this place alone took
    own: npt.NDArray[np.float64] = np.empty_like(since_begin)
    own[:, :, order] = np.maximum(ordered - before, 0.0)  # NaN stays NaN
    return own


def _excess(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """values[r] minus the median over the other ranks, along the first axis."""
    made = np.empty_like(values)
    for rank in range(len(values)):
        others = np.moveaxis(np.delete(values, rank, axis=0), 0, -1)
        made[rank] = values[rank] - _nanmedian(others)
    return made


def _nanmedian(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Median along the last axis that ignores NaN; NaN (without a warning) where nothing is left."""
    result = np.full(values.shape[:-1], np.nan)
    some = ~np.isnan(values).all(axis=-1)
    result[some] = np.nanmedian(values[some], axis=-1)
    return result
