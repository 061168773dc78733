"""What-if questions about a timeline or a cluster: the facade of `ddp_lab.insight.simulate`.

`Timeline.simulate` and `Cluster.simulate` return a `WhatIf`; `Cluster.measure_link` measures the ranks' all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..insight import predicted_events
from ..insight.anchor import anchored
from ..insight.link_model import LinkModel
from ..insight.simulate import Configuration, Prediction, simulate
from ..insight.workload import Workload
from . import workloads
from .outputs import SilentBoard
from .results import CellText

if TYPE_CHECKING:
    from .cluster import Cluster
    from .timeline import Timeline

__all__ = ["WhatIf", "fit_link", "measure_link", "what_if"]

_MEBIBYTE = 1024 * 1024

_LANES = {"gloo": 2}  # threads of torch's ProcessGroupGloo; one stream, one thread elsewhere
_CODE = "__import__('ddp_lab.parallel.link_measurement', fromlist=['measure']).measure"


@dataclass(frozen=True)
class WhatIf:
    """A predicted step.

    Attributes:
        configuration: what was asked.
        link: the model of the all-reduce.
        workload: what the ranks compute.
        prediction: the step's times.
        module: class name of the model.
    """

    configuration: Configuration
    link: LinkModel
    workload: Workload
    prediction: Prediction
    module: str = "?"

    @property
    def step_ms(self) -> float:
        """Milliseconds from step to step."""
        return self.prediction.step_ns / 1e6

    @property
    def breakdown(self) -> dict[str, float]:
        """Milliseconds by part; all but ``hidden`` add up to `step_ms`."""
        return {
            part: getattr(self.prediction, f"{part}_ns") / 1e6
            for part in ("forward", "compute", "hidden", "exposed", "other")
        }

    def timeline(self) -> Timeline:
        """The predicted buckets as a timeline, which figures and widgets show like a recorded one."""
        from .timeline import Timeline

        made = Timeline()
        described = predicted_events.description(self.workload, self.prediction, module=f"{self.module} (predicted)")
        for batch in predicted_events.batches(self.workload, self.prediction):
            made.describe(batch.rank, described | {"session": batch.session})
            made.extend(batch)
        return made

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.breakdown.items())
        return f"<predicted step of {self.step_ms:.2f} ms: {parts}; {len(self.prediction.buckets)} buckets>"


def what_if(
    timeline: Timeline,
    link: LinkModel | None,
    *,
    bucket_cap_mb: float | Sequence[float] | None = None,
    reducer: int | None = None,
    without_rank: int | None = None,
    recorded_link: LinkModel | None = None,
    **options: Any,
) -> WhatIf:
    """See `Timeline.simulate`; `recorded_link`: that of the recording, if it was measured."""
    workload = workloads.workload(timeline, reducer)
    if bucket_cap_mb is None and workload.caps:
        bucket_cap_mb = [cap / _MEBIBYTE for cap in workload.caps]
    configuration = Configuration(bucket_cap_mb, **options)
    info = timeline._chosen(reducer)
    chosen = link or fit_link(timeline, reducer)
    if link is None or link is recorded_link:
        workload, chosen = anchored(workload, chosen)
    if without_rank is not None:
        workload = workload.without(without_rank)
    predicted = simulate(workload, configuration, chosen)
    return WhatIf(configuration, chosen, workload, predicted, info.module if info else "?")


def fit_link(timeline: Timeline, reducer: int | None = None) -> LinkModel:
    """A `LinkModel` of the recorded all-reduces of a model.

    Buckets of a single size don't tell latency from bandwidth: all of the time then counts as bandwidth.

    Raises:
        ValueError: nothing was recorded, or the model trains on one rank.
    """
    points = workloads.all_reduces(timeline, reducer)
    if not points:
        raise ValueError("no all-reduce was recorded that had the link to itself; `Cluster.measure_link()` measures it")
    info = timeline._chosen(reducer)
    backend = timeline.assignment(info.reducer).get("backend", "") if info else ""
    lanes = _LANES.get(str(backend), 1)
    sizes = {size for size, _, _ in points}
    if len(sizes) == 1:
        size, ranks = points[0][0], points[0][2]
        typical = sorted(ns for _, ns, _ in points)[len(points) // 2]
        return LinkModel(0.0, typical / (2 * (ranks - 1) / ranks * size), lanes=lanes)
    return LinkModel.fitted(points, lanes=lanes)


def measure_link(cluster: Cluster, sizes: Sequence[int] | None, repeats: int) -> LinkModel:
    """See `Cluster.measure_link`."""
    arguments = f"sizes={None if sizes is None else list(map(int, sizes))}, repeats={int(repeats)}, device=device"
    code = CellText(f"{_CODE}({arguments})")
    found: dict[int, Any] = cluster.run(code, label="measure the link", board=SilentBoard()).values
    measured = found[min(found)]
    points = [(size, ns, measured["ranks"]) for size, ns in measured["points"]]
    made = LinkModel.fitted(points, lanes=_LANES.get(measured["backend"], 1))
    return replace(made, launch_ns=measured["launch_ns"], sharing=measured["sharing"] if made.lanes > 1 else 1.0)
