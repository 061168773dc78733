"""Results of `ddp-lab bench all-reduce` and `bench step` as plotly figures, and those as pages that need no network."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from ...views.paint.palette import PHASES, RANK_COLOURS
from ..measuring.operations import LIMITS, SHARED, sides_of
from . import noise
from .drawing import GREY, about, dress, error_bars, write

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["collectives", "steps", "write"]

_LIMIT_COLOURS = dict(zip(LIMITS, ("#808080", "#b58a5a"), strict=True))
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "diamond", "square", "cross", "x")
_PATTERNS = ("", "/", "x", ".", "+")
_ACROSS = 4  # models beside each other
_Points = Sequence[tuple[int, noise.Figure]]  # bytes and microseconds


def _size(count: float) -> str:
    """Bytes as a label."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def collectives(found: dict[str, Any], *, keep: bool = False) -> go.Figure:
    """Time and bandwidth against the size, or bars of all operations where there is but one size.

    Args:
        found: what `all_reduce.measure` returned.
        keep: draw figures that are too noisy, too, but faint.
    """
    several = len({row["bytes"] for row in found["rows"]} - {0}) > 1
    return _against_size(found, keep) if several else _by_operation(found, keep)


def _lines(found: dict[str, Any], operation: str, keep: bool) -> list[tuple[str, int, list[tuple[int, noise.Figure]]]]:
    """Of one operation: side, number of ranks, and points; none of which all points are left out."""
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in found["rows"]):
        rows = [row for row in found["rows"] if (row["operation"], row["ranks"]) == (operation, ranks)]
        for side in sides_of(found):
            points = [(row["bytes"], row["sides"][side]) for row in rows if side in row["sides"]]
            if any(keep or not one["noisy"] for _, one in points):
                lines.append((side, ranks, sorted(points, key=lambda point: point[0])))
    return lines


def _drawn(found: dict[str, Any]) -> list[dict[str, noise.Figure]]:
    return [row["sides"] for row in found["rows"]]


def _named(side: str, ranks: int) -> str:
    return f"{side}, {ranks} ranks" + (" at once" if side in LIMITS else "")


def _colour(side: str, backends: Sequence[str]) -> str:
    names = [name + what for what in ("", SHARED) for name in backends]
    return _LIMIT_COLOURS.get(side) or RANK_COLOURS[names.index(side) % len(RANK_COLOURS)]


def _against_size(found: dict[str, Any], keep: bool) -> go.Figure:
    from plotly.subplots import make_subplots

    operations = list(dict.fromkeys(row["operation"] for row in found["rows"] if row["bytes"]))
    titles = [title for name in operations for title in (f"{name}: time", f"{name}: bandwidth")]
    height = 400 * len(operations) + 170
    made = make_subplots(
        rows=len(operations), cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=100 / height
    )
    worlds = list(dict.fromkeys(row["ranks"] for row in found["rows"]))
    named: set[str] = set()
    for number, operation in enumerate(operations, 1):
        for side, ranks, points in _lines(found, operation, keep):
            name, world = _named(side, ranks), worlds.index(ranks)
            colour, limit = _colour(side, found["backends"]), side in LIMITS
            look = {
                "name": name,
                "legendgroup": name,
                "mode": "lines" if limit and len(points) > 1 else "lines+markers",
                "line": {"color": colour, "width": 1.5 if limit else 2.5, "dash": _DASHES[world % len(_DASHES)]},
                "marker": {
                    "size": 8,
                    "symbol": _SYMBOLS[world % len(_SYMBOLS)],
                    "opacity": [0.4 if one["noisy"] else 1.0 for _, one in points],
                },
            }
            made.add_scatter(**look, **_times(points, keep), showlegend=name not in named, row=number, col=1)
            made.add_scatter(**look, **_rates(points, keep), showlegend=False, row=number, col=2)
            named.add(name)
    sizes = sorted({row["bytes"] for row in found["rows"]} - {0})
    labels = {"tickvals": sizes, "ticktext": [_size(size) for size in sizes], "tickangle": 0}
    made.update_xaxes(type="log", title="size of the largest buffer of a rank", **labels)
    made.update_yaxes(type="log", dtick=1, exponentformat="none", separatethousands=True)
    made.update_yaxes(title="µs, slowest rank", col=1)
    made.update_yaxes(title="GiB/s", exponentformat="power", tickfont={"size": 11}, col=2)
    return dress(made, "Collectives on this machine", about(found, found["dtype"], _drawn(found), keep), height)


def _times(points: _Points, keep: bool) -> dict[str, Any]:
    return _curve(points, [(one["median"], one["low"], one["high"]) for _, one in points], "µs", keep)


def _rates(points: _Points, keep: bool) -> dict[str, Any]:
    factor = 1e6 / 2**30  # from bytes in a microsecond
    rates = [
        (factor * size / one["median"], factor * size / one["high"], factor * size / one["low"]) for size, one in points
    ]
    return _curve(points, rates, "GiB/s", keep)


def _curve(points: _Points, values: Sequence[tuple[float, float, float]], unit: str, keep: bool) -> dict[str, Any]:
    """Middle, low and high of each point as what plotly draws; a gap where it is left out."""
    return {
        "x": [size for size, _ in points],
        "y": [
            None if one["noisy"] and not keep else middle
            for (_, one), (middle, _, _) in zip(points, values, strict=True)
        ],
        "error_y": error_bars(values),
        "customdata": [[_size(size), " (too noisy)" if one["noisy"] else ""] for size, one in points],
        "hovertemplate": f"%{{customdata[0]}}: %{{y:.4~g}} {unit}%{{customdata[1]}}<extra>%{{fullData.name}}</extra>",
    }


def _by_operation(found: dict[str, Any], keep: bool) -> go.Figure:
    import plotly.graph_objects as go

    made = go.Figure()
    operations = list(dict.fromkeys(row["operation"] for row in found["rows"]))
    worlds = list(dict.fromkeys(row["ranks"] for row in found["rows"]))
    bars: dict[tuple[str, int], dict[str, noise.Figure]] = {}
    for operation in operations:
        for side, ranks, points in _lines(found, operation, keep):
            if keep or not points[0][1]["noisy"]:
                bars.setdefault((side, ranks), {})[operation] = points[0][1]
    for (side, ranks), of_operations in sorted(bars.items(), key=lambda one: one[0][0] in LIMITS):
        values = [(one["median"], one["low"], one["high"]) for one in of_operations.values()]
        what = {
            "name": _named(side, ranks),
            "x": list(of_operations),
            "y": [middle for middle, _, _ in values],
            "hovertemplate": "%{x}: %{y:.4~g} µs<extra>%{fullData.name}</extra>",
        }
        colour, world = _colour(side, found["backends"]), worlds.index(ranks)
        if side in LIMITS:
            dash = _DASHES[world % len(_DASHES)]
            made.add_scatter(**what, mode="lines+markers", line={"color": colour, "width": 1.5, "dash": dash})
        else:
            faint = [0.4 if one["noisy"] else 1.0 for one in of_operations.values()]
            marker = {"color": colour, "opacity": faint, "pattern": {"shape": _PATTERNS[world % len(_PATTERNS)]}}
            made.add_bar(**what, marker=marker, error_y={**error_bars(values), "color": GREY})
    sizes = sorted({row["bytes"] for row in found["rows"]} - {0})
    made.update_layout(barmode="group")
    made.update_xaxes(categoryorder="array", categoryarray=operations, tickangle=-30)
    made.update_yaxes(type="log", dtick=1, exponentformat="none", separatethousands=True, title="µs, slowest rank")
    of_size = f" of {_size(sizes[0])}" if sizes else ""
    return dress(made, f"Collectives{of_size} on this machine", about(found, found["dtype"], _drawn(found), keep), 560)


def steps(summary: dict[str, Any], *, keep: bool = False) -> go.Figure:
    """Bars of floor and exposed communication, for each model, backend and class.

    Args:
        summary: what `step.measure` returned.
        keep: draw figures that are too noisy, too, but faint.
    """
    from plotly.subplots import make_subplots

    models: dict[str, list[dict[str, Any]]] = {}
    for cell in summary["cells"]:
        plain = cell["mode"] == "plain"
        models.setdefault(cell["workload"] + ("" if plain else f", {cell['mode']}"), []).append(cell)
    across, down = min(_ACROSS, len(models)), ceil(len(models) / _ACROSS)
    height = 380 * down + 150
    made = make_subplots(
        rows=down, cols=across, subplot_titles=list(models), horizontal_spacing=0.06, vertical_spacing=100 / height
    )
    for number, cells in enumerate(models.values()):
        _bars(made, cells, keep, row=number // _ACROSS + 1, col=number % _ACROSS + 1)
    made.update_layout(barmode="relative", bargap=0.3)
    made.update_yaxes(rangemode="tozero")
    made.update_yaxes(title="ms a step", col=1)
    what = f"{summary['ranks']} ranks with {summary['threads']} thread each"
    below = about(summary, what, [cell["classes"] for cell in summary["cells"]], keep)
    return dress(made, "A training step: computing, and waiting for gradients", below, height)


def _bars(made: go.Figure, cells: Sequence[dict[str, Any]], keep: bool, **place: int) -> None:
    chosen = [
        (cell["backend"], who, cell["classes"][who])
        for cell in cells
        for who in ("torch", "ours")
        if keep or not any(cell["classes"][who][what]["noisy"] for what in ("step", "floor", "exposed"))
    ]
    if not chosen:
        return
    first = not made.data
    names = [[backend for backend, _, _ in chosen], [who for _, who, _ in chosen]]
    faint = [0.4 if any(one["noisy"] for one in found.values()) else 1.0 for _, _, found in chosen]
    for what, phase, name in (("floor", "forward", "no_sync (floor)"), ("exposed", "exposed", "exposed communication")):
        figures = [found[what] for _, _, found in chosen]
        values = [(one["median"], one["low"], one["high"]) for one in figures]
        made.add_bar(
            name=name,
            legendgroup=name,
            showlegend=first,
            x=names,
            y=[middle for middle, _, _ in values],
            marker={"color": PHASES[phase][0], "opacity": faint},
            error_y={**error_bars(values), "color": GREY} if what == "exposed" else None,
            text=[f"{middle:.3g}" for middle, _, _ in values],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{x}}: %{{y:.4~g}} ms {name}<extra></extra>",
            **place,
        )
