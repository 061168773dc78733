"""One step's timeline as a self-contained SVG: the picture that stays in a saved notebook."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

import numpy as np

from ..step_frames import BEGIN, END, FINALIZE, StepFrame
from ..timeline_layout import AXIS_HEIGHT, HEADER_HEIGHT, LABEL_WIDTH, RIGHT_MARGIN, Bar, Layout, Part, Size, lay_out
from .palette import COLOURS, PARTS, PATTERNS

__all__ = ["empty_svg", "step_svg"]

WIDTH = 860
_TITLE_HEIGHT = 40
_MAX_HEIGHT = 900
_FONT = "font-family='system-ui,-apple-system,Segoe UI,sans-serif'"
_PATTERNS = (
    "<defs><pattern id='hatch' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['waiting']}'/><path d='M-1 7L7 -1M-1 1L1 -1M5 7L7 5' stroke='#000' "
    "stroke-opacity='.6'/></pattern><pattern id='dots' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['queued']}'/>"
    "<path d='M1 1h1.3v1.3h-1.3zM4 4h1.3v1.3h-1.3z' fill-opacity='.6'/></pattern></defs>"
)
_FILLS = [f"url(#{PATTERNS[name]})" if name in ("waiting", "queued") else COLOURS[name] for name in PARTS]


def step_svg(frame: StepFrame, title: str, width: int = WIDTH) -> str:
    """Returns the timeline of one step as SVG text; a step too high for one picture is cut, and says so."""
    ranks, buckets = frame.shape
    wanted = AXIS_HEIGHT + ranks * (HEADER_HEIGHT + 6 + buckets * 16)
    layout = lay_out(frame, Size(width, min(max(wanted, 150), 640)))
    plot = min(layout.content_height, _MAX_HEIGHT)
    body = [_title(frame, title), f"<g transform='translate(0 {_TITLE_HEIGHT})'>"]
    body.append(f"<g clip-path='inset(0 0 {layout.content_height - plot:.0f} 0)'>")
    body += [_grid(layout, plot), *_headers(frame, layout, plot), *_paths(layout.bars, plot), "</g>"]
    body += [_axis(layout, width, plot), "</g>"]
    height = _TITLE_HEIGHT + plot + AXIS_HEIGHT + 4
    if plot < layout.content_height:
        last = int(plot // (layout.content_height / ranks))
        note = f"cut: ranks {frame.ranks[last]} to {frame.ranks[-1]} are not drawn"
        body.append(_text(LABEL_WIDTH, height + 10, note, fill="#b3261e"))
        height += 16
    return _document(width, height, body)


def empty_svg(text: str, width: int = WIDTH) -> str:
    """Returns a picture that only states `text`."""
    return _document(width, 44, [_text(14, 27, text, size=13)])


def _document(width: float, height: float, body: Iterable[str]) -> str:
    """Returns an SVG document on a white sheet, which reads on light and dark pages alike."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT}>{_PATTERNS}"
        f"<rect width='100%' height='100%' rx='4' fill='#fff'/>{''.join(body)}</svg>"
    )


def _title(frame: StepFrame, title: str) -> str:
    """Returns the heading and the legend."""
    share = frame.overlap().hidden_share
    hidden = "" if np.isnan(share) else f", {share:.0%} of the communication hidden"
    parts = [_text(6, 14, f"{title}step {frame.step}{hidden}", size=12, weight=600)]
    x = 6.0
    for part in Part:
        name = part.name.lower()
        height = 4 if part == Part.EXPOSED else 10
        fill = _FILLS[part]
        parts.append(f"<rect x='{x:.0f}' y='{33 - height}' width='16' height='{height}' fill='{fill}'/>")
        parts.append(_text(x + 20, 32, name, fill="#555"))
        x += 84
    return "".join(parts)


def _grid(layout: Layout, plot: float) -> str:
    """Returns the vertical lines."""
    lines = "".join(f"M{tick.x:.1f} 0V{plot:.0f}" for tick in layout.ticks)
    return f"<path d='{lines}' stroke='#e4e4e4'/>"


def _headers(frame: StepFrame, layout: Layout, plot: float) -> Iterable[str]:
    """Yields each rank's name and bands, and the numbers of its buckets."""
    bounds = frame.milliseconds(frame.bounds_ns)
    every = -(-11 // int(layout.row_height))
    for band in layout.bands:
        if band.y > plot:
            return
        y = band.y + 13
        yield _text(4, y, f"rank {frame.ranks[band.row]}", size=12, weight=600)
        for name, first, last, left, right, style in (
            ("backward", BEGIN, FINALIZE, band.x, band.split, "fill='#c8c8c8'"),
            ("finalize", FINALIZE, END, band.split, band.end, "fill='none' stroke='#aaa'"),
        ):
            if right - left < 1:
                continue
            box = f"x='{left:.1f}' y='{band.y + 3:.1f}' width='{right - left:.1f}' height='{HEADER_HEIGHT - 6}'"
            yield f"<rect {box} {style}/>"
            label = f"{name} {bounds[band.row, last] - bounds[band.row, first]:.2f} ms"
            if right - left > 6.2 * len(label) and "nan" not in label:
                yield _text(left + 4, y, label)
        for bucket in range(0, frame.shape[1], every):
            middle = band.y + HEADER_HEIGHT + (bucket + 0.5) * layout.row_height + 3.5
            label = f"bucket {bucket}" if every == 1 and layout.row_height >= 12 else str(bucket)
            yield _text(LABEL_WIDTH - 6, middle, label, fill="#555", anchor="end")


def _paths(bars: list[Bar], plot: float) -> Iterable[str]:
    """Yields one path for each part: thousands of bars stay small."""
    for part in Part:
        chosen = [bar for bar in bars if bar.part == part and bar.y <= plot]
        if chosen:
            shape = "".join(
                f"M{bar.x:.1f} {bar.y:g}h{max(bar.width, 0.8):.1f}v{bar.height:g}h-{max(bar.width, 0.8):.1f}z"
                for bar in chosen
            )
            yield f"<path fill='{_FILLS[part]}' d='{shape}'/>"


def _axis(layout: Layout, width: float, plot: float) -> str:
    """Returns the time axis."""
    middle = (LABEL_WIDTH + width - RIGHT_MARGIN) / 2
    parts = [f"<path d='M{LABEL_WIDTH} {plot:.0f}H{width - RIGHT_MARGIN:.0f}' stroke='#777'/>"]
    parts += [_text(tick.x, plot + 15, tick.label, fill="#555", anchor="middle") for tick in layout.ticks]
    parts.append(_text(middle, plot + 29, "ms since the first rank's backward began", fill="#555", anchor="middle"))
    return "".join(parts)


def _text(
    x: float, y: float, text: str, *, size: int = 11, fill: str = "#222", anchor: str = "start", weight: int = 400
) -> str:
    """Returns a text element."""
    style = f"font-size='{size}' font-weight='{weight}' fill='{fill}' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"
