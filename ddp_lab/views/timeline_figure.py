"""Timelines as plotly figures: for reports, and saved with the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..timeline.timeline import Timeline
from .paint.figure import GREY
from .paint.palette import COLOURS, PARTS, TITLES, plotly_text
from .step_frames import BEGIN, FINALIZE, Float64, StepFrame, StepFrames
from .timeline_layout import Part, spans_of
from .whole_step import phases

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["find_step", "timeline_figure"]

_GRID = "rgba(128, 128, 128, 0.3)"
_SHAPES = {"queued": ".", "waiting": "/"}


_PHASES = {
    "other": ("rgba(154, 161, 169, 0.35)", "between the steps"),
    "forward": ("#6fa8d6", "forward"),
    "backward": ("#c8c8c8", "backward"),
    "finalize": ("rgba(0, 0, 0, 0)", "finalize"),
}


def timeline_figure(
    timeline: Timeline,
    step: int | None = None,
    *,
    reducer: int | None = None,
    ranks: Sequence[int] | None = None,
    whole: bool = False,
    width: int | None = None,
) -> go.Figure:
    """Returns the bucket timeline of one step: a row for each rank and bucket, milliseconds from left to right.

    Args:
        timeline: where the events are.
        step: which step; None for the newest that is complete.
        reducer: which model; None for the most recently active.
        ranks: which ranks; None for all.
        whole: from the end of the step before: with a row for each rank's forward, backward and what lies between.
        width: pixels; None for the width of the page.

    Raises:
        ValueError: there is no such step, with the steps there are.
    """
    import plotly.graph_objects as go

    frame, assignment = find_step(timeline, step, reducer)
    rows = [row for row, rank in enumerate(frame.ranks) if ranks is None or rank in ranks]
    if not rows:
        raise ValueError(f"none of the ranks {list(ranks or ())} took part; ranks: {frame.ranks}")
    figure = go.Figure()
    for part, entries in _entries(frame, rows, assignment).items():
        role = PARTS[part]
        figure.add_bar(
            name=f"{role}: {TITLES[role]}",
            orientation="h",
            y=[entry["y"] for entry in entries],
            base=[entry["base"] for entry in entries],
            x=[entry["x"] for entry in entries],
            customdata=[entry["about"] for entry in entries],
            hovertemplate="%{customdata}<extra></extra>",
            width=0.22 if part == Part.EXPOSED else 0.86,
            offset=0.2 if part == Part.EXPOSED else -0.43,
            marker={
                # Not numbers on a colour scale: of those plotly 7.1 writes a console message per bar.
                "color": COLOURS[role],
                "line": {"width": 0},
                "pattern": {"shape": _SHAPES.get(role, ""), "fgcolor": "black", "size": 5},
            },
        )
    _mark_backwards(figure, frame, rows)
    if whole:
        _add_phases(figure, frame, rows, timeline.marks())
    _style(figure, frame, rows, assignment.get("module"), width, whole)
    return figure


def find_step(timeline: Timeline, step: int | None, reducer: int | None) -> tuple[StepFrame, dict[str, Any]]:
    """Returns the step (None: the newest that is complete) and the description of its buckets.

    Raises:
        ValueError: there is no such step.
    """
    frames, info = StepFrames(timeline), timeline.model(reducer)
    chosen = -1 if info is None else info.reducer
    frame = frames.latest(chosen) if step is None else frames.frame(chosen, step)
    if frame is None:
        held = timeline.held_steps(chosen)
        known = f"steps {held[0]} to {held[-1]}" if len(held) else "none: no step has been recorded"
        raise ValueError(f"no events of step {step} of reducer {reducer}; there are {known}")
    try:
        return frame, timeline.assignment(chosen, frame.generation)
    except ValueError:
        return frame, {}


def _entries(frame: StepFrame, rows: Sequence[int], assignment: dict[str, Any]) -> dict[Part, list[dict[str, Any]]]:
    """Returns the bars by part."""
    made: dict[Part, list[dict[str, Any]]] = {part: [] for part in Part}
    last, spans = frame.last_rank(frame.sync()), spans_of(frame)
    sizes = {entry["bucket"]: len(entry["parameters"]) for entry in assignment.get("buckets", ())}
    for row in rows:
        for bucket in range(frame.shape[1]):
            found = spans[row][bucket]
            lines = [
                f"<b>step {frame.step}, rank {frame.ranks[row]}, bucket {bucket}</b>",
                f"{frame.bucket_bytes[bucket] / 2**20:.2f} MiB, {sizes.get(bucket, '?')} parameters",
                *(f"{part.name.lower()} {end - begin:.2f} ms" for part, begin, end, _ in found),
            ]
            if last[bucket] >= 0:
                lines.append(f"last to launch: rank {last[bucket]}")
            for part, begin, end, _ in found:
                about = "<br>".join(lines)
                made[part].append({"y": _row(frame, row, bucket), "base": begin, "x": end - begin, "about": about})
    return made


def _row(frame: StepFrame, row: int, bucket: int) -> str:
    """Returns the name of a row."""
    return f"rank {frame.ranks[row]} · bucket {bucket}"


def _mark_backwards(figure: go.Figure, frame: StepFrame, rows: Sequence[int]) -> None:
    """Marks the end of each rank's own backward computation."""
    bounds: Float64 = frame.milliseconds(frame.bounds_ns)
    x: list[float | None] = []
    y: list[str | None] = []
    for row in rows:
        x += [float(bounds[row, FINALIZE])] * 2 + [None]
        y += [_row(frame, row, 0), _row(frame, row, frame.shape[1] - 1), None]
    computed = float(bounds[rows, FINALIZE].max() - bounds[rows, BEGIN].min())
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dot"},
        name="end of the rank's backward computation",
        hovertemplate=f"computed after %{{x:.2f}} ms (all ranks: {computed:.2f} ms)<extra></extra>",
    )


def _add_phases(
    figure: go.Figure, frame: StepFrame, rows: Sequence[int], marks: Sequence[tuple[int, int, str]]
) -> None:
    """Adds a row for each rank: forward, backward, finalize, and what the program does between the steps."""
    found = [(frame.ranks[row], one) for row in rows for one in phases(frame, row, marks)]
    for kind, (colour, name) in _PHASES.items():
        chosen = [(rank, one) for rank, one in found if one.kind == kind]
        figure.add_bar(
            name=name,
            showlegend=False,  # the bars bear their names
            orientation="h",
            y=[f"rank {rank}" for rank, _ in chosen],
            base=[one.begin for _, one in chosen],
            x=[one.end - one.begin for _, one in chosen],
            text=[plotly_text(one.name) for _, one in chosen],
            textposition="inside",
            insidetextanchor="start",
            customdata=[plotly_text(f"rank {rank}: {one.name} {one.end - one.begin:.2f} ms") for rank, one in chosen],
            hovertemplate="%{customdata}<extra></extra>",
            width=0.7,
            marker={"color": colour, "line": {"width": 1, "color": GREY}},
        )


def _style(
    figure: go.Figure, frame: StepFrame, rows: Sequence[int], module: str | None, width: int | None, whole: bool
) -> None:
    """Sets axes and a look that reads on light and dark pages."""
    order: list[str] = []
    for row in rows:
        order += [f"rank {frame.ranks[row]}"] if whole else []
        order += [_row(frame, row, bucket) for bucket in range(frame.shape[1])]
    title = f"{module}: step {frame.step}" if module else f"step {frame.step}"
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": GREY}
    figure.update_layout(
        title={
            "text": f"Bucket timeline of {plotly_text(title)}",
            "font": {"size": 15},
            "y": 1,  # above the legend, whose lines are more where there is less width
            "yanchor": "top",
            "pad": {"t": 12},
        },
        barmode="overlay",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY},
        xaxis={
            **axis,
            "title": "milliseconds since the first rank's backward began",
            "rangemode": "normal" if whole else "tozero",
        },
        yaxis={**axis, "categoryorder": "array", "categoryarray": order, "autorange": "reversed"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "font": {"size": 11}},
        height=max(280, min(1_400, 170 + 18 * len(order))),
        width=width,
        margin={"l": 120, "r": 20, "t": 100, "b": 50},
        hoverlabel={"align": "left"},
    )
