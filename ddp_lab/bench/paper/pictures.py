"""The paper's figures as plotly figures: measured, simulated and published values, each marked as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..telling import noise
from ..telling.drawing import GREY
from . import bars
from .panels import COLOURS, Panels, of_model, points

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["picture"]

_OF_EVERY = {1: "#0072b2", 2: "#009e73", 4: "#e69f00", 8: "#cc79a7"}
_DASHES = {"nccl": "dash", "gloo": "dot"}
_OF_MODEL = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
_SMOOTH = 0.1  # of a training: losses are averaged over so much of it


def picture(found: Mapping[str, Any], keep: bool) -> go.Figure:
    """Draws a result of `figures.result`.

    Args:
        found: it.
        keep: draw what is too noisy, too, but faint.
    """
    draw = {
        2: _communication,
        6: bars.breakdown,
        7: bars.buckets,
        8: bars.buckets,
        9: _scaling,
        10: _skipping,
        11: _convergence,
        12: bars.round_robin,
    }[found["figure"]]
    return draw(found, keep).dressed(found, keep)


def _communication(found: Mapping[str, Any], keep: bool) -> Panels:
    total = found["settings"]["parameters"]
    panels = Panels(
        [f"all-reduce of {total:,} parameters", "when parameters are ready"],
        ["60,000,000 on 32 GPUs of the paper's cluster", "when parameters are ready there"],
    )
    for row_number, which in enumerate(("rows", "simulated"), 1):
        by: dict[str, list[dict[str, Any]]] = {}
        for row in found[which]:
            if "size" in row:
                by.setdefault(row["backend"], []).append(row)
        for backend, rows in by.items():
            measured, seconds = which == "rows", [row["seconds"] for row in rows]
            look = _measured(backend, seconds, keep) if measured else {"y": seconds, **_line(COLOURS[backend])}
            panels.made.add_scatter(
                x=[row["size"] for row in rows],
                **look,
                hovertemplate="%{x:,} in a call: %{y:.3~g} s<extra>" + backend + "</extra>",
                **panels.named(f"{backend}, {'measured' if measured else 'simulated'}"),
                row=row_number,
                col=1,
            )
    for point in found["published"]:  # about sizes: they stand on the simulated line, whatever its height
        line = [row for row in found["simulated"] if row.get("backend") == point["backend"]]
        logs = np.log([[row["size"], row["seconds"]] for row in line])
        height = np.exp(np.interp(np.log(point["values"][0]), logs[:, 0], logs[:, 1]))
        panels.star([point["values"][0]], float(height), point, row=2, col=1)
    _ready(panels, found)
    panels.made.update_xaxes(type="log", dtick=1, exponentformat="SI", title="parameters of a call", col=1)
    panels.made.update_yaxes(type="log", dtick=1, exponentformat="none", title="seconds for all", col=1)
    panels.made.update_xaxes(title="ms since the forward or backward began", col=2)
    panels.made.update_yaxes(title="% of the parameters", col=2)
    return panels


def _ready(panels: Panels, found: Mapping[str, Any]) -> None:
    for number, row in enumerate(row for row in found["rows"] if "backward" in row):
        for which, counts, dash in (("backward", "parameters", "solid"), ("forward", "used", "dot")):
            _curve(panels, row, which, counts, {"color": _OF_MODEL[number], "dash": dash, "width": 2.5}, 1)
    for number, row in enumerate(row for row in found["simulated"] if "ready" in row):
        _curve(panels, row, "ready", "parameters", {"color": _OF_MODEL[number + 2], "dash": "dash", "width": 2.5}, 2)


def _curve(panels: Panels, row: Mapping[str, Any], which: str, counts: str, line: Any, at: int) -> None:
    share = [100 * count / row["parameters"][-1] for count in row[counts]]
    panels.made.add_scatter(
        x=row[which],
        y=share,
        mode="lines",
        line={"shape": "hv", **line},
        hovertemplate="%{y:.0f} % after %{x:.1f} ms<extra>%{fullData.name}</extra>",
        **panels.named(f"{row['model']}, {'backward' if which == 'ready' else which}"),
        row=at,
        col=2,
    )


def _line(colour: str, dash: str = "dash") -> dict[str, Any]:
    """How a simulated line looks."""
    line = {"color": colour, "width": 2.5, "dash": dash}
    return {"mode": "lines+markers", "line": line, "marker": {"size": 8, "symbol": "circle-open"}}


def _measured(backend: str, figures: Sequence[noise.Figure], keep: bool) -> dict[str, Any]:
    """How a measured line looks, and its heights."""
    faint = [0.3 if one["noisy"] else 1.0 for one in figures]
    marker = {"size": 8, "symbol": "circle", "opacity": faint}
    line = {"color": COLOURS.get(backend, GREY), "width": 2.5}
    return {"mode": "lines+markers", "line": line, "marker": marker, **points(figures, keep)}


def _measured_lines(
    panels: Panels, measured: Mapping[str, Sequence[Mapping[str, Any]]], x: str, y: str, told: str, keep: bool
) -> None:
    """A line for each backend, in a panel for each model; when pointed at, a ratio tells its ms, ms what is saved."""
    for number, rows in enumerate(measured.values(), 1):
        for backend in dict.fromkeys(row["backend"] for row in rows):
            chosen = [row for row in rows if row["backend"] == backend]
            beside = [row["ms"]["median"] if y == "ratio" else 100 * (1 - row["ratio"]["median"]) for row in chosen]
            panels.made.add_scatter(
                x=[row[x] for row in chosen],
                **_measured(backend, [row[y] for row in chosen], keep),
                customdata=beside,
                hovertemplate=told + "<extra>" + backend + "</extra>",
                **panels.named(f"{backend}, measured"),
                row=1,
                col=number,
            )


def _scaling(found: Mapping[str, Any], keep: bool) -> Panels:
    measured, simulated = of_model(found, "rows"), of_model(found, "simulated")
    panels = Panels(list(measured), [f"{name}, the paper's cluster" for name in simulated])
    _measured_lines(
        panels, measured, "world", "ratio", "%{x} ranks: %{y:.2f} of one rank's, %{customdata:.1f} ms", keep
    )
    for number, (model, rows) in enumerate(simulated.items(), 1):
        for backend in dict.fromkeys(row["backend"] for row in rows):
            chosen = [row for row in rows if row["backend"] == backend]
            panels.made.add_scatter(
                x=[row["ranks"] for row in chosen],
                y=[row["ratio"] for row in chosen],
                **_line(COLOURS[backend]),
                hovertemplate="%{x} GPUs: %{y:.2f} of one GPU's<extra>" + backend + "</extra>",
                **panels.named(f"{backend}, simulated"),
                row=2,
                col=number,
            )
        for point in found["published"]:
            if point["model"] == model:
                panels.star([256], point["values"][0], point, row=2, col=number)
    worlds = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    panels.made.update_xaxes(type="log", tickvals=worlds, ticktext=[str(world) for world in worlds], title="ranks")
    panels.made.update_yaxes(title="step, x that of one rank", rangemode="tozero")
    return panels


def _skipping(found: Mapping[str, Any], keep: bool) -> Panels:
    measured, simulated = of_model(found, "rows"), of_model(found, "simulated")
    panels = Panels(list(measured), [f"{name}, the paper's cluster" for name in simulated])
    _measured_lines(panels, measured, "every", "ms", "every %{x}: %{y:.1f} ms, %{customdata:.0f} % saved", keep)
    for number, (model, rows) in enumerate(simulated.items(), 1):
        for backend in dict.fromkeys(row["backend"] for row in rows):
            for every, colour in _OF_EVERY.items():
                chosen = [row for row in rows if (row["backend"], row["every"]) == (backend, every)]
                panels.made.add_scatter(
                    x=[row["ranks"] for row in chosen],
                    y=[row["percent"] for row in chosen],
                    **_line(colour, _DASHES[backend]),
                    hovertemplate="%{x} GPUs: %{y:.0f} %<extra>%{fullData.name}</extra>",
                    **panels.named(f"{backend}, every {every}"),
                    row=2,
                    col=number,
                )
        for point in found["published"]:
            if point["model"] == model:
                panels.star([256], 100 - point["values"][0], point, row=2, col=number)
    panels.made.update_xaxes(
        type="log", tickvals=[1, 2, 4, 8], ticktext=list("1248"), title="averaged every n-th", row=1
    )
    worlds = [16, 32, 64, 128, 256]
    panels.made.update_xaxes(
        type="log", tickvals=worlds, ticktext=[str(world) for world in worlds], title="GPUs", row=2
    )
    panels.made.update_yaxes(rangemode="tozero", title="ms a backward", row=1)
    panels.made.update_yaxes(title="% of averaging each", rangemode="tozero", row=2)
    return panels


def _convergence(found: Mapping[str, Any], keep: bool) -> Panels:
    cases = list(dict.fromkeys((row["data"], row["batch"], row["lr"]) for row in found["rows"]))
    panels = Panels([f"{data}, batch {batch}, lr {lr:g}" for data, batch, lr in cases])
    for number, case in enumerate(cases, 1):
        for row in (row for row in found["rows"] if (row["data"], row["batch"], row["lr"]) == case):
            wide = max(1, int(_SMOOTH * len(row["losses"])))
            smooth = np.convolve(row["losses"], np.ones(wide) / wide, "valid")
            panels.made.add_scatter(
                x=np.arange(len(smooth)) + wide,
                y=smooth,
                mode="lines",
                line={"color": _OF_EVERY[row["every"]], "width": 2.5},
                hovertemplate="backward %{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
                **panels.named(f"averaged every {row['every']}"),
                row=1,
                col=number,
            )
    panels.made.update_xaxes(title="backwards").update_yaxes(title="training loss", col=1)
    return panels
