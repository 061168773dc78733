"""Scenes, tables, sentences and lists of advice as JSON, which ``static/charts/scene.js`` and ``blocks.js`` paint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..scene import Advice, Axis, Band, Bars, Block, Cells, Line, Mark, Notice, Panel, Scene, Table, round_between

__all__ = ["blocks_json", "scene_json", "table_json"]

_DIGITS = 5  # that are known of a number
_TICKS = (9, 5, 2)  # of an axis across a page, up a high panel, up a low one
_HIGH = 0.4  # share of a scene from which a panel is high


def blocks_json(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Returns blocks, each as ``{"text"}``, ``{"notice"}``, ``{"scene"}``, ``{"table"}`` or ``{"advice"}``."""
    return [_block(one) for one in blocks]


def _block(block: Block) -> dict[str, Any]:
    if isinstance(block, Scene):
        return {"scene": scene_json(block)}
    if isinstance(block, Table):
        return {"table": table_json(block)}
    if isinstance(block, Notice):
        return {"notice": block.text}
    return {"text": block} if isinstance(block, str) else {"advice": [_advice(one) for one in block]}


def scene_json(scene: Scene) -> dict[str, Any]:
    """Returns a scene that is not empty: the fields of its objects, the ``kind`` of each mark, and the round numbers of
    each axis, ``ticks``: [[number, text], ...]."""
    return {"title": scene.title, "summary": scene.summary, "panels": [_panel(one) for one in scene.panels]}


def table_json(table: Table) -> dict[str, Any]:
    """Returns a table with its cells as text."""
    return {
        "caption": table.caption,
        "head": [str(name).rstrip(":") for name in table.head],
        "words": [str(name).endswith(":") for name in table.head],
        "notes": list(table.notes),
        "folded": table.folded,
        "rows": [[_text(value) for value in row] for row in table.rows],
        "warned": list(table.warned),
    }


def _advice(one: Advice) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "saving": one.saving, "remedy": one.remedy_parts}


def _text(value: object) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
    return str(value)


def _numbers(values: Any) -> list[Any]:
    """Rounded, whole ones as they are; None for NaN, which JSON does not have."""
    found = np.asarray(values)
    if found.dtype.kind in "iu":
        return list(found.tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(found))))
        rounded = np.where(found == 0, 0.0, np.round(found * scale) / scale)
    return [value if value == value else None for value in rounded.tolist()]


def _panel(panel: Panel) -> dict[str, Any]:
    tops = {"x": panel.x.top, "y": panel.y.top}
    bars = [one for one in panel.marks if isinstance(one, Bars)]
    upright = [value for one in panel.marks if isinstance(one, Line | Band) for value in _heights(one)]
    if bars:
        side = "x" if panel.y.lanes else "y"
        tops[side] = tops[side] or _highest(bars)
    elif upright:
        tops["y"] = tops["y"] or max(upright) or 1.0
    of_y = _TICKS[1] if panel.share >= _HIGH else _TICKS[2]
    return {
        "x": _axis(panel.x, tops["x"], _TICKS[0] if panel.y.lanes else 0),
        "y": _axis(panel.y, tops["y"], of_y),
        "marks": [_mark(one) for one in panel.marks],
        "share": panel.share,
        "heading": panel.heading,
        "total": panel.total,
        "more": panel.more,
    }


def _heights(mark: Line | Band) -> list[float]:
    """Its values; unknown ones are 0."""
    return [*np.nan_to_num(mark.y if isinstance(mark, Line) else mark.high).tolist()]


def _highest(bars: list[Bars]) -> float:
    """The end of the highest stack of bars."""
    sums: dict[int, float] = {}
    for one in bars:
        for at, size in zip(one.at.tolist(), np.nan_to_num(one.size).tolist(), strict=True):
            sums[at] = sums.get(at, 0.0) + size
    return max(sums.values(), default=0.0) or 1.0


def _axis(axis: Axis, top: float | None, ticks: int) -> dict[str, Any]:
    top = 1.0 if top is None else float(top)
    numbers = ticks and not axis.lanes
    made = {name: _plain(getattr(axis, name)) for name in _AXIS}
    return {**made, "top": top, "ticks": round_between(axis.low, top, ticks, axis.log) if numbers else []}


_AXIS = [one.name for one in dataclasses.fields(Axis)]


def _plain(value: Any) -> Any:
    """Lists in place of other sequences and arrays."""
    if isinstance(value, np.ndarray):
        return [_numbers(row) for row in value] if value.ndim > 1 else _numbers(value)
    return value if isinstance(value, str | int | float) or value is None else list(value)


def _mark(mark: Mark) -> dict[str, Any]:
    made = {one.name: _plain(getattr(mark, one.name)) for one in dataclasses.fields(mark)}
    if isinstance(mark, Cells):
        made["others"] = [[name, _plain(values)] for name, values in mark.others]
    return {**made, "kind": type(mark).__name__.lower()}
