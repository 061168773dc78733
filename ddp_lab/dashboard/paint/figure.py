"""Scenes as plotly figures."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ...formatting import ending
from ...output import quick_nbformat
from ..scene import Axis, Band, Bars, Cells, Line, Mark, Panel, Rule, Scene, Spans
from .palette import COLOURS, PATTERNS, plotly_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["GREY", "style", "to_plotly"]

GREY = "#808080"
_AXIS = {"gridcolor": "rgba(128, 128, 128, 0.3)", "zerolinecolor": "rgba(128, 128, 128, 0.3)", "linecolor": GREY}
_GAP = 0.1  # between two panels


def to_plotly(scene: Scene, height: int) -> go.Figure:
    """Returns a scene as a figure of this height in pixels.

    Raises:
        ValueError: the scene is empty.
    """
    import plotly.graph_objects as go

    if scene.empty:
        raise ValueError(scene.empty)
    made = go.Figure()
    upper, room = 1.0, 1.0 - _GAP * (len(scene.panels) - 1)
    for number, panel in enumerate(scene.panels, 1):
        name = "y" if number == 1 else f"y{number}"
        lower = max(0.0, upper - panel.share * room)
        for mark in panel.marks:
            _add(made, panel, mark, name)
        scale = {**_axis(panel.y), "domain": [lower, upper]}
        below = {**_axis(panel.x), "anchor": name}
        if any(isinstance(mark, Bars) and mark.texts for mark in panel.marks):
            below["range"] = [0, 1.2 * _longest(panel)]
        made.update_layout({f"yaxis{name[1:]}": scale, "xaxis": below})
        if panel.y.headings:
            _lay_out_lanes(made, panel)
        elif not panel.y.lanes:
            zero = "normal" if panel.y.low < 0 else "tozero"
            made.update_layout({f"yaxis{name[1:]}.rangemode": zero, "xaxis.dtick": 1 if _span(panel) <= 20 else None})
        upper = lower - _GAP
    style(made, scene.title, height)
    if scene.summary:
        made.update_layout(title={"subtitle": {"text": _lines(scene.summary, 140), "font": {"size": 11}}})
        made.update_layout(margin={"t": 130}, height=height + 25)
    layered = any(panel.y.headings for panel in scene.panels)
    made.update_layout(barmode="overlay" if layered else "stack", bargap=0.1 if _bars(scene) <= 60 else 0)
    return made


def style(made: go.Figure, title: str, height: int) -> None:
    """Sets a style that is legible on light and dark pages."""
    quick_nbformat.install()
    made.update_layout(
        # Above the legend, whose lines are more where there is less width.
        title={"text": plotly_text(title), "font": {"size": 15}, "y": 1, "yanchor": "top", "pad": {"t": 12}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "x": 0,
            "font": {"size": 11},
            "traceorder": "normal",
        },
        height=height,
        margin={"l": 70, "r": 30, "t": 105, "b": 50},
        hoverlabel={"align": "left"},
    )


def _bars(scene: Scene) -> int:
    """The largest number of bars beside each other."""
    return max([len(one.at) for panel in scene.panels for one in panel.marks if isinstance(one, Bars)], default=0)


def _span(panel: Panel) -> int:
    """The number of steps from the first to the last."""
    marks = (mark for mark in panel.marks if isinstance(mark, Bars | Line | Band))
    steps = [mark.at if isinstance(mark, Bars) else mark.x for mark in marks]
    return int(max(one.max() for one in steps) - min(one.min() for one in steps)) + 1


def _longest(panel: Panel) -> float:
    """The end of the longest row of horizontal bars."""
    ends = np.zeros(len(panel.y.lanes))
    for mark in panel.marks:
        if isinstance(mark, Bars):
            ends[mark.at] += np.nan_to_num(mark.size)
    return float(ends.max(initial=0.0)) or 1.0


def _axis(axis: Axis) -> dict[str, Any]:
    made: dict[str, Any] = {**_AXIS, "title": plotly_text(axis.label)}
    if axis.lanes and axis.label:  # buckets
        names = [plotly_text(ending(one)) for one in axis.lanes]
        shown = slice(None, None, max(1, len(names) // 20))
        made |= {"tickvals": list(range(len(names)))[shown], "ticktext": names[shown], "automargin": True}
    elif axis.lanes:
        made |= {"autorange": "reversed", "automargin": True}
    elif axis.log and axis.top is not None:
        made |= {"type": "log", "range": np.log10([axis.low, axis.top]).tolist(), "dtick": 1}
    elif axis.top is not None:
        made["range"] = [axis.low, 1.05 * axis.top]
    return made


def _lines(text: str, width: int) -> str:
    """Text in lines of at most this many characters."""
    return "<br>".join(plotly_text(line) for line in textwrap.wrap(text, width))


def _add(made: go.Figure, panel: Panel, mark: Mark, axis: str) -> None:
    if isinstance(mark, Bars):
        _add_bars(made, panel, mark, axis)
    elif isinstance(mark, Spans):
        _add_spans(made, panel, mark)
    elif isinstance(mark, Line):
        dash = ",".join(f"{length}px" for length in mark.dash) or "solid"
        look = {"color": COLOURS[mark.role], "width": mark.width, "dash": dash}
        about = f"%{{x}}: {plotly_text(mark.name)} %{{y:.3g}}<extra></extra>"
        made.add_scatter(name=mark.name, x=mark.x, y=mark.y, yaxis=axis, mode="lines", line=look, hovertemplate=about)
    elif isinstance(mark, Band):
        known = np.isfinite(mark.low) & np.isfinite(mark.high)
        x, y = np.append(mark.x[known], mark.x[known][::-1]), np.append(mark.high[known], mark.low[known][::-1])
        fill = {"fill": "toself", "fillcolor": COLOURS[mark.role], "opacity": 0.45, "hoverinfo": "skip"}
        made.add_scatter(name=mark.name, x=x, y=y, yaxis=axis, mode="lines", line={"width": 0}, **fill)
    elif isinstance(mark, Cells):
        about = f"%{{y}}<br>{panel.x.label} %{{customdata}}: %{{z:.2f}} {mark.unit}<extra></extra>"
        columns = [plotly_text(one) for one in panel.x.lanes]
        scale = {"colorscale": "Cividis", "colorbar": {"title": mark.unit}, "xgap": 1, "ygap": 1}
        made.add_heatmap(
            z=mark.values,
            y=list(panel.y.lanes),
            x=list(range(len(columns))),
            customdata=[columns] * len(mark.values),
            hovertemplate=about,
            **scale,
        )
    elif isinstance(mark, Rule) and not panel.y.headings:
        line = {"color": COLOURS[mark.role]}
        made.add_vline(x=mark.x, line=line, annotation_text=plotly_text(mark.text))


def _add_bars(made: go.Figure, panel: Panel, mark: Bars, axis: str) -> None:
    unit = (panel.x if panel.y.lanes else panel.y).label.split()[0]
    place, size = ("y", "x") if panel.y.lanes else ("x", "y")
    at = [_lines(panel.y.lanes[one], 60) for one in mark.at] if panel.y.lanes else mark.at
    about = f"%{{{place}}}: {plotly_text(mark.name)} %{{{size}:.2f}} {plotly_text(unit)}<extra></extra>"
    more: dict[str, Any] = {}
    if mark.tips:
        about, more["customdata"] = "%{customdata}<extra></extra>", [_lines(one, 80) for one in mark.tips]
    if mark.texts:
        more |= {"text": list(mark.texts), "textposition": "outside", "cliponaxis": False}
    made.add_bar(
        name=mark.name,
        orientation="h" if panel.y.lanes else "v",
        yaxis=axis,
        marker={"color": COLOURS[mark.role]},
        hovertemplate=about,
        **{place: at, size: np.asarray(mark.size)},
        **more,
    )


def _paths(axis: Axis) -> list[str]:
    """Names of lanes with those of their headings: plotly merges lanes with equal names."""
    made, above = [], ""
    for index, name in enumerate(axis.headed):
        above = name if index in axis.headings else above
        made.append(name if index in axis.headings else f"{above} · {name}")
    return made


def _tip(text: str) -> str:
    """Lines of text; if there are several, the first is a heading."""
    first, *others = [plotly_text(line) for line in text.split("\n")]
    return "<br>".join([f"<b>{first}</b>", *others]) if others else first


def _add_spans(made: go.Figure, panel: Panel, mark: Spans) -> None:
    names, shapes = _paths(panel.y), {"dots": ".", "hatch": "/"}
    made.add_bar(
        name=f"{mark.name}: {mark.about}" if mark.about else mark.name,
        showlegend=bool(mark.name),  # others bear their names
        orientation="h",
        y=[names[lane] for lane in mark.lane],
        base=mark.begin.tolist(),
        x=(mark.end - mark.begin).tolist(),
        text=[plotly_text(one) for one in mark.texts] or None,
        textposition="inside",
        # Where the page shines through, plotly takes it for white.
        insidetextfont={"color": GREY} if COLOURS[mark.role].startswith("rgba") else None,
        insidetextanchor="start",
        customdata=[_tip(one) for one in mark.tips] or None,
        hovertemplate="%{customdata}<extra></extra>",
        width=0.22 if mark.thin else 0.86,
        offset=0.2 if mark.thin else -0.43,
        marker={
            # Not numbers on a colour scale: of those plotly 7.1 writes a console message per bar.
            "color": COLOURS[mark.role],
            "line": {"width": 0 if mark.name else 1, "color": GREY},
            "pattern": {"shape": shapes.get(PATTERNS.get(mark.role, ""), ""), "fgcolor": "black", "size": 5},
        },
    )


def _lay_out_lanes(made: go.Figure, panel: Panel) -> None:
    """Sets axes of lanes in groups, and draws the rules across them. The lanes bear the names of empty headings."""
    names = _paths(panel.y)
    used = {lane for mark in panel.marks if isinstance(mark, Spans) for lane in mark.lane.tolist()}
    shown = [name for lane, name in enumerate(names) if lane in used or lane not in panel.y.headings]
    rules = [mark for mark in panel.marks if isinstance(mark, Rule)]
    made.add_scatter(
        x=[x for rule in rules for x in (rule.x, rule.x, None)],
        y=[y for rule in rules for y in (names[rule.lanes[0]], names[rule.lanes[1]], None)],
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dot"},
        name=rules[0].text if rules else "",
        hovertemplate="after %{x:.2f} ms<extra></extra>",
    )
    made.update_layout(
        xaxis={"rangemode": "normal" if panel.x.low < 0 else "tozero", "range": None},
        # No lines along the lanes: they would strike the phases' texts out.
        yaxis={"categoryorder": "array", "categoryarray": shown, "autorange": "reversed", "showgrid": False},
    )
