"""The views of the dashboard, one object in one file each, in the order of their tabs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...timeline.timeline import Timeline
from .buckets import Buckets, bucket_gradients_page
from .collectives import Collectives, collective_page, collective_scene
from .fault_injection import FaultInjection
from .findings import SAVINGS, Findings, advice
from .gradients import Gradients
from .groups import Groups
from .layout_words import LayoutWords, layout_words
from .model_map import cell_rows
from .overlap import Overlap, parts_table
from .overview import Overview, Strip
from .parameter_groups import ParameterGroups
from .step import StepThrough, step_blocks
from .step_frames import StepFrame, StepFrames
from .stragglers import Stragglers, last_shares
from .sync import GradientSync
from .timeline import BucketTimeline
from .view import Reported, Selection, View
from .what_if import WhatIf, what_if_blocks

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "FACTS",
    "SAVINGS",
    "VIEWS",
    "LayoutWords",
    "Reported",
    "Selection",
    "StepFrame",
    "StepFrames",
    "View",
    "advice",
    "bucket_gradients_page",
    "cell_rows",
    "collective_page",
    "collective_scene",
    "figure",
    "last_shares",
    "layout_words",
    "parts_table",
    "step_blocks",
    "tabs",
    "what_if_blocks",
]

_VIEWS: tuple[View, ...] = (
    Overview(),
    BucketTimeline(),
    GradientSync(),
    Overlap(),
    ParameterGroups(),
    Stragglers(),
    Groups(),
    Findings(),
    Buckets(),
    WhatIf(),
    FaultInjection(),
    StepThrough(),
    Gradients(),
    Collectives(),
)
VIEWS = {view.name: view for view in _VIEWS}
"""The views by name."""

FACTS = {Strip.name: Strip()}
"""What a page shows around the views of steps."""


def tabs() -> tuple[tuple[str, ...], ...]:
    """Returns the names of the views in each tab."""
    return tuple(
        (name, *(other for other, one in VIEWS.items() if one.beside == name))
        for name, view in VIEWS.items()
        if not view.beside
    )


def figure(timeline: Timeline, view: str = "timeline", **options: Any) -> go.Figure:
    """Returns a view as a plotly figure.

    Args:
        timeline: the source of the events.
        view: ``"overview"``, ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``,
            ``"findings"``, ``"parameter_groups"``, ``"gradients"`` or ``"groups"``.
        options: ``model`` (which model; None for the most recently active) and ``last_steps`` (default 100; 200 for
            the overlap and the gradients). For the timeline and the buckets see `timeline_figure` and
            `buckets_figure`.

    Raises:
        ValueError: there is no such view, or it has nothing to show.
        TypeError: the view has no such option.
    """
    drawn = [name for name, one in VIEWS.items() if one.pixels is not None]
    if view not in drawn:
        names = sorted(drawn, key=lambda name: name != "timeline")
        raise ValueError(f"there is no view {view!r}; choose from {', '.join(names)}")
    return VIEWS[view].figure(timeline, **options)
