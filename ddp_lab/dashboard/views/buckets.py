"""Buckets: the bucket layout as a map of the model, when each gradient is ready, and parameters without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis import step_metrics
from ...formatting import size
from ...timeline.tables.span_columns import TableView
from ...timeline.tables.step_table import STEP_FIELDS
from ...timeline.timeline import Timeline
from ..paint.figure import GREY, style
from ..paint.palette import COLOURS, RANK_COLOURS, bucket_colour, plotly_text
from ..paint.scene_json import blocks_json
from ..paint.scene_svg import INK, WIDTH, drawing, empty_svg, tile
from ..scene import Axis, Dots, Mark, Panel, Scene, Spans, Values
from .layout_words import layout_words
from .model_map import cell_label, map_cells, map_words
from .view import Selection, View

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "Buckets",
    "BucketsFacts",
    "bucket_gradients",
    "bucket_gradients_page",
    "buckets_figure",
    "readiness",
    "unused",
]

_ROW, _MOST_ROWS = 30, 9  # of the map of a model
_MOST_LANES = 40  # of gradients
_STEPS = 100
_READINESS_STEPS = 20
_BEGIN, _END = STEP_FIELDS.index("backward_begin"), STEP_FIELDS.index("backward_end")


@dataclass(frozen=True)
class BucketsFacts:
    """The description of the bucket layout (None until a rank has sent it), and the answer of `readiness`."""

    assignment: dict[str, Any] | None
    readiness: dict[str, Any]

    @property
    def idle(self) -> set[int]:
        """The parameters without a gradient in the newest steps; empty if those have another layout."""
        if self.assignment is None or self.readiness["generation"] != self.assignment["generation"]:
            return set()
        return {index for index, share in enumerate(self.readiness["used"]) if share == 0}


class Buckets(View):
    """The bucket layout."""

    name = "buckets"
    title = "Buckets"
    about = "The bucket layout as a map of the model."
    question = "What to change"

    def facts(self, timeline: Timeline, chosen: Selection) -> BucketsFacts:
        model = chosen.model_in(timeline)
        try:
            assignment = timeline.assignment(model)
        except ValueError:
            assignment = None
        parameters = 0 if assignment is None else len(assignment["parameters"])
        return BucketsFacts(assignment, readiness(timeline.views(model, _STEPS), parameters))

    def page(self, facts: BucketsFacts) -> dict[str, Any]:
        return facts.readiness

    def svg(self, facts: BucketsFacts) -> str:
        return _buckets(facts)

    def figure(self, timeline: Timeline, **options: Any) -> go.Figure:
        return buckets_figure(timeline, **options)


def _buckets(facts: BucketsFacts) -> str:
    assignment = facts.assignment
    if assignment is None:
        return empty_svg("Buckets: bucket layout not received yet.")
    cells, depth = map_cells(assignment)
    idle, words = facts.idle, layout_words(assignment)
    depth, buckets = min(depth, _MOST_ROWS), len(assignment["buckets"])
    body = []
    for cell in cells:
        width = (cell.end - cell.begin) * WIDTH
        if cell.depth >= depth or width < 0.4:
            continue
        x, y, rows = cell.begin * WIDTH, cell.depth * _ROW, min(cell.rows, depth - cell.depth)
        fill, ink = bucket_colour(cell.bucket, buckets) if cell.bucket >= 0 else ("#e8eaed", INK)
        label, where = cell_label(cell, idle, words)
        fitting = next((one for one in (label, words.tag(cell.bucket)) if 6.4 * len(one) + 6 < width), "")
        box = (x, y, max(width - 1, 0.5), rows * _ROW - 1)
        body.append(tile(*box, fill, tip=f"{cell.path or cell.name}: {where}", words=fitting, ink=ink))
        if cell.parameter in idle:
            body.append(f"<path d='{_hatching(*box)}' style='stroke:{ink};fill:none;opacity:.4'/>")
    total = sum(one["bytes"] for one in assignment["buckets"])
    order, colours = map_words(assignment, idle)
    return drawing(WIDTH, depth * _ROW, body, f"{assignment['module']} in {order}; {size(total)}; {colours}")


def _hatching(x: float, y: float, width: float, height: float) -> str:
    """A path of lines that rise to the right, 6 apart, within a rectangle."""
    lines, at = [], x - height
    while at < x + width:
        left, right = max(at, x), min(at + height, x + width)
        if left < right:
            lines.append(f"M{left:.1f} {y + height - (left - at):.1f}L{right:.1f} {y + height - (right - at):.1f}")
        at += 6
    return "".join(lines)


def buckets_figure(
    timeline: Timeline, *, model: int | None = None, generation: int | None = None, equal: bool = False
) -> go.Figure:
    """Returns the bucket layout as a map of the model: modules from top to bottom, with their width by size.

    Parameters without a gradient in the newest steps are hatched and labelled unused, as in the widget.

    Args:
        timeline: the source of the layout.
        model: which model; None for the most recently active.
        generation: which version of the layout; None for the newest.
        equal: give all parameters the same width; by default the width is in proportion to the bytes.
    """
    import plotly.graph_objects as go

    known = [one.reducer for one in timeline.reducers()]
    if model is None and not known:
        raise ValueError("no model has been recorded yet")
    assignment = timeline.assignment(known[-1] if model is None else model, generation)
    buckets = len(assignment["buckets"])
    cells, _ = map_cells(assignment, equal=equal)
    idle = unused(timeline, assignment)
    looks = [bucket_colour(one.bucket, buckets) if one.bucket >= 0 else (COLOURS["other"], "#000") for one in cells]
    said = [cell_label(one, idle, layout_words(assignment)) for one in cells]
    ids = [one.path or "/" for one in cells]
    made = go.Figure(
        go.Icicle(
            ids=[plotly_text(one) for one in ids],
            labels=[plotly_text(label) for label, _ in said],
            parents=[plotly_text(_parent(one.path, set(ids))) for one in cells],
            values=[one.end - one.begin for one in cells],
            branchvalues="total",
            tiling={"orientation": "v"},
            marker={
                "colors": [colour for colour, _ in looks],
                "line": {"width": 1, "color": GREY},
                "pattern": {
                    "shape": ["/" if one.parameter in idle else "" for one in cells],
                    "fgcolor": [ink for _, ink in looks],
                    "fillmode": "overlay",
                    "size": 6,
                    "solidity": 0.15,
                },
            },
            leaf={"opacity": 1},
            textfont={"color": [ink for _, ink in looks]},
            customdata=[where for _, where in said],
            hovertemplate="%{id}<br>%{customdata}<br>%{percentRoot:.1%} of the model<extra></extra>",
            sort=False,
        )
    )
    order, colours = map_words(assignment, idle)
    style(made, f"{assignment['module']} in {order} ({colours})", 420)
    made.update_layout(margin={"t": 60, "l": 10, "r": 10, "b": 10})
    return made


def _parent(path: str, ids: set[str]) -> str:
    """The module around a cell. A module with a single child has no cell of its own."""
    if not path:
        return ""
    while path:
        path = path.rpartition(".")[0]
        if path in ids:
            return path
    return "/"


def readiness(views: Sequence[TableView], parameters: int = 0) -> dict[str, Any]:
    """Returns when each parameter's gradient was ready (median over ranks and steps), and how often it was.

    Args:
        views: tables of the ranks of one model; the newest complete steps with the newest bucket layout are used.
        parameters: how many the model has: a table ends with the last one that ever got a gradient.

    Returns:
        ``generation``: of the layout, -1 if no step is complete, or with `fully_shard` or `replicate`; ``ready``: ms
        since the rank's backward began, None without a gradient; ``used``: 0 to 1.
    """
    views = [one for one in views if one.communication.tells_gradients]  # not of parameter groups
    ended = [one.steps[:, _END] > 0 for one in views]
    known = [int(one.generation[done].max()) for one, done in zip(views, ended, strict=True) if done.any()]
    newest = max(known, default=-1)
    parts = []
    for one, done in zip(views, ended, strict=True):
        rows = np.flatnonzero((one.generation == newest) & done)[-_READINESS_STEPS:]
        since = one.gradients[rows] - one.steps[rows, _BEGIN][:, None]
        parts.append(np.where(one.gradients[rows] > 0, since / 1e6, np.nan))
    most = max((part.shape[1] for part in parts), default=0)
    most = max(most, parameters) if parts else 0
    filled = [np.pad(part, ((0, 0), (0, most - part.shape[1])), constant_values=np.nan) for part in parts]
    values = np.concatenate(filled) if filled else np.zeros((0, 0))
    used = np.isfinite(values).mean(axis=0) if len(values) else np.zeros(most)
    ready: list[float | None] = [
        float(np.nanmedian(column)) if share > 0 else None for column, share in zip(values.T, used, strict=True)
    ]
    return {"generation": newest, "ready": ready, "used": used.tolist()}


def unused(timeline: Timeline, assignment: dict[str, Any]) -> set[int]:
    """Returns the indices of the parameters without a gradient in the newest complete steps.

    Args:
        timeline: the source of the steps.
        assignment: the bucket layout that is shown; steps with another one are ignored.
    """
    parameters = len(assignment["parameters"])
    found = readiness(timeline.views(assignment["reducer"], _STEPS), parameters)
    if found["generation"] != assignment["generation"]:
        return set()
    return {index for index, share in enumerate(found["used"]) if share == 0}


def bucket_gradients(timeline: Timeline, reducer: int, step: int, bucket: int) -> dict[str, Any]:
    """Returns when each gradient of a bucket was ready in one step.

    Returns:
        ``type``, ``reducer``, ``step``, ``bucket``, ``generation``; ``ranks``; ``ms``: for each rank, a list of ms
        since its backward began, in the order of the bucket's buffer, None where there was no gradient.
    """
    held = [one for one in timeline.views_of(reducer, np.array([step])) if len(one.step)]
    generation = int(held[0].generation[0]) if held else 0
    members = np.array(_members(timeline, reducer, generation, bucket)[0], np.int64)
    times: list[list[float | None]] = []
    for one in held:
        begin, ready = one.steps[0, _BEGIN], np.append(one.gradients[0], 0)  # the last one: of a parameter without any
        at = ready[np.minimum(members, len(ready) - 1)]
        times.append([round(float(ns - begin) / 1e6, 4) if ns > 0 else None for ns in at.tolist()])
    found = {"type": "gradients", "reducer": reducer, "step": step, "bucket": bucket, "generation": generation}
    return {**found, "ranks": [one.rank for one in held], "ms": times}


def bucket_gradients_page(timeline: Timeline, reducer: int, step: int, bucket: int) -> dict[str, Any]:
    """Returns the same for a page: instead of the times of each rank, ``ready``: their medians, None without any, and
    ``blocks``: a lane for each of the first 40 gradients in the order of readiness, empty without any."""
    found = bucket_gradients(timeline, reducer, step, bucket)
    ranks, times = found.pop("ranks"), found.pop("ms")
    ms = np.array(times, float).reshape(len(ranks), -1)
    names = _members(timeline, reducer, found["generation"], bucket)[1]
    ready = [float(step_metrics.median(column)) for column in ms.T]
    scene = _dots(ranks, ms, names, ready) if np.isfinite(ms).any() else None
    known = [None if one != one else round(one, 4) for one in ready]
    return {**found, "ready": known, "blocks": blocks_json([] if scene is None else [scene])}


def _dots(ranks: Sequence[int], ms: Values, names: Sequence[str], ready: Sequence[float]) -> Scene:
    """When each gradient was ready on each rank. Ranks differ in shape as well as in colour; many ranks are a line from
    the first to the last one."""
    order = np.argsort(np.nan_to_num(ready, nan=np.inf), kind="stable")[:_MOST_LANES]
    lanes, shown = np.arange(len(order)), ms[:, order]
    tips = [
        "\n".join(
            [names[index], *(f"rank {rank}\t{_ready(at)}" for rank, at in zip(ranks[:16], ms[:16, index], strict=True))]
        )
        for index in order.tolist()
    ]
    marks: list[Mark] = [Dots(f"rank {rank}", f"rank{row}", row, shown[row], lanes) for row, rank in enumerate(ranks)]
    label = "ms since the rank's own backward began"
    if len(ranks) > len(RANK_COLOURS):
        known = np.flatnonzero(np.isfinite(shown).any(axis=0))
        first, last = np.nanmin(shown[:, known], axis=0), np.nanmax(shown[:, known], axis=0)
        middle = np.array(ready)[order][known]
        marks = [Spans("", "band", known, first, last, thin=True), Spans("", "line", known, middle, middle)]
        label += "; line: from the first to the last rank; tick: the median"
    top = 1.04 * max(float(np.nanmax(shown)), 1e-6)
    panel = Panel(Axis(label, top=top), Axis("", [names[index] for index in order.tolist()], tips=tips), marks)
    return Scene("When each gradient was ready, on each rank", (panel,))


def _ready(value: float) -> str:
    return "no gradient" if value != value else f"{value:.2f} ms"


def _members(timeline: Timeline, reducer: int, generation: int, bucket: int) -> tuple[list[int], list[str]]:
    """The parameters of a bucket and their names, in the order of its buffer."""
    try:
        assignment = timeline.assignment(reducer, generation)
    except ValueError:
        return [], []
    found: list[int] = next((one["parameters"] for one in assignment["buckets"] if one["bucket"] == bucket), [])
    names = {one["index"]: one["name"] for one in assignment["parameters"]}
    return found, [names[index] for index in found]
