"""From a timeline's step tables to what the simulator replays: a `Workload`, and measured all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..insight.carried import carried, shares
from ..insight.link_model import Point
from ..insight.workload import Workload
from .span_columns import TableView, device_rows
from .step_table import BUCKET_FIELDS, STEP_FIELDS

if TYPE_CHECKING:
    from .timeline_model import TimelineModel

__all__ = ["all_reduces", "step_times", "workload"]

_Floats = npt.NDArray[np.float64]
_S, _B = {n: i for i, n in enumerate(STEP_FIELDS)}, {n: i for i, n in enumerate(BUCKET_FIELDS)}
_MEBIBYTE = 1024 * 1024
_WARM_UP = 2  # steps after a rebuild: memory is new


class _Steps:
    """Complete steps that follow a complete one, on all ranks, of one generation; arrays ``[ranks, steps, ...]``."""

    def __init__(self, views: Sequence[TableView], generation: int, last_steps: int) -> None:
        common: npt.NDArray[np.int64] | None = None
        for one in views:
            complete = (one.generation == generation) & (one.steps[:, _S["backward_end"]] > 0)
            steps = one.step[complete & (one.steps[:, _S["forward_begin"]] > 0)]
            common = steps if common is None else np.intersect1d(common, steps)
        held = np.zeros(0, np.int64) if common is None else common
        held = held[np.isin(held - 1, held)]
        held = held[_WARM_UP:] if len(held) > 2 * _WARM_UP else held
        self.step = held[-last_steps:]
        rows = [np.searchsorted(one.step, self.step) for one in views]
        buckets = max((one.buckets.shape[1] for one in views), default=0)
        parameters = max((one.gradients.shape[1] for one in views), default=0)
        self.steps = np.stack([one.steps[row] for one, row in zip(views, rows, strict=True)])
        self.before = np.stack([one.steps[row - 1, _S["backward_end"]] for one, row in zip(views, rows, strict=True)])
        self.buckets = np.zeros((len(views), len(self.step), buckets, len(BUCKET_FIELDS)), np.int64)
        self.gradients = np.zeros((len(views), len(self.step), parameters), np.int64)
        for rank, (one, row) in enumerate(zip(views, rows, strict=True)):
            self.buckets[rank, :, : one.buckets.shape[1]] = one.buckets[row]
            self.gradients[rank, :, : one.gradients.shape[1]] = one.gradients[row]
        self.on_device = len(views) > 0 and all(device_rows(of_rank).all() for of_rank in self.buckets)

    def field(self, name: str) -> npt.NDArray[np.int64]:
        return np.asarray(self.steps[:, :, _S[name]])

    def bucket(self, name: str) -> npt.NDArray[np.int64]:
        return np.asarray(self.buckets[:, :, :, _B[name]])


def _chosen(
    timeline: TimelineModel, reducer: int | None, generation: int | None, last_steps: int
) -> tuple[Any, _Steps]:
    info = timeline._chosen(reducer)
    if info is None:
        raise ValueError("no step has been recorded: train some steps with `ddp_lab.DistributedDataParallel` first")
    description = timeline.assignment(info.reducer, generation)
    views = timeline.views(info.reducer, None if generation is not None else last_steps + 2 * _WARM_UP + 1)
    steps = _Steps(views, description["generation"], last_steps)
    if not len(steps.step):
        raise ValueError(
            f"reducer {info.reducer} has not trained two steps in a row with generation {description['generation']} of "
            "its buckets; train a few more"
        )
    return description, steps


def workload(
    timeline: TimelineModel, reducer: int | None = None, *, generation: int | None = None, last_steps: int = 50
) -> Workload:
    """See `Timeline.workload`."""
    description, steps = _chosen(timeline, reducer, generation, last_steps)
    parameters = description["parameters"]
    begin = steps.field("backward_begin")
    members = [bucket["parameters"] for bucket in description["buckets"]]
    size = np.array([one["bytes"] for one in parameters], np.int64)
    if steps.on_device:
        ready, computed = _device_times(steps, members, size)
    else:
        ready = _ready(steps.gradients[:, :, : len(parameters)] - begin[:, :, None], members)
        computed = np.median(steps.field("finalize") - begin, axis=1)
    caps = description.get("options", {}).get("bucket_cap_mb_list", [])
    in_buffers, on_link = shares(description)
    return Workload(
        names=tuple(one["name"] for one in parameters),
        sizes=size,
        keys=tuple((one["dtype"], one["device"].partition(":")[0]) for one in parameters),
        ready_ns=np.minimum(ready, computed[:, None]),
        computed_ns=computed,
        forward_ns=np.median(begin - steps.field("forward_begin"), axis=1),
        other_ns=np.median(steps.field("forward_begin") - steps.before, axis=1),
        busy_ns=_busy(steps, begin, len(members)),
        write_back_ns=(0.0, _write_back(steps, np.array(_bucket_sizes(description)))),
        order=tuple(index for bucket in members for index in bucket) if description["rebuilt"] else (),
        caps=tuple(int(cap * _MEBIBYTE) for cap in caps),
        world_size=len(description["group_ranks"]),
        step_ns=float(np.median((steps.field("backward_end") - steps.before).mean(axis=0))),
        buffered=in_buffers,
        carried=on_link,
    )


def step_times(timeline: TimelineModel, reducer: int | None = None, *, generation: int | None = None) -> _Floats:
    """Measured ns of each step of one generation, mean over the ranks, ``[steps]``; those that `workload` takes."""
    _, steps = _chosen(timeline, reducer, generation, 1 << 30)
    return np.asarray((steps.field("backward_end") - steps.before).mean(axis=0))


def _bucket_sizes(description: Any) -> list[int]:
    """Bytes of the parameters in each bucket, as a workload counts them."""
    parameters = description["parameters"]
    return [sum(parameters[index]["bytes"] for index in one["parameters"]) for one in description["buckets"]]


def _ready(since_begin: npt.NDArray[np.int64], members: Sequence[Sequence[int]]) -> _Floats:
    """Median over the steps; a gradient that never came (unused) is ready when the last of its bucket is."""
    missing = np.asarray((since_begin < 0).all(axis=1))
    known: _Floats = np.where(since_begin >= 0, since_begin, np.nan)
    known[np.broadcast_to(missing[:, None, :], known.shape)] = 0.0
    ready: _Floats = np.nanmedian(known, axis=1)
    for bucket in members:
        latest = ready[:, list(bucket)].max(axis=1)
        for index in bucket:
            ready[:, index] = np.where(missing[:, index], latest, ready[:, index])
    return ready


def _device_times(
    steps: _Steps, members: Sequence[Sequence[int]], size: npt.NDArray[np.int64]
) -> tuple[_Floats, _Floats]:
    """Readiness where devices compute: known when a bucket is launched; within it by bytes.

    The device's begin of backward is not recorded: the host's stands for it.
    """
    launched = np.median(steps.bucket("device_begin") - steps.field("backward_begin")[:, :, None], axis=1)
    ready = np.zeros((len(launched), len(size)))
    before = np.zeros(len(launched))
    for bucket, parameters in enumerate(members):
        share = np.cumsum(size[list(parameters)]) / max(int(size[list(parameters)].sum()), 1)
        at = np.maximum(launched[:, bucket], before)
        ready[:, list(parameters)] = before[:, None] + (at - before)[:, None] * share
        before = at
    return ready, before


def _busy(steps: _Steps, begin: npt.NDArray[np.int64], buckets: int) -> _Floats:
    """Median begin and end of each bucket's collective; it begins when the last rank has launched it."""
    first, last = ("device_begin", "device_end") if steps.on_device else ("launched", "reduced")
    launched = steps.bucket(first)[:, :, :buckets].max(axis=0)
    times = np.stack(
        [np.broadcast_to(launched, steps.bucket(last)[:, :, :buckets].shape), steps.bucket(last)[:, :, :buckets]]
    )
    return np.moveaxis(np.median(times - begin[None, :, :, None], axis=2), 0, -1)


def _write_back(steps: _Steps, size: npt.NDArray[np.int64]) -> float:
    """ns for each byte that is written back: what follows the last collective, or the computation."""
    reduced, finalize = steps.bucket("reduced")[:, :, : len(size)], steps.field("finalize")
    last = reduced.max(axis=2)
    after = steps.field("backward_end") - np.maximum(last, finalize)
    # Earlier buckets were written back while the last one was under way.
    count = np.where(last > finalize, size[reduced.argmax(axis=2)], size.sum())
    return max(0.0, float(np.median(after / np.maximum(count, 1))))


def all_reduces(
    timeline: TimelineModel, reducer: int | None = None, *, generation: int | None = None, last_steps: int = 50
) -> list[Point]:
    """Recorded all-reduces that had the link to themselves: (bytes, ns, ranks).

    Bytes are those that travel; of a hook of which nobody knows that, the buffer's. A collective counts from the last
    rank's launch to the last rank's end, if all before it had ended by then; on devices it takes as long as on the rank
    that came last.
    """
    description, steps = _chosen(timeline, reducer, generation, last_steps)
    ranks = len(description["group_ranks"])
    size = carried(description) or [float(one["bytes"]) for one in description["buckets"]]
    if steps.on_device:
        duration = (steps.bucket("device_end") - steps.bucket("device_begin")).min(axis=0)[:, : len(size)]
        return [(size[b], float(ns), ranks) for row in duration for b, ns in enumerate(row) if ns > 0]
    launched = steps.bucket("launched").max(axis=0)[:, : len(size)]
    reduced = steps.bucket("reduced").max(axis=0)[:, : len(size)]
    before = np.maximum.accumulate(np.concatenate([np.zeros((len(reduced), 1), np.int64), reduced[:, :-1]], 1), axis=1)
    rows, buckets = np.nonzero((launched >= before) & (launched > 0) & (reduced > launched))
    return [(size[b], float(reduced[row, b] - launched[row, b]), ranks) for row, b in zip(rows, buckets, strict=True)]
