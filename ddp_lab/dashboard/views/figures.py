"""The views as plotly figures, for reports and saved notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...timeline.timeline import Timeline
from ..paint.figure import GREY, style, to_plotly
from ..paint.palette import COLOURS, bucket_colour, plotly_text
from .layout_words import layout_words
from .model_map import cell_label, map_cells, map_words
from .scenes import SCENES
from .timeline_scene import find_step, timeline_scene
from .view_data import unused

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["buckets_figure", "figure", "timeline_figure"]

# Pixels of a figure, and of each of its lanes.
_HEIGHTS = {
    "overview": (150, 24),
    "sync": (170, 22),
    "overlap": (480, 0),
    "stragglers": (150, 24),
    "findings": (160, 64),
    "gradients": (460, 0),
    "parameter_groups": (170, 20),
    "groups": (170, 20),
}


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
    if view == "timeline":
        return timeline_figure(timeline, **options)
    if view == "buckets":
        return buckets_figure(timeline, **options)
    if view not in SCENES:
        raise ValueError(f"there is no view {view!r}; choose from timeline, {', '.join(SCENES)}, buckets")
    if wrong := sorted(options.keys() - {"model", "last_steps"}):
        raise TypeError(f"the view {view!r} takes model and last_steps, not {', '.join(wrong)}")
    return _scene_figure(view, timeline, **options)


def _scene_figure(
    view: str, timeline: Timeline, *, model: int | None = None, last_steps: int | None = None
) -> go.Figure:
    scene = SCENES[view](timeline, model, last_steps)
    upright, lane = _HEIGHTS[view]
    return to_plotly(scene, max(260, upright + lane * sum(len(panel.y.lanes) for panel in scene.panels)))


def timeline_figure(
    timeline: Timeline,
    step: int | None = None,
    *,
    model: int | None = None,
    ranks: Sequence[int] | None = None,
    whole: bool = False,
    width: int | None = None,
) -> go.Figure:
    """Returns the bucket timeline of one step: one row per rank and bucket, with time in ms from left to right.

    Args:
        timeline: the source of the events.
        step: which step; None for one that stands for the analysed ones: in which the straggler is late, if there is
            one, else one that is as long as most.
        model: which model; None for the most recently active.
        ranks: which ranks; None for all.
        whole: start at the end of the previous step, to show each rank's forward and the time between the steps.
        width: in pixels; None for the width of the page.

    Raises:
        ValueError: there is no such step, or none of these ranks took part in it.
    """
    frame, assignment = find_step(timeline, step, model)
    rows = [row for row, rank in enumerate(frame.ranks) if ranks is None or rank in ranks]
    if not rows:
        raise ValueError(f"none of the ranks {list(ranks or ())} took part in this step; its ranks are {frame.ranks}")
    marks = timeline.marks() if whole else None
    scene = timeline_scene(frame, assignment.get("module"), rows=rows, marks=marks, assignment=assignment)
    made = to_plotly(scene, max(280, min(1_400, 170 + 18 * len(scene.panels[0].y.lanes))))
    made.update_layout(width=width)
    return made


def buckets_figure(
    timeline: Timeline, *, model: int | None = None, generation: int | None = None, equal: bool = False
) -> go.Figure:
    """Returns the bucket layout as a map of the model: modules from top to bottom, with their width by size.

    Parameters without a gradient in the newest steps are hatched and labelled unused, as in the widget.

    Args:
        timeline: the source of the layout.
        model: which model; None for the most recently active.
        generation: which version of the layout; None for the newest.
        equal: give all parameters the same width; by default the width is in proportion to the bytes.
    """
    import plotly.graph_objects as go

    known = [one.reducer for one in timeline.reducers()]
    if model is None and not known:
        raise ValueError("no model has been recorded yet")
    assignment = timeline.assignment(known[-1] if model is None else model, generation)
    buckets = len(assignment["buckets"])
    cells, _ = map_cells(assignment, equal=equal)
    idle = unused(timeline, assignment)
    looks = [bucket_colour(one.bucket, buckets) if one.bucket >= 0 else (COLOURS["other"], "#000") for one in cells]
    said = [cell_label(one, idle, layout_words(assignment)) for one in cells]
    ids = [one.path or "/" for one in cells]
    made = go.Figure(
        go.Icicle(
            ids=[plotly_text(one) for one in ids],
            labels=[plotly_text(label) for label, _ in said],
            parents=[plotly_text(_parent(one.path, set(ids))) for one in cells],
            values=[one.end - one.begin for one in cells],
            branchvalues="total",
            tiling={"orientation": "v"},
            marker={
                "colors": [colour for colour, _ in looks],
                "line": {"width": 1, "color": GREY},
                "pattern": {
                    "shape": ["/" if one.parameter in idle else "" for one in cells],
                    "fgcolor": [ink for _, ink in looks],
                    "fillmode": "overlay",
                    "size": 6,
                    "solidity": 0.15,
                },
            },
            leaf={"opacity": 1},
            textfont={"color": [ink for _, ink in looks]},
            customdata=[where for _, where in said],
            hovertemplate="%{id}<br>%{customdata}<br>%{percentRoot:.1%} of the model<extra></extra>",
            sort=False,
        )
    )
    order, colours = map_words(assignment, idle)
    style(made, f"{assignment['module']} in {order} ({colours})", 420)
    made.update_layout(margin={"t": 60, "l": 10, "r": 10, "b": 10})
    return made


def _parent(path: str, ids: set[str]) -> str:
    """The module around a cell. A module with a single child has no cell of its own."""
    if not path:
        return ""
    while path:
        path = path.rpartition(".")[0]
        if path in ids:
            return path
    return "/"
