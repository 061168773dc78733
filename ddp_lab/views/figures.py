"""The views as plotly figures: for reports, and saved with the notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analysis import findings
from ..formatting import counted, rate
from ..timeline.timeline import Timeline
from . import view_data
from .gradients import gradients_figure
from .model_map import Cell, map_cells
from .paint.palette import PHASES, bucket_colour, plotly_text
from .timeline_figure import timeline_figure
from .view_data import unused

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["buckets_figure", "figure", "findings_figure", "overlap_figure", "stragglers_figure", "sync_figure"]

_GREY = "#808080"
_AXIS = {"gridcolor": "rgba(128, 128, 128, 0.3)", "zerolinecolor": "rgba(128, 128, 128, 0.3)", "linecolor": _GREY}


def figure(timeline: Timeline, view: str = "timeline", **options: Any) -> go.Figure:
    """Returns a view as a plotly figure.

    Args:
        timeline: where the events are.
        view: ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"`` or
            ``"gradients"``.
        options: ``reducer`` (which model; None for the most recently active) and ``last_steps``; for the timeline see
            `timeline_figure`.

    Raises:
        ValueError: there is no such view, or nothing to show.
    """
    known: dict[str, Callable[..., go.Figure]] = {
        "timeline": timeline_figure,
        "sync": sync_figure,
        "overlap": overlap_figure,
        "stragglers": stragglers_figure,
        "buckets": buckets_figure,
        "findings": findings_figure,
        "gradients": gradients_figure,
    }
    if view not in known:
        raise ValueError(f"view={view!r}: choose from {', '.join(known)}")
    return known[view](timeline, **options)


def overlap_figure(timeline: Timeline, *, reducer: int | None = None, last_steps: int = 200) -> go.Figure:
    """Returns what each step consists of, stacked, and its efficiency."""
    import plotly.graph_objects as go

    found = view_data.breakdown(timeline, reducer, last_steps)
    if not len(found.step):
        raise ValueError("no step has ended on every rank")
    made = go.Figure()
    for key, (colour, name) in PHASES.items():
        about = f"step %{{x}}: {name} %{{y:.2f}} ms<extra></extra>"
        made.add_bar(name=name, x=found.step, y=getattr(found, key), marker={"color": colour}, hovertemplate=about)
    made.add_scatter(
        name="efficiency",
        x=found.step,
        y=100 * found.efficiency,
        yaxis="y2",
        mode="lines",
        line={"color": _GREY, "width": 2},
        hovertemplate="step %{x}: %{y:.0f} % without exposed communication<extra></extra>",
    )
    _style(made, "Overlap: what each step consists of", "step", "ms a step (medians over the ranks)", 480)
    # A few long steps (the first ones) must not flatten all others.
    top = min(float(found.total.max()), 1.6 * float(np.quantile(found.total, 0.95)))
    made.update_layout(
        barmode="stack",
        bargap=0 if len(found.step) > 60 else 0.1,
        yaxis={"domain": [0.3, 1], "range": [0, top * 1.02]},
        yaxis2={**_AXIS, "domain": [0, 0.2], "range": [0, 105], "title": "efficiency, %"},
        xaxis={"anchor": "y2"},
    )
    return made


def stragglers_figure(timeline: Timeline, *, reducer: int | None = None, last_steps: int = 100) -> go.Figure:
    """Returns for which rank the others waited, by bucket."""
    import plotly.graph_objects as go

    found = view_data.waiting(timeline, reducer, last_steps)
    if not found.cells.size:
        raise ValueError("no bucket has been reduced on every rank")
    names = [f"rank {rank}: last in {share:.0%}" for rank, share in zip(found.ranks, found.share, strict=True)]
    made = go.Figure(
        go.Heatmap(
            z=found.cells,
            y=names,
            x=list(range(found.cells.shape[1])),
            colorscale="Cividis",
            colorbar={"title": "ms a step"},
            xgap=1,
            ygap=1,
            hovertemplate="%{y}<br>bucket %{x}: all others waited %{z:.2f} ms a step for it alone<extra></extra>",
        )
    )
    title = f"Stragglers: for whom all others waited (mean of {found.steps} steps)"
    _style(made, title, "bucket", None, max(260, 150 + 24 * len(names)))
    made.update_yaxes(autorange="reversed", automargin=True)
    made.update_xaxes(dtick=max(1, found.cells.shape[1] // 20))
    return made


def sync_figure(timeline: Timeline, *, reducer: int | None = None, last_steps: int = 100) -> go.Figure:
    """Returns waiting, all-reduce and bus bandwidth of each bucket."""
    import plotly.graph_objects as go

    found = view_data.sync(timeline, reducer, last_steps)
    if not len(found.bucket):
        raise ValueError("no bucket has been reduced on every rank")
    made = go.Figure()
    rates = [f"{rate(one)} (bus)" if one == one else "" for one in found.bus_gb_s.tolist()]
    names = [f"bucket {one}" for one in found.bucket.tolist()]
    for name, values, colour, text in (
        ("the first rank waits for the last one", found.late_ms, "#e69f00", None),
        ("all-reduce, once all have launched", found.all_reduce_ms, "#009e73", rates),
    ):
        about = f"%{{y}}: {name} %{{x:.2f}} ms<extra></extra>"
        bar = {"orientation": "h", "x": values, "y": names, "marker": {"color": colour}, "text": text}
        made.add_bar(name=name, textposition="outside", hovertemplate=about, **bar)
    _style(made, "Gradient sync: medians over the steps", "ms", None, max(280, 170 + 22 * len(names)))
    longest = float(np.nanmax(found.late_ms + found.all_reduce_ms))
    made.update_layout(barmode="stack", xaxis={"range": [0, 1.2 * longest]})  # room for the text
    made.update_yaxes(autorange="reversed", automargin=True)
    return made


def buckets_figure(
    timeline: Timeline, *, reducer: int | None = None, generation: int | None = None, equal: bool = False
) -> go.Figure:
    """Returns the assignment as a map of the model: modules from top to bottom, as wide as they are large.

    Parameters without a gradient in the newest steps are hatched and called unused, as in the widget.

    Args:
        timeline: where it is.
        reducer: which model; None for the most recently active.
        generation: which assignment; None for the newest.
        equal: every parameter is as wide as the others; else as wide as its bytes.
    """
    import plotly.graph_objects as go

    known = [one.reducer for one in timeline.reducers()]
    if reducer is None and not known:
        raise ValueError("no model has been described")
    assignment = timeline.assignment(known[-1] if reducer is None else reducer, generation)
    buckets = len(assignment["buckets"])
    cells, _ = map_cells(assignment, equal=equal)
    idle = unused(timeline, assignment)
    looks = [bucket_colour(one.bucket, buckets) if one.bucket >= 0 else ("#9aa1a9", "#000") for one in cells]
    ids = [one.path or "/" for one in cells]
    made = go.Figure(
        go.Icicle(
            ids=[plotly_text(one) for one in ids],
            labels=[plotly_text(_label(one, idle)) for one in cells],
            parents=[plotly_text(_parent(one.path, set(ids))) for one in cells],
            values=[one.end - one.begin for one in cells],
            branchvalues="total",
            tiling={"orientation": "v"},
            marker={
                "colors": [colour for colour, _ in looks],
                "line": {"width": 1, "color": _GREY},
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
            customdata=[_where(one, idle) for one in cells],
            hovertemplate="%{id}<br>%{customdata}<br>%{percentRoot:.1%} of the model<extra></extra>",
            sort=False,
        )
    )
    order = "rebuilt in the order of readiness" if assignment["rebuilt"] else "not rebuilt"
    hatched = f"; hatched: unused, {len(idle)} of {len(assignment['parameters'])} parameters" if idle else ""
    title = (
        f"{plotly_text(assignment['module'])} in {counted(buckets, 'bucket')}, {order} (dark: launched first{hatched})"
    )
    _style(made, title, None, None, 420)
    made.update_layout(margin={"t": 60, "l": 10, "r": 10, "b": 10})
    return made


def _label(cell: Cell, idle: set[int]) -> str:
    if cell.parameter < 0:
        return cell.name
    return f"{cell.name} · {'unused' if cell.parameter in idle else cell.bucket}"


def _where(cell: Cell, idle: set[int]) -> str:
    where = "several buckets" if cell.bucket < 0 else f"bucket {cell.bucket}"
    return f"{where}, gradient never ready: unused" if cell.parameter in idle else where


def findings_figure(timeline: Timeline, *, reducer: int | None = None, last_steps: int = 100) -> go.Figure:
    """Returns what to change, by gain."""
    import plotly.graph_objects as go

    facts = timeline.judgement(reducer, last_steps)
    found = findings.findings(facts) if facts is not None else []
    if not found:
        raise ValueError(findings.headline(facts, found))
    made = go.Figure(
        go.Bar(
            orientation="h",
            x=[one.gain_percent for one in found],
            y=[_lines(one.title, 60) for one in found],
            marker={"color": "#009e73"},
            text=[f"{one.gain_percent:.1f} %" for one in found],
            textposition="outside",
            customdata=[_lines(f"{one.evidence} → {one.remedy}", 80) for one in found],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    _style(made, "Findings: estimated gain of each change of its own", "% of the step", None, 160 + 64 * len(found))
    made.update_xaxes(range=[0, 1.15 * max(one.gain_percent for one in found)])
    made.update_yaxes(autorange="reversed", automargin=True)
    return made


def _lines(text: str, width: int) -> str:
    """Text in lines of so many characters at most."""
    return "<br>".join(plotly_text(line) for line in textwrap.wrap(text, width))


def _parent(path: str, ids: set[str]) -> str:
    """The module that a cell lies in: modules with a single child have none of their own."""
    if not path:
        return ""
    while path:
        path = path.rpartition(".")[0]
        if path in ids:
            return path
    return "/"


def _style(made: go.Figure, title: str, x: str | None, y: str | None, height: int) -> None:
    """Sets axes and a look that reads on light and dark pages."""
    made.update_layout(
        title={"text": title, "font": {"size": 15}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _GREY},
        xaxis={**_AXIS, "title": x},
        yaxis={**_AXIS, "title": y},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "x": 0,
            "font": {"size": 11},
            "traceorder": "normal",
        },
        height=height,
        margin={"l": 70, "r": 30, "t": 90, "b": 50},
        hoverlabel={"align": "left"},
    )
