"""What-if questions about a timeline: the facade of `ddp_lab.simulation.simulator`.

`Timeline.simulate` and `Cluster.simulate` return a `WhatIf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..protocol.events import DTYPE, Batch, Kind
from ..simulation.calibration import anchored
from ..simulation.link_model import LANES, CommModel
from ..simulation.simulator import Configuration, Prediction, simulate
from ..simulation.workload import Workload
from . import workloads
from .model import TimelineModel

__all__ = ["WhatIf", "fit_link", "what_if"]

_FACT = np.dtype([("time", "f8"), ("kind", "i8"), ("bucket", "i8"), ("parameter", "i8"), ("bytes", "i8")])
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
    reducer: int | None = None,
    without_rank: int | None = None,
    recorded_link: CommModel | None = None,
    **options: Any,
) -> WhatIf[_Timeline]:
    """See `Timeline.simulate`; `recorded_link`: that of the recording, if it was measured."""
    if link is not None and not isinstance(link, CommModel):
        raise ValueError(f"link: a step of DistributedDataParallel needs a CommModel, got {link!r}")
    workload = workloads.workload(timeline, reducer)
    configuration = Configuration((workload.caps_mb or None) if bucket_cap_mb is None else bucket_cap_mb, **options)
    info = timeline.model(reducer)
    chosen = link or fit_link(timeline, reducer)
    if link is None or link is recorded_link:
        workload, chosen = anchored(workload, chosen)
    if without_rank is not None:
        workload = workload.without(without_rank)
    predicted = simulate(workload, configuration, chosen)
    return WhatIf(configuration, chosen, workload, predicted, info.module if info else "?", type(timeline))


def fit_link(timeline: TimelineModel, reducer: int | None = None) -> CommModel:
    """A `CommModel` of the recorded all-reduces of a model.

    With buckets of a single size, latency and bandwidth can't be separated: all of the time then counts as bandwidth.

    Raises:
        ValueError: nothing was recorded, or the model trains on a single rank.
    """
    points = workloads.all_reduces(timeline, reducer)
    if not points:
        raise ValueError("no recorded all-reduce ran without others in flight: call `Cluster.measure_communication()`")
    info = timeline.model(reducer)
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
