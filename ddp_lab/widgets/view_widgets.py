"""Each view of the dashboard as a widget of its own: the same live picture, without the other tabs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..control.collectives import ShownCollective
from ..timeline.timeline import Timeline
from ..views.paint.figure import to_plotly
from ..views.scenes import collective_scene
from .dashboard import Dashboard

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "BucketTimeline",
    "Buckets",
    "Collectives",
    "Findings",
    "GradientSync",
    "Gradients",
    "Overlap",
    "Rehearsal",
    "StepThrough",
    "Stragglers",
    "WhatIfSliders",
]


class _View(Dashboard):
    """A dashboard with one view; arguments as for `Dashboard`."""

    _name: str

    def __init__(self, timeline: Timeline, **options: Any) -> None:
        super().__init__(timeline, views=[self._name], **options)


class BucketTimeline(_View):
    """Shows when each bucket on each rank became ready, was launched and was reduced, for one or several steps."""

    _name = "timeline"


class GradientSync(_View):
    """Shows the synchronisation of each bucket: bytes, bandwidths, waits, compared with the measured link."""

    _name = "sync"


class Overlap(_View):
    """Shows the time breakdown of each step, and its efficiency: the share that is not exposed communication."""

    _name = "overlap"


class Stragglers(_View):
    """Shows how long the others waited for each rank, by bucket and step, and where its own computation fell behind."""

    _name = "stragglers"


class Buckets(_View):
    """Shows the bucket layout as a map of the model."""

    _name = "buckets"


class Findings(_View):
    """Shows what to change, the largest estimated saving first."""

    _name = "findings"


class StepThrough(_View):
    """Pauses a backward at chosen points, shows the reducer as a state machine, and continues step by step."""

    _name = "step"


class Rehearsal(_View):
    """Fault injection: injects, lists and ends faults."""

    _name = "rehearsal"


class WhatIfSliders(_View):
    """Sliders for world size, link, bucket size limit and straggler; the predicted step beside the recorded one."""

    _name = "what_if"


class Gradients(_View):
    """Gradient monitoring: norms before and after averaging by rank and bucket, noise scale, NaN, drift of replicas."""

    _name = "gradients"


class Collectives(_View):
    """Shows a collective step by step: the parts on each rank, the data sent, the time of each step."""

    _name = "collectives"

    @property
    def shown(self) -> ShownCollective | None:
        """The last collective that was run; None before the first."""
        return self._stage.shown

    def show(self, shown: ShownCollective) -> None:
        """Shows a collective that was run elsewhere."""
        self._stage.show(shown)
        self.refresh()

    def figure(self) -> go.Figure:
        """Returns bytes and time of each step as a plotly figure, for reports.

        Raises:
            ValueError: no collective has been run yet.
        """
        return to_plotly(collective_scene(self.shown), 460)
