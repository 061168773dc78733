"""Results of `ddp-lab bench all-reduce` and `bench step` as plotly figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..views.paint.palette import PHASES, RANK_COLOURS
from .measuring import noise
from .measuring.collectives import LIMITS, SHARED, sides_of
from .measuring.drawing import Panels, about, faint, points

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["collectives", "steps"]

_LIMIT_COLOURS = dict(zip(LIMITS, ("#808080", "#b58a5a"), strict=True))
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "diamond", "square", "cross", "x")
_PATTERNS = ("", "/", "x", ".", "+")
_ACROSS = 4  # models beside each other
_LOG = {"type": "log", "dtick": 1, "exponentformat": "none", "separatethousands": True}


def _size(count: float) -> str:
    """Bytes as a label."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def collectives(found: dict[str, Any], keep: bool = False) -> go.Figure:
    """Time and bandwidth against the size, or bars of all operations where there is but one size.

    Args:
        found: what `all_reduce.measure` returned.
        keep: also draw values that are too noisy, but faint.
    """
    sizes = sorted({row["bytes"] for row in found["rows"]} - {0})
    below = about(found, found["dtype"], [row["sides"] for row in found["rows"]], keep)
    if len(sizes) > 1:
        return _against_size(found, sizes, keep).dressed("Collectives on this machine", below)
    of_size = f" of {_size(sizes[0])}" if sizes else ""
    return _by_operation(found, keep).dressed(f"Collectives{of_size} on this machine", below)


class _Line:
    """A side of an operation on some ranks: its name, its look, and a figure for each size."""

    def __init__(self, found: dict[str, Any], operation: str, ranks: int, side: str) -> None:
        rows = [row for row in found["rows"] if (row["operation"], row["ranks"]) == (operation, ranks)]
        named = [name + what for what in ("", SHARED) for name in found["backends"]]
        self.limit = side in LIMITS
        self.name = f"{side}, {ranks} ranks" + (" at once" * self.limit)
        self.colour = _LIMIT_COLOURS.get(side) or RANK_COLOURS[named.index(side) % len(RANK_COLOURS)]
        self.world = list(dict.fromkeys(row["ranks"] for row in found["rows"])).index(ranks)
        self.dash = _DASHES[self.world % len(_DASHES)]
        rows = sorted((row for row in rows if side in row["sides"]), key=lambda row: row["bytes"])
        self.sizes: list[int] = [row["bytes"] for row in rows]
        self.figures: list[noise.Figure] = [row["sides"][side] for row in rows]


def _lines(found: dict[str, Any], operation: str, keep: bool) -> list[_Line]:
    """Those of one operation of which any point is drawn."""
    worlds = dict.fromkeys(row["ranks"] for row in found["rows"])
    lines = [_Line(found, operation, ranks, side) for ranks in worlds for side in sides_of(found)]
    return [line for line in lines if any(keep or not one["noisy"] for one in line.figures)]


def _against_size(found: dict[str, Any], sizes: Sequence[int], keep: bool) -> Panels:
    operations = list(dict.fromkeys(row["operation"] for row in found["rows"] if row["bytes"]))
    titles = [title for name in operations for title in (f"{name}: time", f"{name}: bandwidth")]
    panels = Panels(titles, 2, each=400, around=170, across=0.09)
    for number, operation in enumerate(operations, 1):
        for line in _lines(found, operation, keep):
            look = {
                "x": line.sizes,
                "mode": "lines" if line.limit and len(line.sizes) > 1 else "lines+markers",
                "line": {"color": line.colour, "width": 1.5 if line.limit else 2.5, "dash": line.dash},
                "marker": {
                    "size": 8,
                    "symbol": _SYMBOLS[line.world % len(_SYMBOLS)],
                    "opacity": faint(line.figures),
                },
                "customdata": [
                    [_size(size), " (too noisy)" if one["noisy"] else ""]
                    for size, one in zip(line.sizes, line.figures, strict=True)
                ],
            }
            rates = [_rate(size, one) for size, one in zip(line.sizes, line.figures, strict=True)]
            for col, unit, figures in ((1, "µs", line.figures), (2, "GiB/s", rates)):
                told = f"%{{customdata[0]}}: %{{y:.4~g}} {unit}%{{customdata[1]}}<extra>%{{fullData.name}}</extra>"
                heights = points(figures, keep, colour=None)
                panels.add("scatter", line.name, (number, col), **look, **heights, hovertemplate=told)
    labels = {"tickvals": sizes, "ticktext": [_size(size) for size in sizes], "tickangle": 0}
    panels.made.update_xaxes(type="log", title="size of the largest buffer of a rank", **labels)
    panels.made.update_yaxes(**_LOG, title="µs, slowest rank")
    panels.made.update_yaxes(title="GiB/s", exponentformat="power", tickfont={"size": 11}, col=2)
    return panels


def _rate(size: int, one: noise.Figure) -> noise.Figure:
    """GiB a second of so many bytes, from microseconds."""
    of = {"median": "median", "low": "high", "high": "low"}
    return one | {end: 1e6 / 2**30 * size / one[other] for end, other in of.items()}


def _by_operation(found: dict[str, Any], keep: bool) -> Panels:
    operations = list(dict.fromkeys(row["operation"] for row in found["rows"]))
    bars: dict[str, dict[str, _Line]] = {}
    for operation in operations:
        for line in _lines(found, operation, keep):
            if keep or not line.figures[0]["noisy"]:
                bars.setdefault(line.name, {})[operation] = line
    panels = Panels([""], 1, each=560, around=0)
    for name, lines in sorted(bars.items(), key=lambda one: next(iter(one[1].values())).limit):
        line, figures = next(iter(lines.values())), [one.figures[0] for one in lines.values()]
        what = {"x": list(lines), "hovertemplate": "%{x}: %{y:.4~g} µs<extra>%{fullData.name}</extra>"}
        heights = points(figures, keep)
        if line.limit:
            look = {"mode": "lines+markers", "line": {"color": line.colour, "width": 1.5, "dash": line.dash}}
            panels.add("scatter", name, (1, 1), **what, y=heights["y"], **look)
        else:
            pattern = {"shape": _PATTERNS[line.world % len(_PATTERNS)]}
            marker = {"color": line.colour, "opacity": faint(figures), "pattern": pattern}
            panels.add("bar", name, (1, 1), **what, **heights, marker=marker)
    panels.made.update_layout(barmode="group")
    panels.made.update_xaxes(categoryorder="array", categoryarray=operations, tickangle=-30)
    panels.made.update_yaxes(**_LOG, title="µs, slowest rank")
    return panels


def steps(summary: dict[str, Any], keep: bool = False) -> go.Figure:
    """Bars of the no-communication baseline and exposed communication, for each model, backend and class.

    Args:
        summary: what `step.measure` returned.
        keep: also draw values that are too noisy, but faint.
    """
    models: dict[str, list[dict[str, Any]]] = {}
    for cell in summary["cells"]:
        mode = "" if cell["mode"] == "plain" else f", {cell['mode']}"
        models.setdefault(cell["workload"] + mode, []).append(cell)
    panels = Panels(list(models), min(_ACROSS, len(models)), each=380, around=150, across=0.06)
    for number, cells in enumerate(models.values()):
        _bars(panels, cells, keep, (number // _ACROSS + 1, number % _ACROSS + 1))
    panels.made.update_layout(barmode="relative", bargap=0.3)
    panels.made.update_yaxes(rangemode="tozero")
    panels.made.update_yaxes(title="ms per step", col=1)
    what = f"{summary['ranks']} ranks with {summary['threads']} thread each"
    below = about(summary, what, [cell["classes"] for cell in summary["cells"]], keep)
    return panels.dressed("A training step: computation and exposed communication", below)


def _bars(panels: Panels, cells: Sequence[dict[str, Any]], keep: bool, at: tuple[int, int]) -> None:
    sides = [(cell["backend"], who, cell["classes"][who]) for cell in cells for who in ("torch", "ours")]
    noisy = [any(one["noisy"] for one in found.values()) for _, _, found in sides]
    chosen = [one for one, out in zip(sides, noisy, strict=True) if keep or not out]
    if not chosen:
        return
    opacity = [0.4 if out else 1.0 for out in noisy if keep or not out]
    phases = (("floor", "forward", "no_sync (baseline)"), ("exposed", "exposed", "exposed communication"))
    for what, phase, name in phases:
        heights = points([found[what] for _, _, found in chosen], keep=True)
        panels.add(
            "bar",
            name,
            at,
            x=[[backend for backend, _, _ in chosen], [who for _, who, _ in chosen]],
            y=heights["y"],
            marker={"color": PHASES[phase][0], "opacity": opacity},
            error_y=heights["error_y"] if what == "exposed" else None,
            text=[f"{middle:.3g}" for middle in heights["y"]],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{x}}: %{{y:.4~g}} ms {name}<extra></extra>",
        )
