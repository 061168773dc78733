"""What the pictures of the benchmarks have in common: how they look, and how they become pages that need no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import write_text
from ..measuring.command import fresh_sets
from . import noise

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["GREY", "about", "dress", "error_bars", "write"]

GREY, _LINE = "#808080", "rgba(128, 128, 128, 0.3)"
_NOTHING = {
    "text": "No figure could be told: the machine was too noisy.<br>--keep-noise draws them all the same.",
    "font": {"size": 16},
    "showarrow": False,
    **{"x": 0.5, "xref": "paper", "y": 0.5, "yref": "paper"},
}
# The page follows the reader's light or dark theme; plotly writes its own colour on each text, hence the override.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 12px; background: Canvas; color: CanvasText; font-family: system-ui, sans-serif; }}
.js-plotly-plot .main-svg text:not(.bartext) {{ fill: CanvasText !important; }}
.js-plotly-plot .hoverlayer text {{ fill: #fff !important; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def write(figure: go.Figure, path: Path) -> None:
    """Writes a figure as a page that carries plotly's script with it."""
    body = figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})
    title = escape(figure.layout.title.text.split("<")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _PAGE.format(title=title, body=body))


def dress(made: go.Figure, title: str, below: str, height: int) -> go.Figure:
    """Gives a figure its title, its colours and its axes; one without traces says that nothing could be told."""
    made.update_layout(
        title={
            "text": f"{title}<br><sub>{below}</sub>",
            "font": {"size": 18},
            **{"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 26}},
        },
        height=height,
        margin={"l": 70, "r": 20, "t": 110, "b": 60},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY, "size": 13},
        hoverlabel={"bgcolor": "#333"},
        legend={"groupclick": "togglegroup"},
    )
    made.update_xaxes(gridcolor=_LINE, zeroline=False)
    made.update_yaxes(gridcolor=_LINE, zeroline=False)
    if not made.data:
        made.layout.annotations = [_NOTHING]
        made.update_xaxes(visible=False)
        made.update_yaxes(visible=False)
    return made


def about(result: Mapping[str, Any], what: str, drawn: list[Any], keep: bool) -> str:
    """What a title says below itself: what was measured, and how much of it was too noisy."""
    noisy = noise.count(drawn)[0]
    them = "1 figure was" if noisy == 1 else f"{noisy} figures were"
    left_out = f"; {them} too noisy to tell: {'faint' if keep else 'left out'}" if noisy else ""
    return f"{what}, median and spread of {fresh_sets(result['number of sets'])}{left_out}"


def error_bars(values: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Of (middle, low, high), as plotly wants them."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for middle, _, high in values],
        "arrayminus": [middle - low for middle, low, _ in values],
        "thickness": 1,
        "width": 3,
    }
