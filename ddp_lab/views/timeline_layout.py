"""Where every bar of a step's timeline lies: a pure function from a `StepFrame` to rectangles in pixels.

`lanes.js` is the same function for the browser's canvas; `tests/browser/test_layout_parity.py` holds the two
together. The SVG that stays in a saved notebook is drawn from this one.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from ..analysis.step_metrics import EDGES
from .step_frames import BEGIN, END, FINALIZE, Float64, StepFrame

__all__ = ["Band", "Bar", "Layout", "Part", "Size", "Span", "Tick", "lay_out", "spans_of", "ticks"]

LABEL_WIDTH = 76
RIGHT_MARGIN = 14
AXIS_HEIGHT = 34
HEADER_HEIGHT = 18
GROUP_GAP = 6
ROW_HEIGHTS = (3, 20)
TICK_SPACING = 84
_REDUCED, _EXPOSED_FROM = EDGES.index("reduced"), EDGES.index("exposed_from")


class Part(enum.IntEnum):
    """What a bar states about a bucket on a rank."""

    FILLING = 0  # first gradient ready → bucket ready
    QUEUED = 1  # ready → launched: its turn has not come
    WAITING = 2  # launched → launched on the last rank
    REDUCING = 3  # launched on the last rank → reduced
    EXPOSED = 4  # what of launched → reduced lies after finalize began: nothing is left to hide it behind


# part, begin, end (milliseconds), whether its end has not arrived
Span = tuple[Part, float, float, bool]


@dataclass(frozen=True)
class Size:
    """Room for the picture in pixels, and which part of the time axis it shows.

    Attributes:
        width, height: pixels; rows shrink to fit the height, down to 3 pixels, then the content gets higher.
        axis: ``"common"``: 0 ms is the first rank's backward begin; ``"rank"``: each rank's own.
        window: milliseconds shown, None for all.
    """

    width: float
    height: float
    axis: str = "common"
    window: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bar:
    """One rectangle: `row` indexes the frame's ranks; `open` if its end has not arrived yet."""

    part: Part
    row: int
    bucket: int
    x: float
    y: float
    width: float
    height: float
    open: bool = False


@dataclass(frozen=True)
class Band:
    """A rank's header line: where its label, its backward (x → split) and its finalize (split → end) lie."""

    row: int
    y: float
    x: float
    split: float
    end: float


@dataclass(frozen=True)
class Tick:
    """A mark of the time axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Layout:
    """Everything a painter needs; `content_height` excludes the time axis, which stays in view."""

    bars: list[Bar]
    bands: list[Band]
    ticks: list[Tick]
    row_height: float
    content_height: float
    window: tuple[float, float]


@dataclass(frozen=True)
class _Scale:
    """Milliseconds to pixels."""

    window: tuple[float, float]
    width: float

    def x(self, value: float) -> float:
        """Returns the pixel of a time, clamped to the plot."""
        first, last = self.window
        share = (value - first) / (last - first)
        return LABEL_WIDTH + min(max(share, 0.0), 1.0) * self.width


def lay_out(frame: StepFrame, size: Size) -> Layout:
    """Returns the layout of one step; of a step without events, bare headers and an axis of 1 ms."""
    ranks, buckets = frame.shape
    edges, bounds, (earliest, latest) = _on_axis(frame, size.axis)
    window = size.window or (min(0.0, earliest), latest * 1.02 if latest > 0 else 1.0)
    scale = _Scale(window, size.width - LABEL_WIDTH - RIGHT_MARGIN)
    room = size.height - AXIS_HEIGHT - ranks * (HEADER_HEIGHT + GROUP_GAP)
    row_height = min(max(math.floor(room / max(ranks * buckets, 1)), ROW_HEIGHTS[0]), ROW_HEIGHTS[1])
    bars: list[Bar] = []
    bands = []
    group = HEADER_HEIGHT + buckets * row_height + GROUP_GAP
    for row in range(ranks):
        top = row * group
        bands.append(_band(row, top, bounds[row], latest, scale))
        for bucket in range(buckets):
            y = top + HEADER_HEIGHT + bucket * row_height
            spans = _spans(edges[row, bucket], latest)
            bars.extend(_bars(spans, scale, row, bucket, y, row_height))
    return Layout(bars, bands, ticks(window, scale.width), row_height, ranks * group, window)


def spans_of(frame: StepFrame) -> list[list[list[Span]]]:
    """Returns the parts of every bucket, ``[rank][bucket]``, on the common axis."""
    edges, _, (_, latest) = _on_axis(frame, "common")
    return [[_spans(one, latest) for one in of_rank] for of_rank in edges]


def ticks(window: tuple[float, float], width: float) -> list[Tick]:
    """Returns round marks (1, 2 or 5 times a power of ten) of a time axis of `width` pixels."""
    first, last = window
    wanted = (last - first) * TICK_SPACING / max(width, 1.0)
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * 0.999999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    scale = _Scale(window, width)
    marks = range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)
    return [Tick(scale.x(mark * step), f"{mark * step:.{digits}f}") for mark in marks]


def _on_axis(frame: StepFrame, axis: str) -> tuple[Float64, Float64, tuple[float, float]]:
    """Returns edges, bounds, and times of the first and the last event, in milliseconds of the axis."""
    edges, bounds = frame.milliseconds(frame.edges_ns()), frame.milliseconds(frame.bounds_ns)
    zero = np.nan_to_num(bounds[:, BEGIN]) * (axis == "rank")
    extent = frame.extent_ms() - zero[:, None]
    first, last = extent[:, 0][~np.isnan(extent[:, 0])], extent[:, 1][~np.isnan(extent[:, 1])]
    ends = (float(first.min()) if len(first) else 0.0, float(last.max()) if len(last) else 0.0)
    return edges - zero[:, None, None], bounds - zero[:, None], ends


def _spans(edges: Float64, latest: float) -> list[Span]:
    """Returns the parts of one bucket on one rank as (part, begin, end, open) in milliseconds.

    Args:
        edges: where they meet, see `step_metrics.edges`.
        latest: how far a part reaches that has not ended.
    """
    found: list[Span] = []
    for part in Part:
        begin, end = (_EXPOSED_FROM, _REDUCED) if part == Part.EXPOSED else (part, part + 1)
        last = _or(float(edges[end]), latest)
        if not math.isnan(edges[begin]) and (last > edges[begin] or part < Part.WAITING):
            found.append((part, float(edges[begin]), last, math.isnan(edges[end])))
    return found


def _bars(spans: list[Span], scale: _Scale, row: int, bucket: int, y: float, row_height: float) -> list[Bar]:
    """Returns the rectangles of one bucket on one rank; what lies outside the window is left out."""
    gap = 1 if row_height >= 5 else 0
    line = max(1, math.floor(row_height / 5))
    bars = []
    for part, begin, end, unfinished in spans:
        if end < scale.window[0] or begin > scale.window[1]:
            continue
        left, right = scale.x(begin), scale.x(end)
        top, height = (y + row_height - gap - line, line) if part == Part.EXPOSED else (y, row_height - gap)
        bars.append(Bar(part, row, bucket, left, top, right - left, height, unfinished))
    return bars


def _band(row: int, top: float, bounds: Float64, latest: float, scale: _Scale) -> Band:
    """Returns a rank's header line."""
    begin = scale.x(_or(float(bounds[BEGIN]), 0.0))
    if math.isnan(bounds[BEGIN]):
        return Band(row, top, begin, begin, begin)
    split = scale.x(_or(float(bounds[FINALIZE]), _or(float(bounds[END]), latest)))
    return Band(row, top, begin, split, scale.x(_or(float(bounds[END]), latest)))


def _or(value: float, otherwise: float) -> float:
    """Returns `value`, or `otherwise` if it is NaN."""
    return otherwise if math.isnan(value) else value
