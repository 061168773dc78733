"""What synchronising the gradients of one step cost, bucket by bucket: pure functions of a `StepFrame`.

The same definitions as `Timeline.sync()` and `Timeline.steps()` (a test compares them), for a step that may not
have ended: what has not arrived is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..analysis import overlap, stragglers
from .step_store import FINALIZE, LAUNCHED, REDUCED, Float64, Int64, StepFrame

__all__ = ["GradientSync", "gradient_sync"]


@dataclass(frozen=True)
class GradientSync:
    """Gradient synchronisation of one step; milliseconds, NaN where an event has not arrived.

    Attributes:
        last_launched_ms: ``[buckets]``, when the last rank launched the bucket, on the common axis.
        last_rank: ``[buckets]``, the rank that launched it last; -1 where a rank's launch is missing.
        wait_ms: ``[ranks, buckets]``, how long each rank's launched collective waited for the last rank's.
        all_reduce_ms: ``[buckets]``, from the last rank's launch until the bucket is reduced on every rank.
        bandwidth_gb_s: ``[buckets]``, 1e9 bytes a second: the bucket's bytes over `all_reduce_ms`.
        hidden_ms: ``[ranks, buckets]``, the part of the collective under the backward's own computation.
        exposed_ms: ``[ranks, buckets]``, the part after it: the rank had nothing left to compute.
        rank_hidden_ms, rank_exposed_ms: ``[ranks]``, how long at least one collective was under way, before and after
            the end of the rank's own computation.
        hidden_fraction: share of the step's communication time that was hidden, all ranks together; NaN for none.
    """

    last_launched_ms: Float64
    last_rank: Int64
    wait_ms: Float64
    all_reduce_ms: Float64
    bandwidth_gb_s: Float64
    hidden_ms: Float64
    exposed_ms: Float64
    rank_hidden_ms: Float64
    rank_exposed_ms: Float64
    hidden_fraction: float


def gradient_sync(frame: StepFrame) -> GradientSync:
    """Returns the gradient synchronisation of a step (of whatever part of it has arrived)."""
    launched, reduced = frame.times_ns[..., LAUNCHED], frame.times_ns[..., REDUCED]
    all_launched, all_reduced = (launched > 0).all(axis=0), (reduced > 0).all(axis=0)
    last = launched.max(axis=0, initial=0)
    row = launched.argmax(axis=0) if len(launched) else np.zeros(frame.shape[1], np.int64)
    duration = np.where(all_launched & all_reduced, reduced.max(axis=0, initial=0) - last, -1)
    known_bytes = np.where(frame.bucket_bytes >= 0, duration, -1)
    waits = stragglers.waits(launched.T).T if len(launched) else launched
    hidden, exposed, under, after = _overlap(frame)
    busy = float(np.nansum(under) + np.nansum(after))
    return GradientSync(
        last_launched_ms=np.where(all_launched, frame.milliseconds(last), np.nan),
        last_rank=np.where(all_launched, np.asarray(frame.ranks, np.int64)[row], -1),
        wait_ms=_ms(waits, np.broadcast_to(all_launched, launched.shape)),
        all_reduce_ms=_ms(duration, duration >= 0),
        bandwidth_gb_s=overlap.algorithm_bandwidth(frame.bucket_bytes, known_bytes),
        hidden_ms=hidden,
        exposed_ms=exposed,
        rank_hidden_ms=under,
        rank_exposed_ms=after,
        hidden_fraction=float(np.nansum(under)) / busy if busy > 0 else float("nan"),
    )


def _overlap(frame: StepFrame) -> tuple[Float64, Float64, Float64, Float64]:
    """Returns hidden and exposed milliseconds by bucket and by rank; on the device's clock where it timed all."""
    launched, reduced = frame.times_ns[..., LAUNCHED], frame.times_ns[..., REDUCED]
    timed = frame.device_ns[..., 1] > 0
    device = ((launched > 0).any(axis=1) & (timed | (launched == 0)).all(axis=1))[:, None]
    begin = np.where(device, frame.device_ns[..., 0], launched)
    end = np.where(device, frame.device_ns[..., 1], reduced)
    # On the device, the last collective begins where the backward's own computation is over.
    computed = np.where(device, begin.max(axis=1, keepdims=True, initial=0), frame.bounds_ns[:, FINALIZE, None])
    valid = (begin > 0) & (end > 0) & (computed > 0)
    hidden, exposed = overlap.split(begin, np.maximum(begin, end), computed)
    under = overlap.covered(begin, np.minimum(end, computed), valid & (np.minimum(end, computed) > begin))
    after = overlap.covered(np.maximum(begin, computed), end, valid & (end > np.maximum(begin, computed)))
    some = np.asarray(valid.any(axis=1))
    return _ms(hidden, valid), _ms(exposed, valid), _ms(under, some), _ms(after, some)


def _ms(values: Int64, valid: npt.NDArray[np.bool_]) -> Float64:
    """Returns nanoseconds as milliseconds, NaN where they are not valid."""
    return np.where(valid, values / 1e6, np.nan)
