"""Where every bar of a step's timeline lies: a pure function from a `StepFrame` to rectangles in pixels.

`lanes.js` is the same function for the browser's canvas; `tests/browser/test_layout_parity.py` holds the two
together. The SVG that stays in a saved notebook is drawn from this one.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from .gradient_sync import GradientSync, gradient_sync
from .step_store import BEGIN, END, FINALIZE, FIRST_READY, LAUNCHED, READY, REDUCED, Float64, StepFrame

__all__ = ["Band", "Bar", "Layout", "Part", "Size", "Span", "Tick", "lay_out", "spans_of", "ticks"]

LABEL_WIDTH = 76
RIGHT_MARGIN = 14
AXIS_HEIGHT = 34
HEADER_HEIGHT = 18
GROUP_GAP = 6
ROW_HEIGHTS = (3, 20)
TICK_SPACING = 84


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


def lay_out(frame: StepFrame, size: Size, sync: GradientSync | None = None) -> Layout:
    """Returns the layout of one step; of a step without events, bare headers and an axis of 1 ms."""
    sync = gradient_sync(frame) if sync is None else sync
    ranks, buckets = frame.shape
    times, bounds, last = _on_axis(frame, sync, size.axis)
    latest = _latest(times, bounds)
    window = size.window or (min(0.0, _earliest(times)), latest * 1.02 if latest > 0 else 1.0)
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
            spans = _spans(times[row, bucket], last[row, bucket], bounds[row, FINALIZE], latest)
            bars.extend(_bars(spans, scale, row, bucket, y, row_height))
    return Layout(bars, bands, ticks(window, scale.width), row_height, ranks * group, window)


def spans_of(frame: StepFrame, sync: GradientSync) -> tuple[list[list[list[Span]]], float]:
    """Returns the parts of every bucket, ``[rank][bucket]``, on the common axis, and the time of the last event."""
    times, bounds, last = _on_axis(frame, sync, "common")
    latest = _latest(times, bounds)
    ranks, buckets = frame.shape
    found = [
        [_spans(times[row, bucket], last[row, bucket], bounds[row, FINALIZE], latest) for bucket in range(buckets)]
        for row in range(ranks)
    ]
    return found, latest


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


def _on_axis(frame: StepFrame, sync: GradientSync, axis: str) -> tuple[Float64, Float64, Float64]:
    """Returns times, bounds and the last launch of each bucket in milliseconds of the axis, ranks first."""
    times, bounds = frame.milliseconds(frame.times_ns), frame.milliseconds(frame.bounds_ns)
    last = np.broadcast_to(sync.last_launched_ms, frame.shape)
    if axis == "rank":
        zero = np.nan_to_num(bounds[:, BEGIN])
        return times - zero[:, None, None], bounds - zero[:, None], last - zero[:, None]
    return times, bounds, last


def _spans(times: Float64, last: float, finalize: float, latest: float) -> list[Span]:
    """Returns the parts of one bucket on one rank as (part, begin, end, open) in milliseconds."""
    first, ready, launched, reduced = (float(times[column]) for column in (FIRST_READY, READY, LAUNCHED, REDUCED))
    found: list[Span] = []
    if math.isnan(first):
        first = ready
    if not math.isnan(first):
        found.append((Part.FILLING, first, _or(ready, latest), math.isnan(ready)))
    if not math.isnan(ready):
        found.append((Part.QUEUED, ready, _or(launched, latest), math.isnan(launched)))
    if math.isnan(launched):
        return found
    end, unfinished = _or(reduced, latest), math.isnan(reduced)
    turn = min(_or(last, end), end)
    if turn > launched:
        found.append((Part.WAITING, launched, turn, unfinished and math.isnan(last)))
    if end > turn or turn <= launched:
        found.append((Part.REDUCING, max(turn, launched), end, unfinished))
    exposed = max(launched, finalize) if not math.isnan(finalize) else math.inf
    if end > exposed:
        found.append((Part.EXPOSED, exposed, end, unfinished))
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


def _latest(times: Float64, bounds: Float64) -> float:
    """Returns the time of the last event in milliseconds, 0 if there is none."""
    values = np.concatenate([times.ravel(), bounds.ravel()])
    return float(np.nanmax(values)) if (~np.isnan(values)).any() else 0.0


def _earliest(times: Float64) -> float:
    """Returns the time of the first event in milliseconds, 0 if there is none."""
    return float(np.nanmin(times)) if (~np.isnan(times)).any() else 0.0


def _or(value: float, otherwise: float) -> float:
    """Returns `value`, or `otherwise` if it is NaN."""
    return otherwise if math.isnan(value) else value
