"""The simulator's input from a timeline's step tables: a `Workload`, and measured all-reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import mean, median
from ..analysis.steps import SLOWEST_COPY, Steps
from ..simulation.link_model import LANES, Point
from ..simulation.workload import StepTimes, Workload, carried, shares
from .judged_steps import ANALYSED_STEPS, WARM_UP, SideBySide, newest
from .model_kinds import kind_of
from .tables.span_columns import step_columns

if TYPE_CHECKING:
    from .model import TimelineModel

__all__ = ["RecordedStep", "all_reduces", "recorded_step", "step_times", "workload"]

_Floats = npt.NDArray[np.float64]
_MEBIBYTE = 1024 * 1024


def _chosen_steps(
    timeline: TimelineModel, reducer: int | None, generation: int | None = None, last_steps: int = ANALYSED_STEPS
) -> tuple[Any, SideBySide]:
    """The description of the analysed layout (or of one generation), and its newest consecutive steps."""
    info = timeline.model(reducer)
    if info is None:
        raise ValueError("no step has been recorded; train some steps with `ddp_lab.DistributedDataParallel` first")
    layout = newest(timeline.layouts(info.reducer, generation))
    if layout is not None and layout.description is None:
        raise ValueError(f"the bucket layout of {info.module} is not known")
    steps = np.zeros(0, np.int64)
    if layout is not None:
        recent = layout.warm(WARM_UP, last_steps)
        recent = recent[np.isin(recent - 1, layout.step)]
        forward = SideBySide(timeline.views_of(info.reducer, recent), recent).field("forward_begin")
        steps = recent[(forward > 0).all(axis=0)]
    if layout is None or not len(steps):
        raise ValueError(
            f"{info.module} has not trained two consecutive steps with the same buckets on all its ranks; train a few "
            "more steps"
        )
    return layout.description, SideBySide(timeline.views_of(info.reducer, steps), steps)


def workload(
    timeline: TimelineModel,
    reducer: int | None = None,
    *,
    generation: int | None = None,
    last_steps: int = ANALYSED_STEPS,
) -> Workload:
    """See `Timeline.workload`."""
    description, steps = _chosen_steps(timeline, reducer, generation, last_steps)
    kind_of(description).check_predictable()
    parameters = description["parameters"]
    members = [bucket["parameters"] for bucket in description["buckets"]]
    size = np.array([one["bytes"] for one in parameters], np.int64)
    times = steps.steps(len(members))
    ready, computed = times.readiness(members, size.tolist())
    caps = description.get("options", {}).get("bucket_cap_mb_list", [])
    in_buffers, on_link = shares(description)
    return Workload(
        names=tuple(one["name"] for one in parameters),
        sizes=size,
        keys=tuple((one["dtype"], one["device"].partition(":")[0]) for one in parameters),
        ready_ns=np.minimum(ready, computed[:, None]),
        computed_ns=computed,
        forward_ns=np.median(times.begin - times.forward_begin, axis=1),
        other_ns=np.median(times.forward_begin - times.before, axis=1),
        busy_ns=_busy(times),
        write_back_ns=(0.0, _write_back(steps, np.array(_bucket_sizes(description)))),
        order=tuple(index for bucket in members for index in bucket) if description["rebuilt"] else (),
        caps=tuple(int(cap * _MEBIBYTE) for cap in caps),
        world_size=len(description["group_ranks"]),
        step_ns=_step_ns(steps),
        buffered=in_buffers,
        carried=on_link,
    )


@dataclass(frozen=True)
class RecordedStep(StepTimes):
    """The time breakdown of the steps of a `workload`, as in a `Prediction`: on the rank whose computation ends last.

    Times are medians. Exposed is what the other parts leave of the step: communication after the computation, and
    waiting for ranks that are slower in some steps.

    Attributes:
        rank: that rank, which the others wait for.
        steps: the numbers of the steps.
    """

    rank: int
    steps: npt.NDArray[np.int64]


def recorded_step(timeline: TimelineModel, found: Workload, reducer: int | None = None) -> RecordedStep:
    """The time breakdown of the recorded steps.

    Args:
        timeline: the source of the steps.
        found: the result of `workload`.
        reducer: which model; None for the most recently active.

    Raises:
        ValueError: as `workload`.
    """
    _, steps = _chosen_steps(timeline, reducer)
    row = int((found.other_ns + found.forward_ns + found.computed_ns).argmax())
    columns = step_columns([steps.views[row]])
    after = columns["backward_ms"] - columns["compute_ms"] - np.nan_to_num(columns["exposed_ms"])
    step = _step_ns(steps)
    forward, compute = float(found.forward_ns[row]), float(found.computed_ns[row])
    other = float(found.other_ns[row]) + 1e6 * float(np.median(after))
    exposed = step - forward - compute - other
    return RecordedStep(
        rank=steps.views[row].rank,
        steps=steps.step,
        step_ns=step,
        forward_ns=forward,
        compute_ns=compute,
        hidden_ns=min(compute, 1e6 * float(np.median(np.nan_to_num(columns["hidden_ms"])))),
        exposed_ns=max(exposed, 0.0),
        other_ns=other + min(exposed, 0.0),
    )


def _step_ns(steps: SideBySide) -> float:
    """Time of a step, as everywhere else: see `analysis.step_metrics.typical`."""
    return float(median(mean((steps.field("backward_end") - steps.before).astype(np.float64).T)))


def step_times(timeline: TimelineModel, reducer: int | None = None, *, generation: int | None = None) -> _Floats:
    """Measured ns of each step of one generation, mean over the ranks, ``[steps]``; the steps that `workload` uses."""
    _, steps = _chosen_steps(timeline, reducer, generation, 1 << 30)
    return np.asarray((steps.field("backward_end") - steps.before).mean(axis=0))


def _bucket_sizes(description: Any) -> list[int]:
    """Bytes of the parameters in each bucket, as a workload counts them."""
    parameters = description["parameters"]
    return [sum(parameters[index]["bytes"] for index in one["parameters"]) for one in description["buckets"]]


def _busy(steps: Steps) -> _Floats:
    """Median begin and end of each bucket's collective; it begins when the last rank has launched it."""
    times = np.stack([np.broadcast_to(steps.launched.max(axis=0), steps.reduced.shape), steps.reduced])
    return np.moveaxis(np.median(times - steps.begin[None, :, :, None], axis=2), 0, -1)


def _write_back(steps: SideBySide, size: npt.NDArray[np.int64]) -> float:
    """ns for each byte that is written back: what follows the last collective, or the computation.

    Limited as in findings about copies: after a bucket of a few bytes, what follows is not the copying.
    """
    reduced, finalize = steps.bucket("reduced", len(size)), steps.field("finalize")
    last = reduced.max(axis=2)
    after = steps.field("backward_end") - np.maximum(last, finalize)
    # Earlier buckets were written back while the last one was under way.
    count = np.where(last > finalize, size[reduced.argmax(axis=2)], size.sum())
    return min(SLOWEST_COPY, max(0.0, float(np.median(after / np.maximum(count, 1)))))


def all_reduces(timeline: TimelineModel, reducer: int | None = None) -> list[Point]:
    """Recorded all-reduces that had the link to themselves: (bytes, ns, ranks).

    Bytes are those sent; if that is not known for a hook, those of the buffer. A collective counts from the last rank's
    launch to the last rank's end, if all before it were complete by then. On devices it takes as long as on the rank
    that was last; a backend that runs one at a time, such as NCCL, begins a queued one when the one before it ends.
    """
    description, steps = _chosen_steps(timeline, reducer)
    size = carried(description) or [float(one["bytes"]) for one in description["buckets"]]
    duration, alone = steps.steps(len(size)).collectives(one_at_a_time=description.get("backend") not in LANES)
    alone &= duration > 0
    ranks = len(description["group_ranks"])
    return [(size[b], float(duration[row, b]), ranks) for row, b in np.argwhere(alone).tolist()]
