"""The paper's figures as plotly figures: two rows of panels, measured values above simulated ones.

Measured points are full and solid, simulated ones hatched or dashed with open marks, published ones red stars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_lab.dashboard.paint.palette import PHASES

from .drawing import GREY, Panels, about, faint, points
from .rows import link, over, values
from .settings import PARTS

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["picture"]

_COLOURS = {"gloo": "#0072b2", "shm": "#e69f00", "nccl": "#009e73", "mpi": "#cc79a7"}
_PART_COLOURS = dict(zip(PARTS, (PHASES[phase][0] for phase in ("forward", "alone", "exposed", "other")), strict=True))
_OF_EVERY = {1: "#0072b2", 2: "#009e73", 4: "#e69f00", 8: "#cc79a7"}
_DASHES = {"nccl": "dash", "gloo": "dot"}
_OF_MODEL = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
_STAR = "#c2188b"
_SMOOTH = 0.1  # of a training: losses are averaged over so much of it

_Found = Mapping[str, Any]
_Rows = Sequence[Mapping[str, Any]]
_At = tuple[int, int]  # row and column of a panel
_Draw = Callable[[Panels, _Rows, _At], None]


def picture(found: _Found, keep: bool) -> go.Figure:
    """Draws a result of `figures.result`.

    Args:
        found: it.
        keep: also draw values that are too noisy, but faint.
    """
    draw = {
        2: _communication,
        6: _breakdown,
        7: _buckets,
        8: _buckets,
        9: _scaling,
        10: _skipping,
        11: _convergence,
        12: _round_robin,
    }
    panels = draw[found["figure"]](found, keep)
    ranks = f"{found['ranks']} ranks{link(found)}"
    fresh = "torch" in found and found["figure"] != 11
    below = about(found, ranks, found["rows"], keep) if fresh else f"{ranks}, medians {over(found)}"
    made = panels.dressed(f"Figure {found['figure']} of the DDP paper: {found['title']}", below)
    return made.update_layout(legend={"orientation": "h", "y": -0.22 if panels.height < 600 else -0.12, "x": 0})


def _panels(measured: Sequence[str], simulated: Sequence[str] = ()) -> Panels:
    columns = max(len(measured), len(simulated))
    titles = [f"measured here: {name}" for name in measured]
    titles += [""] * (columns - len(measured)) + [f"simulated: {name}" for name in simulated]
    return Panels(titles, columns, each=340, around=200, gap=170)


def _by(rows: _Rows, name: str) -> dict[Any, list[Mapping[str, Any]]]:
    """Rows by one of their fields, in order."""
    by: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault(row[name], []).append(row)
    return by


def _of_models(
    found: _Found,
    measured: _Draw,
    simulated: _Draw,
    published: Callable[[Panels, Mapping[str, Any], _Rows, _At], None],
    *,
    where: str = "the paper's cluster",
    rows: str = "rows",
) -> Panels:
    """A panel for each model: measured above, simulated below, with what was published of it."""
    here, there = _by(found[rows], "model"), _by(found["simulated"], "model")
    panels = _panels(list(here), [f"{name}, {where}" for name in there])
    for column, of_model in enumerate(here.values(), 1):
        measured(panels, of_model, (1, column))
    for column, (model, of_model) in enumerate(there.items(), 1):
        simulated(panels, of_model, (2, column))
        for point in found["published"]:
            if point["model"] == model:
                published(panels, point, of_model, (2, column))
    return panels


def _star(panels: Panels, x: Any, y: float, point: Mapping[str, Any], at: _At) -> None:
    """Marks what was published."""
    words = (
        f"{point['model']}, {point['backend']}: {point['what']} {values(point)} {point['unit']}<br>{point['source']}"
    )
    open_ = point["approximate"]
    look = {
        "symbol": "star-open" if open_ else "star",
        "size": 15,
        "color": _STAR,
        "line": {"color": _STAR, "width": 2} if open_ else {"color": "#fff", "width": 1},
    }
    name = "published" + (" (approximate)" if open_ else "")
    panels.add("scatter", name, at, x=x, y=[y], mode="markers", marker=look, hovertext=words, hoverinfo="text")


def _line(colour: str, dash: str = "dash") -> dict[str, Any]:
    """How a simulated line looks."""
    line = {"color": colour, "width": 2.5, "dash": dash}
    return {"mode": "lines+markers", "line": line, "marker": {"size": 8, "symbol": "circle-open"}}


def _measured(backend: str, figures: Sequence[Any], keep: bool) -> dict[str, Any]:
    """How a measured line looks, and its heights."""
    marker = {"size": 8, "symbol": "circle", "opacity": faint(figures, 0.3)}
    line = {"color": _COLOURS.get(backend, GREY), "width": 2.5}
    return {"mode": "lines+markers", "line": line, "marker": marker, **points(figures, keep)}


def _communication(found: _Found, keep: bool) -> Panels:
    total = found["settings"]["parameters"]
    panels = _panels(
        [f"all-reduce of {total:,} parameters", "when parameters are ready"],
        ["60,000,000 on 32 GPUs of the paper's cluster", "when parameters are ready there"],
    )
    for number, which in enumerate(("rows", "simulated"), 1):
        for backend, rows in _by([row for row in found[which] if "size" in row], "backend").items():
            measured, seconds = which == "rows", [row["seconds"] for row in rows]
            look = _measured(backend, seconds, keep) if measured else {"y": seconds, **_line(_COLOURS[backend])}
            told = "%{x:,} in a call: %{y:.3~g} s<extra>" + backend + "</extra>"
            name = f"{backend}, {'measured' if measured else 'simulated'}"
            panels.add("scatter", name, (number, 1), x=[row["size"] for row in rows], **look, hovertemplate=told)
    for point in found["published"]:  # about sizes: they stand on the simulated line, whatever its height
        line = [row for row in found["simulated"] if row.get("backend") == point["backend"]]
        logs = np.log([[row["size"], row["seconds"]] for row in line])
        height = np.exp(np.interp(np.log(point["values"][0]), logs[:, 0], logs[:, 1]))
        _star(panels, [point["values"][0]], float(height), point, (2, 1))
    for number, row in enumerate(row for row in found["rows"] if "backward" in row):
        _curve(panels, row, "backward", "parameters", {"color": _OF_MODEL[number], "dash": "solid"}, 1)
        _curve(panels, row, "forward", "used", {"color": _OF_MODEL[number], "dash": "dot"}, 1)
    for number, row in enumerate(row for row in found["simulated"] if "ready" in row):
        _curve(panels, row, "ready", "parameters", {"color": _OF_MODEL[number + 2], "dash": "dash"}, 2)
    panels.made.update_xaxes(type="log", dtick=1, exponentformat="SI", title="parameters of a call", col=1)
    panels.made.update_yaxes(type="log", dtick=1, exponentformat="none", title="seconds for all", col=1)
    panels.made.update_xaxes(title="ms since the forward or backward began", col=2)
    panels.made.update_yaxes(title="% of the parameters", col=2)
    return panels


def _curve(panels: Panels, row: Mapping[str, Any], which: str, counts: str, line: Any, at: int) -> None:
    """Which part of the parameters was used, or ready, when."""
    panels.add(
        "scatter",
        f"{row['model']}, {'backward' if which == 'ready' else which}",
        (at, 2),
        x=row[which],
        y=[100 * count / row["parameters"][-1] for count in row[counts]],
        mode="lines",
        line={"shape": "hv", "width": 2.5, **line},
        hovertemplate="%{y:.0f} % after %{x:.1f} ms<extra>%{fullData.name}</extra>",
    )


def _breakdown(found: _Found, keep: bool) -> Panels:
    """Stacked parts of a step, without and with overlap."""

    def stacked(panels: Panels, rows: _Rows, at: _At, simulated: bool) -> None:
        for part in PARTS:
            panels.add(
                "bar",
                ("exposed communication" if part == "communication" else part) + " (simulated)" * simulated,
                at,
                x=[[row["backend"] for row in rows], ["yes" if row["overlap"] else "no" for row in rows]],
                y=[row["parts"][part] for row in rows],
                marker={
                    "color": _PART_COLOURS[part],
                    "pattern": {"shape": "/" * simulated},
                    "opacity": [0.4 if row.get("gain", {}).get("noisy") else 1.0 for row in rows],
                },
                hovertemplate=f"%{{x}}: {part} %{{y:.3~g}} {'%' if simulated else 'ms'}<extra></extra>",
            )

    panels = _of_models(
        found,
        lambda panels, rows, at: stacked(panels, [row for row in rows if keep or not row["gain"]["noisy"]], at, False),
        lambda panels, rows, at: stacked(panels, rows, at, True),
        lambda panels, point, _, at: _star(panels, [[point["backend"]], ["yes"]], 100 - point["values"][0], point, at),
        where="32 GPUs of the paper's cluster",
        rows="breakdown",
    )
    panels.made.update_layout(barmode="stack", bargap=0.3)
    panels.made.update_yaxes(rangemode="tozero").update_xaxes(title="backend, and overlap or not", showgrid=False)
    panels.made.update_yaxes(title="ms per step", row=1, col=1)
    panels.made.update_yaxes(title="% of the step without overlap", row=2, col=1)
    return panels


def _buckets(found: _Found, keep: bool) -> Panels:
    """Steps as boxes with their outliers, against the size of the buckets."""

    def boxes(panels: Panels, rows: _Rows, at: _At, simulated: bool) -> None:
        for backend, of_backend in _by(rows, "backend").items():
            panels.add(
                "box",
                f"{backend}, {'simulated' if simulated else 'measured'}",
                at,
                x=[_cap(row) for row in of_backend for _ in row["steps"]],
                y=[step for row in of_backend for step in row["steps"]],
                boxpoints="outliers",
                marker={"color": _COLOURS.get(backend, GREY), "size": 3, "opacity": 0.6},
                line={"width": 1.5},
                opacity=0.4 if not simulated and any(row["ms"]["noisy"] for row in rows) else 1.0,
                fillcolor="rgba(0,0,0,0)" if simulated else None,
                offsetgroup=backend,
            )

    panels = _of_models(
        found,
        lambda panels, rows, at: boxes(panels, [row for row in rows if keep or not row["ms"]["noisy"]], at, False),
        lambda panels, rows, at: boxes(panels, rows, at, True),
        _best,
        where=f"{found['simulated'][0]['ranks']} GPUs of the paper's cluster",
    )
    panels.made.update_layout(boxmode="group", boxgap=0.2)
    panels.made.update_xaxes(type="category", title="size of the buckets, MB (0: each parameter)", showgrid=False)
    panels.made.update_yaxes(title="ms per step", col=1)
    return panels


def _cap(row: Mapping[str, Any]) -> str:
    return f"{row['cap_mb']:g}" if row["cap_mb"] >= 1 else "0"


def _best(panels: Panels, point: Mapping[str, Any], rows: _Rows, at: _At) -> None:
    """A band behind the sizes that the paper found the best."""
    caps = list(_by(rows, "cap_mb"))
    low, high = (caps.index(point["values"][end]) for end in (0, -1))
    colour = _COLOURS[point["backend"]]
    band = {"fillcolor": colour, "opacity": 0.18, "line_width": 0, "layer": "below"}
    panels.made.add_vrect(x0=low - 0.45, x1=high + 0.45, **band, row=at[0], col=at[1])
    name = f"published: best for {point['model']}, {point['backend']} (approximate)"
    marker = {"symbol": "square", "size": 14, "color": colour, "opacity": 0.3}
    panels.add("scatter", name, at, x=[None], y=[None], mode="markers", marker=marker)


def _round_robin(found: _Found, keep: bool) -> Panels:
    """The step with 1, 3 and 5 groups in turn."""

    def measured(panels: Panels, rows: _Rows, at: _At) -> None:
        backend, figures = rows[0]["backend"], [row["ms"] for row in rows]
        panels.add(
            "bar",
            f"{backend}, measured",
            at,
            x=[row["variant"] for row in rows],
            **points(figures, keep),
            marker={"color": _COLOURS.get(backend, GREY), "opacity": faint(figures)},
            customdata=[row["ratio"]["median"] for row in rows],
            hovertemplate="%{x}: %{y:.4~g} ms, %{customdata:.3f} of rr1<extra></extra>",
        )

    def simulated(panels: Panels, rows: _Rows, at: _At) -> None:
        for shared, of_bound in _by(rows, "shared").items():
            name = "groups share the bandwidth of one" if shared else "each group has full bandwidth"
            panels.add(
                "bar",
                f"simulated: {name}",
                at,
                x=[[row["backend"] for row in of_bound], [f"rr{row['groups']}" for row in of_bound]],
                y=[row["ratio"] for row in of_bound],
                marker={"color": "#9aa1a9" if shared else "#56b4e9", "pattern": {"shape": "/"}},
                hovertemplate="%{x}: %{y:.3f} of one group<extra>" + name + "</extra>",
            )

    def published(panels: Panels, point: Mapping[str, Any], rows: _Rows, at: _At) -> None:
        _star(panels, [[point["backend"]], ["rr3"]], 1 / (1 + point["values"][0] / 100), point, at)

    panels = _of_models(found, measured, simulated, published, where="16 GPUs of the paper's cluster")
    panels.made.update_xaxes(showgrid=False).update_yaxes(rangemode="tozero")
    panels.made.update_yaxes(title="ms per step", row=1, col=1)
    panels.made.update_yaxes(title="step, x that of one group", row=2, col=1)
    return panels


def _measured_lines(x: str, y: str, told: str, keep: bool) -> _Draw:
    """Draws a line for each backend; when pointed at, a ratio tells its ms, ms what is saved."""

    def draw(panels: Panels, rows: _Rows, at: _At) -> None:
        for backend, chosen in _by(rows, "backend").items():
            panels.add(
                "scatter",
                f"{backend}, measured",
                at,
                x=[row[x] for row in chosen],
                **_measured(backend, [row[y] for row in chosen], keep),
                customdata=[
                    row["ms"]["median"] if y == "ratio" else 100 * (1 - row["ratio"]["median"]) for row in chosen
                ],
                hovertemplate=told + "<extra>" + backend + "</extra>",
            )

    return draw


def _worlds(panels: Panels, worlds: Sequence[int], title: str, row: int | None = None) -> None:
    """Gives x axes a mark for each of these numbers."""
    panels.made.update_xaxes(type="log", tickvals=worlds, ticktext=[f"{n}" for n in worlds], title=title, row=row)


def _scaling(found: _Found, keep: bool) -> Panels:
    def simulated(panels: Panels, rows: _Rows, at: _At) -> None:
        for backend, chosen in _by(rows, "backend").items():
            told = "%{x} GPUs: %{y:.2f} of one GPU's<extra>" + backend + "</extra>"
            at_, ratios = [row["ranks"] for row in chosen], [row["ratio"] for row in chosen]
            look = _line(_COLOURS[backend])
            panels.add("scatter", f"{backend}, simulated", at, x=at_, y=ratios, **look, hovertemplate=told)

    panels = _of_models(
        found,
        _measured_lines("world", "ratio", "%{x} ranks: %{y:.2f} of one rank's, %{customdata:.1f} ms", keep),
        simulated,
        lambda panels, point, _, at: _star(panels, [256], point["values"][0], point, at),
    )
    _worlds(panels, [1, 2, 4, 8, 16, 32, 64, 128, 256], "ranks")
    panels.made.update_yaxes(title="step, x that of one rank", rangemode="tozero")
    return panels


def _skipping(found: _Found, keep: bool) -> Panels:
    def simulated(panels: Panels, rows: _Rows, at: _At) -> None:
        for backend, of_backend in _by(rows, "backend").items():
            for every, chosen in _by(of_backend, "every").items():
                panels.add(
                    "scatter",
                    f"{backend}, every {every}",
                    at,
                    x=[row["ranks"] for row in chosen],
                    y=[row["percent"] for row in chosen],
                    **_line(_OF_EVERY[every], _DASHES[backend]),
                    hovertemplate="%{x} GPUs: %{y:.0f} %<extra>%{fullData.name}</extra>",
                )

    panels = _of_models(
        found,
        _measured_lines("every", "ms", "every %{x}: %{y:.1f} ms, %{customdata:.0f} % saved", keep),
        simulated,
        lambda panels, point, _, at: _star(panels, [256], 100 - point["values"][0], point, at),
    )
    _worlds(panels, [1, 2, 4, 8], "averaged every n-th", row=1)
    _worlds(panels, [16, 32, 64, 128, 256], "GPUs", row=2)
    panels.made.update_yaxes(rangemode="tozero", title="ms per backward", row=1)
    panels.made.update_yaxes(title="% of averaging each", rangemode="tozero", row=2)
    return panels


def _convergence(found: _Found, keep: bool) -> Panels:
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        cases.setdefault(f"{row['data']}, batch {row['batch']}, lr {row['lr']:g}", []).append(row)
    panels = _panels(list(cases))
    for number, rows in enumerate(cases.values(), 1):
        for row in rows:
            wide = max(1, int(_SMOOTH * len(row["losses"])))
            smooth = np.convolve(row["losses"], np.ones(wide) / wide, "valid")
            panels.add(
                "scatter",
                f"averaged every {row['every']}",
                (1, number),
                x=np.arange(len(smooth)) + wide,
                y=smooth,
                mode="lines",
                line={"color": _OF_EVERY[row["every"]], "width": 2.5},
                hovertemplate="backward %{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
            )
    panels.made.update_xaxes(title="backwards").update_yaxes(title="training loss", col=1)
    return panels
