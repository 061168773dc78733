"""Each view of the dashboard as a widget of its own: the same live picture, without the others' tabs."""

from __future__ import annotations

from typing import Any

from ..client.timeline import Timeline
from .dashboard import Dashboard

__all__ = ["BucketTimeline", "Buckets", "Findings", "GradientSync", "Overlap", "Stragglers"]


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
