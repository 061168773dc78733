"""Each view of the dashboard as a widget of its own: the same live picture, without the others' tabs."""

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
    """A dashboard with one view; arguments as those of `Dashboard`."""

    _name: str

    def __init__(self, timeline: Timeline, **options: Any) -> None:
        super().__init__(timeline, views=[self._name], **options)


class BucketTimeline(_View):
    """When each bucket of each rank became ready, was launched and was reduced: of one step, or of several."""

    _name = "timeline"


class GradientSync(_View):
    """What synchronising each bucket cost: bytes, bandwidths, waits, against the measured limit of the link."""

    _name = "sync"


class Overlap(_View):
    """What each step consists of, over the steps, and its efficiency: the share left without exposed communication."""

    _name = "overlap"


class Stragglers(_View):
    """For which rank the others waited, in which bucket, how often, and where its own computation fell behind."""

    _name = "stragglers"


class Buckets(_View):
    """The assignment of parameters to buckets as a map of the model."""

    _name = "buckets"


class Findings(_View):
    """What to change, in words, the largest gain first."""

    _name = "findings"


class StepThrough(_View):
    """Pauses a backward at chosen points, shows the reducer as a state machine, and goes on step by step."""

    _name = "step"


class Rehearsal(_View):
    """Faults on purpose: injected, listed, ended."""

    _name = "rehearsal"


class WhatIfSliders(_View):
    """Sliders for world size, link, bucket cap and straggler; the predicted step beside the recorded one."""

    _name = "what_if"


class Gradients(_View):
    """Norms before and after averaging by rank and bucket, noise, where NaN came from; are the replicas equal?"""

    _name = "gradients"


class Collectives(_View):
    """A collective, step by step: who holds which part, what travels, how long each step took."""

    _name = "collectives"

    @property
    def shown(self) -> ShownCollective | None:
        """What was run last; None before the first."""
        return self._stage.shown

    def show(self, shown: ShownCollective) -> None:
        """Shows what was run elsewhere."""
        self._stage.show(shown)
        self.refresh()

    def figure(self) -> go.Figure:
        """Bytes and time of each step as a plotly figure, for reports.

        Raises:
            ValueError: nothing was run yet.
        """
        return to_plotly(collective_scene(self.shown), 460)
