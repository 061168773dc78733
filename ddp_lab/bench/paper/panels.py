"""What the pictures of the paper's figures have in common: two rows of panels, marks and colours.

Measured points are full and solid, simulated ones hatched or dashed with open marks, published ones red stars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..telling import noise
from ..telling.drawing import GREY, about, dress, error_bars

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["COLOURS", "Panels", "of_model", "points"]

COLOURS = {"gloo": "#0072b2", "shm": "#e69f00", "nccl": "#009e73", "mpi": "#cc79a7"}
_STAR = {"symbol": "star", "size": 15, "color": "#c2188b", "line": {"color": "#fff", "width": 1}}
_HEIGHT = 340


class Panels:
    """A figure of panels: those of the first row are measured, those of the second simulated.

    Attributes:
        made: plotly's figure.
    """

    def __init__(self, measured: Sequence[str], simulated: Sequence[str] = ()) -> None:
        from plotly.subplots import make_subplots

        titles = [f"measured here: {name}" for name in measured]
        columns = max(len(measured), len(simulated))
        titles += [""] * (columns - len(measured)) + [f"simulated: {name}" for name in simulated]
        rows = 2 if simulated else 1
        self._height = rows * _HEIGHT + 200
        self.made: go.Figure = make_subplots(
            rows=rows,
            cols=columns,
            subplot_titles=titles,
            horizontal_spacing=0.08,
            vertical_spacing=130 / (self._height - 200),
        )
        self._named: set[str] = set()

    def named(self, name: str) -> dict[str, Any]:
        """The arguments of a trace that appears once in the legend, however many panels it is in."""
        first = name not in self._named
        self._named.add(name)
        return {"name": name, "legendgroup": name, "showlegend": first}

    def star(self, x: Any, y: float, point: Mapping[str, Any], *, row: int, col: int) -> None:
        """Marks what was published."""
        name = "published" + (" (approximate)" if point["approximate"] else "")
        values = " to ".join(f"{value:,.9g}" for value in point["values"])
        words = f"{point['model']}, {point['backend']}: {point['what']} {values} {point['unit']}<br>{point['source']}"
        look = {**_STAR, "symbol": "star-open" if point["approximate"] else "star"}
        look["line"] = {"color": _STAR["color"], "width": 2} if point["approximate"] else _STAR["line"]
        self.made.add_scatter(
            x=x,
            y=[y],
            mode="markers",
            marker=look,
            hovertext=words,
            hoverinfo="text",
            **self.named(name),
            row=row,
            col=col,
        )

    def dressed(self, found: Mapping[str, Any], keep: bool) -> go.Figure:
        """The figure with its title."""
        sets = found["number of sets"]
        link = f", links of {found['mbit']:g} Mbit/s, {found['delay_ms']:g} ms away" if found.get("mbit") else ""
        ranks = f"{found['ranks']} ranks{link}"
        below = about(found, ranks, found["rows"], keep)
        if found["figure"] == 11:
            below = f"{ranks}, median of {sets} seed{'' if sets == 1 else 's'}"
        elif "torch" not in found:  # not of fresh processes
            below = f"{ranks}, medians of one run"
        made = dress(self.made, f"Figure {found['figure']} of the DDP paper: {found['title']}", below, self._height)
        return made.update_layout(legend={"orientation": "h", "y": -0.22 if self._height < 600 else -0.12, "x": 0})


def of_model(found: Mapping[str, Any], which: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by their model, in order."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in found[which]:
        by.setdefault(row["model"], []).append(row)
    return by


def points(figures: Sequence[noise.Figure], keep: bool) -> dict[str, Any]:
    """Heights and error bars of measured figures; nothing where one is too noisy, unless it is kept."""
    values = [(one["median"], one["low"], one["high"]) for one in figures]
    heights = [None if one["noisy"] and not keep else one["median"] for one in figures]
    return {"y": heights, "error_y": {**error_bars(values), "color": GREY}}
