"""Pictures of the figures that are bars or boxes: 6, 7, 8 and 12."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...views.paint.palette import PHASES
from ..telling.drawing import GREY
from .panels import COLOURS, Panels, of_model, points
from .settings import PARTS

__all__ = ["breakdown", "buckets", "round_robin"]

_PART_COLOURS = dict(zip(PARTS, (PHASES[phase][0] for phase in ("forward", "alone", "exposed", "other")), strict=True))


def breakdown(found: Mapping[str, Any], keep: bool) -> Panels:
    """Figure 6: stacked parts of a step, without and with overlap."""
    measured, simulated = of_model(found, "breakdown"), of_model(found, "simulated")
    panels = Panels(list(measured), [f"{name}, 32 GPUs of the paper's cluster" for name in simulated])
    for number, rows in enumerate(measured.values(), 1):
        kept = [row for row in rows if keep or not row["gain"]["noisy"]]
        _stacked(panels, kept, "", row=1, col=number)
    for number, (model, rows) in enumerate(simulated.items(), 1):
        _stacked(panels, rows, "/", row=2, col=number)
        for point in found["published"]:
            if point["model"] == model:
                panels.star([[point["backend"]], ["yes"]], 100 - point["values"][0], point, row=2, col=number)
    panels.made.update_layout(barmode="stack", bargap=0.3)
    panels.made.update_yaxes(rangemode="tozero").update_xaxes(title="backend, and overlap or not", showgrid=False)
    panels.made.update_yaxes(title="ms a step", row=1, col=1)
    panels.made.update_yaxes(title="% of the step without overlap", row=2, col=1)
    return panels


def _stacked(panels: Panels, rows: Sequence[Mapping[str, Any]], pattern: str, **place: int) -> None:
    unit = "%" if pattern else "ms"
    name = " (simulated)" if pattern else ""
    faint = [0.4 if row.get("gain", {}).get("noisy") else 1.0 for row in rows]
    for part in PARTS:
        panels.made.add_bar(
            x=[[row["backend"] for row in rows], ["yes" if row["overlap"] else "no" for row in rows]],
            y=[row["parts"][part] for row in rows],
            marker={"color": _PART_COLOURS[part], "pattern": {"shape": pattern}, "opacity": faint},
            hovertemplate=f"%{{x}}: {part} %{{y:.3~g}} {unit}<extra></extra>",
            **panels.named(("exposed communication" if part == "communication" else part) + name),
            **place,
        )


def buckets(found: Mapping[str, Any], keep: bool) -> Panels:
    """Figures 7 and 8: steps as boxes with their outliers, against the size of the buckets."""
    measured, simulated = of_model(found, "rows"), of_model(found, "simulated")
    gpus = found["simulated"][0]["ranks"]
    panels = Panels(list(measured), [f"{name}, {gpus} GPUs of the paper's cluster" for name in simulated])
    for number, rows in enumerate(measured.values(), 1):
        shown = [row | {"cap": f"{row['cap_mb']:g}" if row["cap_mb"] >= 1 else "0"} for row in rows]
        _boxes(panels, [row for row in shown if keep or not row["ms"]["noisy"]], "measured", row=1, col=number)
    for number, (model, rows) in enumerate(simulated.items(), 1):
        shown = [row | {"cap": f"{row['cap_mb']:g}"} for row in rows]
        _boxes(panels, shown, "simulated", row=2, col=number)
        caps = list(dict.fromkeys(row["cap"] for row in shown))
        for point in found["published"]:
            if point["model"] == model:
                _best(panels, point, caps, row=2, col=number)
    panels.made.update_layout(boxmode="group", boxgap=0.2)
    panels.made.update_xaxes(type="category", title="size of the buckets, MB (0: each parameter)", showgrid=False)
    panels.made.update_yaxes(title="ms a step", col=1)
    return panels


def _boxes(panels: Panels, rows: Sequence[Mapping[str, Any]], what: str, **place: int) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        chosen = [(row["cap"], step) for row in rows if row["backend"] == backend for step in row["steps"]]
        panels.made.add_box(
            x=[cap for cap, _ in chosen],
            y=[step for _, step in chosen],
            boxpoints="outliers",
            marker={"color": COLOURS.get(backend, GREY), "size": 3, "opacity": 0.6},
            line={"width": 1.5},
            opacity=0.4 if any(row["ms"]["noisy"] for row in rows if what == "measured") else 1.0,
            fillcolor="rgba(0,0,0,0)" if what == "simulated" else None,
            offsetgroup=backend,
            **panels.named(f"{backend}, {what}"),
            **place,
        )


def _best(panels: Panels, point: Mapping[str, Any], caps: Sequence[str], row: int, col: int) -> None:
    """A band behind the sizes that the paper found the best."""
    low, high = (caps.index(f"{value:g}") for value in (point["values"][0], point["values"][-1]))
    colour = COLOURS[point["backend"]]
    panels.made.add_vrect(
        x0=low - 0.45, x1=high + 0.45, fillcolor=colour, opacity=0.18, line_width=0, layer="below", row=row, col=col
    )
    panels.made.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"symbol": "square", "size": 14, "color": colour, "opacity": 0.3},
        **panels.named(f"published: best for {point['model']}, {point['backend']} (approximate)"),
        row=row,
        col=col,
    )


def round_robin(found: Mapping[str, Any], keep: bool) -> Panels:
    """Figure 12: the step with 1, 3 and 5 groups in turn."""
    measured, simulated = of_model(found, "rows"), of_model(found, "simulated")
    panels = Panels(list(measured), [f"{name}, 16 GPUs of the paper's cluster" for name in simulated])
    for number, rows in enumerate(measured.values(), 1):
        backend = rows[0]["backend"]
        panels.made.add_bar(
            x=[row["variant"] for row in rows],
            **points([row["ms"] for row in rows], keep),
            marker={
                "color": COLOURS.get(backend, GREY),
                "opacity": [0.4 if row["ms"]["noisy"] else 1.0 for row in rows],
            },
            customdata=[row["ratio"]["median"] for row in rows],
            hovertemplate="%{x}: %{y:.4~g} ms, %{customdata:.3f} of rr1<extra></extra>",
            **panels.named(f"{backend}, measured"),
            row=1,
            col=number,
        )
    for number, (model, rows) in enumerate(simulated.items(), 1):
        for shared, name in ((True, "groups share one's bandwidth"), (False, "each has as much again")):
            chosen = [row for row in rows if row["shared"] == shared]
            panels.made.add_bar(
                x=[[row["backend"] for row in chosen], [f"rr{row['groups']}" for row in chosen]],
                y=[row["ratio"] for row in chosen],
                marker={"color": "#9aa1a9" if shared else "#56b4e9", "pattern": {"shape": "/"}},
                hovertemplate="%{x}: %{y:.3f} of one group<extra>" + name + "</extra>",
                **panels.named(f"simulated: {name}"),
                row=2,
                col=number,
            )
        for point in found["published"]:
            if point["model"] == model:
                at = [[point["backend"]], ["rr3"]]
                panels.star(at, 1 / (1 + point["values"][0] / 100), point, row=2, col=number)
    panels.made.update_xaxes(showgrid=False).update_yaxes(rangemode="tozero")
    panels.made.update_yaxes(title="ms a step", row=1, col=1)
    panels.made.update_yaxes(title="step, x that of one group", row=2, col=1)
    return panels
