"""What-if questions about a timeline: from recorded steps to the simulator's input, and from its prediction to events.

`Timeline.simulate` and `Cluster.simulate` return a `WhatIf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import mean, median
from ..analysis.steps import SLOWEST_COPY, Steps
from ..protocol.events import DTYPE, Batch, Kind
from ..simulation.calibration import anchored
from ..simulation.link_model import LANES, CommModel, Point
from ..simulation.simulator import Configuration, Prediction, simulate
from ..simulation.workload import StepTimes, Workload, carried, shares
from .event_tables import TimelineModel
from .model_kinds import kind_of
from .model_registry import newest
from .steady_steps import ANALYSED_STEPS, WARM_UP, SideBySide
from .tables.span_columns import step_columns

__all__ = ["RecordedStep", "WhatIf", "all_reduces", "fit_link", "recorded_step", "step_times", "what_if", "workload"]

_FACT = np.dtype([("time", "f8"), ("kind", "i8"), ("bucket", "i8"), ("parameter", "i8"), ("bytes", "i8")])
_Floats = npt.NDArray[np.float64]
_MEBIBYTE = 1024 * 1024
_Timeline = TypeVar("_Timeline", bound=TimelineModel)


@dataclass(frozen=True)
class WhatIf(Generic[_Timeline]):
    """A predicted step.

    Attributes:
        configuration: the simulated configuration.
        link: the communication model of the all-reduce.
        workload: what the ranks compute.
        prediction: the step's times.
        module: class name of the model.
        blank: an empty timeline, for `timeline`.
    """

    configuration: Configuration
    link: CommModel
    workload: Workload
    prediction: Prediction
    module: str
    blank: Callable[[], _Timeline]

    @property
    def step_ms(self) -> float:
        """The step time in milliseconds."""
        return self.prediction.step_ns / 1e6

    @property
    def breakdown(self) -> dict[str, float]:
        """Milliseconds by part; all but ``hidden`` add up to `step_ms`."""
        return self.prediction.parts_ms

    def timeline(self) -> _Timeline:
        """The predicted step as a timeline, which figures and widgets show like a recorded one."""
        made = self.blank()
        described = _description(self.workload, self.prediction, f"{self.module} (predicted)")
        for batch in _batches(self.workload, self.prediction):
            made.describe(batch.rank, described | {"session": batch.session})
            made.extend(batch)
        return made

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.breakdown.items())
        return f"<predicted step of {self.step_ms:.2f} ms: {parts}; {len(self.prediction.buckets)} buckets>"


def what_if(
    timeline: _Timeline,
    link: object,
    *,
    bucket_cap_mb: float | Sequence[float] | None = None,
    model: int | None = None,
    without_rank: int | None = None,
    recorded_link: CommModel | None = None,
    **options: Any,
) -> WhatIf[_Timeline]:
    """See `Timeline.simulate`; `recorded_link`: that of the recording, if it was measured."""
    if link is not None and not isinstance(link, CommModel):
        raise ValueError(f"link: a step of DistributedDataParallel needs a CommModel, got {link!r}")
    recorded = workload(timeline, model)
    configuration = Configuration((recorded.caps_mb or None) if bucket_cap_mb is None else bucket_cap_mb, **options)
    info = timeline.model(model)
    chosen = link or fit_link(timeline, model)
    if link is None or link is recorded_link:
        recorded, chosen = anchored(recorded, chosen)
    if without_rank is not None:
        recorded = recorded.without(without_rank)
    predicted = simulate(recorded, configuration, chosen)
    return WhatIf(configuration, chosen, recorded, predicted, info.module if info else "?", type(timeline))


def fit_link(timeline: TimelineModel, model: int | None = None) -> CommModel:
    """A `CommModel` of the recorded all-reduces of a model.

    With buckets of a single size, latency and bandwidth can't be separated: all of the time then counts as bandwidth.

    Raises:
        ValueError: nothing was recorded, or the model trains on a single rank.
    """
    points = all_reduces(timeline, model)
    if not points:
        raise ValueError("no recorded all-reduce ran without others in flight: call `Cluster.measure_communication()`")
    info = timeline.model(model)
    backend = timeline.assignment(info.reducer).get("backend", "") if info else ""
    lanes = LANES.get(str(backend), 1)
    sizes = {size for size, _, _ in points}
    if len(sizes) == 1:
        size, ranks = points[0][0], points[0][2]
        typical = sorted(ns for _, ns, _ in points)[len(points) // 2]
        return CommModel(0.0, typical / (2 * (ranks - 1) / ranks * size), lanes=lanes)
    return CommModel.fitted(points, lanes=lanes)


# ---- a prediction as the events that it would have recorded: every view shows it like a real step -----------


def _description(workload: Workload, predicted: Prediction, module: str) -> dict[str, Any]:
    """The assignment, as a rank describes it (see tutorials/site/descriptions.md)."""
    kinds = [{"dtype": dtype, "device": device} for dtype, device in workload.keys]
    sizes = workload.sizes.tolist()
    return {
        "type": "assignment",
        "reducer": 0,
        "generation": 0,
        "first_step": 0,
        "process_group": 0,
        "group_ranks": list(range(workload.ranks)),
        "backend": "simulated",
        "module": module,
        "parameters": [
            {"index": i, "name": name, "shape": [sizes[i]], "numel": sizes[i], "bytes": sizes[i]} | kinds[i]
            for i, name in enumerate(workload.names)
        ],
        "buckets": [
            {"bucket": b, "bytes": int(predicted.bytes[b]), "parameters": list(members)} | kinds[members[0]]
            for b, members in enumerate(predicted.buckets)
        ],
        "rebuilt": True,
    }


def _batches(workload: Workload, predicted: Prediction) -> list[Batch]:
    """One batch for each rank with two equal steps: times between steps need as many."""
    made = []
    for rank in range(workload.ranks):
        facts = np.sort(np.array(list(_facts(workload, predicted, rank)), _FACT), order=["time", "kind"])
        events = np.zeros(2 * len(facts), DTYPE)
        events["step"] = np.repeat([0, 1], len(facts))
        for name in ("kind", "bucket", "parameter", "bytes"):
            events[name] = np.tile(facts[name], 2)
        # 0 means missing
        events["host_ns"] = np.tile(np.rint(facts["time"]), 2) + 1 + events["step"] * round(predicted.step_ns)
        events["sequence"] = np.arange(len(events))
        made.append(Batch(rank, 1, 0, 0, events))
    return made


def _facts(workload: Workload, predicted: Prediction, rank: int) -> Iterator[tuple[float, Kind, int, int, int]]:
    begin = predicted.begin_ns[rank]
    of_step = {
        Kind.FORWARD_BEGIN: begin - workload.forward_ns[rank],
        Kind.FORWARD_END: begin,
        Kind.BACKWARD_BEGIN: begin,
        Kind.FINALIZE_BEGIN: predicted.computed_ns[rank],
        Kind.BACKWARD_END: predicted.end_ns[rank],
    }
    yield from ((at, kind, -1, -1, -1) for kind, at in of_step.items())
    for bucket, members in enumerate(predicted.buckets):
        for index in members:
            yield predicted.gradients_ns[rank, index], Kind.GRAD_READY, bucket, index, workload.sizes[index]
        size = int(predicted.bytes[bucket])
        yield predicted.ready_ns[rank, bucket], Kind.BUCKET_READY, bucket, -1, size
        yield predicted.launched_ns[rank, bucket], Kind.BUCKET_LAUNCHED, bucket, -1, size
        yield predicted.reduced_ns[bucket], Kind.BUCKET_REDUCED, bucket, -1, size


def _chosen_steps(
    timeline: TimelineModel, model: int | None, generation: int | None = None, last_steps: int = ANALYSED_STEPS
) -> tuple[Any, SideBySide]:
    """The description of the analysed layout (or of one generation), and its newest consecutive steps."""
    info = timeline.model(model)
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
    model: int | None = None,
    *,
    generation: int | None = None,
    last_steps: int = ANALYSED_STEPS,
) -> Workload:
    """See `Timeline.workload`."""
    description, steps = _chosen_steps(timeline, model, generation, last_steps)
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


def recorded_step(timeline: TimelineModel, found: Workload, model: int | None = None) -> RecordedStep:
    """The time breakdown of the recorded steps.

    Args:
        timeline: the source of the steps.
        found: the result of `workload`.
        model: which model; None for the most recently active.

    Raises:
        ValueError: as `workload`.
    """
    _, steps = _chosen_steps(timeline, model)
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


def step_times(timeline: TimelineModel, model: int | None = None, *, generation: int | None = None) -> _Floats:
    """Measured ns of each step of one generation, mean over the ranks, ``[steps]``; the steps that `workload` uses."""
    _, steps = _chosen_steps(timeline, model, generation, 1 << 30)
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


def all_reduces(timeline: TimelineModel, model: int | None = None) -> list[Point]:
    """Recorded all-reduces that had the link to themselves: (bytes, ns, ranks).

    Bytes are those sent; if that is not known for a hook, those of the buffer. A collective counts from the last rank's
    launch to the last rank's end, if all before it were complete by then. On devices it takes as long as on the rank
    that was last; a backend that runs one at a time, such as NCCL, begins a queued one when the one before it ends.
    """
    description, steps = _chosen_steps(timeline, model)
    size = carried(description) or [float(one["bytes"]) for one in description["buckets"]]
    duration, alone = steps.steps(len(size)).collectives(one_at_a_time=description.get("backend") not in LANES)
    alone &= duration > 0
    ranks = len(description["group_ranks"])
    return [(size[b], float(duration[row, b]), ranks) for row, b in np.argwhere(alone).tolist()]
