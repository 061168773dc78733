"""Scenes, tables and sentences as JSON, which ``static/charts/scene.js`` paints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..scene import Axis, Bars, Cells, Line, Mark, Panel, Rule, Scene, Spans, Table

__all__ = ["blocks_json", "scene_json", "table_json"]

_DIGITS = 4  # after the point: numbers are mostly milliseconds


def blocks_json(blocks: Iterable[str | Scene | Table]) -> list[dict[str, Any]]:
    """Returns blocks, each as ``{"text"}``, ``{"scene"}`` or ``{"table"}``."""
    made: list[dict[str, Any]] = []
    for one in blocks:
        if isinstance(one, Scene):
            made.append({"scene": scene_json(one)})
        else:
            made.append({"table": table_json(one)} if isinstance(one, Table) else {"text": one})
    return made


def scene_json(scene: Scene) -> dict[str, Any]:
    """Returns a scene that is not empty: the fields of its objects, and the ``kind`` of each mark."""
    return {"title": scene.title, "panels": [_panel(one) for one in scene.panels]}


def table_json(table: Table) -> dict[str, Any]:
    """Returns a table with its cells as text."""
    return {
        "caption": table.caption,
        "head": [str(name).rstrip(":") for name in table.head],
        "words": [str(name).endswith(":") for name in table.head],
        "notes": list(table.notes),
        "folded": table.folded,
        "rows": [[_text(value) for value in row] for row in table.rows],
    }


def _text(value: object) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
    return str(value)


def _numbers(values: Any) -> list[float | None]:
    """Rounded; None for NaN, which JSON does not have."""
    found = np.round(np.asarray(values, float), _DIGITS)
    return [value if value == value else None for value in found.tolist()]


def _panel(panel: Panel) -> dict[str, Any]:
    tops = {"x": panel.x.top, "y": panel.y.top}
    bars = [one for one in panel.marks if isinstance(one, Bars)]
    if bars:
        side = "x" if panel.y.lanes else "y"
        tops[side] = tops[side] or _highest(bars)
    elif lines := [one for one in panel.marks if isinstance(one, Line)]:
        tops["y"] = tops["y"] or max(float(np.nan_to_num(one.y).max(initial=0.0)) for one in lines) or 1.0
    return {
        "x": _axis(panel.x, tops["x"]),
        "y": _axis(panel.y, tops["y"]),
        "marks": [_mark(one) for one in panel.marks],
        "share": panel.share,
        "heading": panel.heading,
        "total": panel.total,
    }


def _highest(bars: list[Bars]) -> float:
    """The end of the highest stack of bars."""
    sums: dict[int, float] = {}
    for one in bars:
        for at, size in zip(one.at.tolist(), np.nan_to_num(one.size).tolist(), strict=True):
            sums[at] = sums.get(at, 0.0) + size
    return max(sums.values(), default=0.0) or 1.0


def _axis(axis: Axis, top: float | None) -> dict[str, Any]:
    return {
        "label": axis.label,
        "lanes": list(axis.lanes),
        "headings": list(axis.headings),
        "notes": list(axis.notes),
        "low": axis.low,
        "top": 1.0 if top is None else float(top),
        "unit": axis.unit,
        "ends": list(axis.ends),
        "chooses": axis.chooses,
    }


def _mark(mark: Mark) -> dict[str, Any]:
    if isinstance(mark, Cells):
        return {"kind": "cells", "name": mark.name, "unit": mark.unit, "values": [_numbers(row) for row in mark.values]}
    if isinstance(mark, Rule):
        return {"kind": "rule", "role": mark.role, "x": float(mark.x), "text": mark.text}
    made: dict[str, Any] = {"name": mark.name, "role": mark.role}
    if isinstance(mark, Line):
        return {**made, "kind": "line", "x": np.asarray(mark.x).tolist(), "y": _numbers(mark.y), "width": mark.width}
    made["tips"] = list(mark.tips)
    if isinstance(mark, Spans):
        ends = {"begin": _numbers(mark.begin), "end": _numbers(mark.end)}
        return {**made, **ends, "kind": "spans", "lane": np.asarray(mark.lane).tolist(), "thin": mark.thin}
    texts = list(mark.texts)
    return {**made, "kind": "bars", "at": np.asarray(mark.at).tolist(), "size": _numbers(mark.size), "texts": texts}
