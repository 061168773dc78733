"""The common parts of the figures: panels and style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from ddp_lab.bench.measuring import noise

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["GREY", "Panels", "about", "faint", "points"]

GREY, _LINE = "#808080", "rgba(128, 128, 128, 0.3)"
_NOTHING = {
    "text": "All values were too noisy to show: the machine was busy.<br>keep=True draws them anyway.",
    "font": {"size": 16},
    "showarrow": False,
    **{"x": 0.5, "xref": "paper", "y": 0.5, "yref": "paper"},
}


class Panels:
    """Panels beside and below each other.

    Args:
        titles: of the panels, row by row; "": none.
        columns: how many are beside each other.
        each, around: height of a row, and what is added to all of them.
        gap: between two rows.
        across: between two columns, as a part of the width.

    Attributes:
        made: plotly's figure.
        height: of it.
    """

    def __init__(
        self, titles: Sequence[str], columns: int, *, each: int, around: int, gap: int = 100, across: float = 0.08
    ) -> None:
        from plotly.subplots import make_subplots

        rows = ceil(len(titles) / columns)
        self.height = rows * each + around
        self.made: go.Figure = make_subplots(
            rows=rows,
            cols=columns,
            subplot_titles=titles,
            horizontal_spacing=across,
            vertical_spacing=gap / self.height,
        )
        self._named: set[str] = set()

    def add(self, kind: str, name: str, at: tuple[int, int], **look: Any) -> None:
        """Draws a trace.

        Args:
            kind: plotly's: ``"scatter"``, ``"bar"``, ``"box"``.
            name: stands once in the legend, in however many panels it is.
            at: row and column of the panel, from 1.
            look: what plotly takes.
        """
        legend = {"name": name, "legendgroup": name, "showlegend": name not in self._named}
        self._named.add(name)
        getattr(self.made, f"add_{kind}")(**legend, **look, row=at[0], col=at[1])

    def dressed(self, title: str, below: str) -> go.Figure:
        """The figure with title, colours and axes; one without traces says that nothing could be told."""
        made = self.made
        made.update_layout(
            title={
                "text": f"{title}<br><sub>{below}</sub>",
                "font": {"size": 18},
                **{"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 26}},
            },
            height=self.height,
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
    them = "1 value was" if noisy == 1 else f"{noisy} values were"
    left_out = f"; {them} too noisy: {'faint' if keep else 'not shown'}" if noisy else ""
    return f"{what}, median and spread of {noise.fresh_sets(result['number of sets'])}{left_out}"


def faint(figures: Sequence[noise.Figure], opacity: float = 0.4) -> list[float]:
    """Opacities: what is too noisy, and kept all the same, is faint."""
    return [opacity if one["noisy"] else 1.0 for one in figures]


def points(figures: Sequence[noise.Figure], keep: bool, colour: str | None = GREY) -> dict[str, Any]:
    """Heights and error bars of figures, as plotly wants them; a gap where one is too noisy, unless it is kept."""
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [one["high"] - one["median"] for one in figures],
        "arrayminus": [one["median"] - one["low"] for one in figures],
        "thickness": 1,
        "width": 3,
        "color": colour,
    }
    return {"y": [None if one["noisy"] and not keep else one["median"] for one in figures], "error_y": bars}
