"""Scenes as SVG. Colours come from the classes of a page's style sheet, or of the one that `framed` adds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np

from ...formatting import ending
from ..scene import (
    Advice,
    Axis,
    Band,
    Bars,
    Block,
    Cells,
    Line,
    Notice,
    Numbers,
    Panel,
    Rule,
    Scene,
    Spans,
    Table,
    Tiles,
    Values,
    round_between,
)
from .palette import COLOURS, PATTERNS, ROLE_RULES, bucket_colour

__all__ = [
    "INK",
    "WIDTH",
    "drawing",
    "empty_svg",
    "framed",
    "legend",
    "listed",
    "picture",
    "sheet",
    "text",
    "tile",
]

WIDTH, _RIGHT, _TOP = 920, 14, 12
_LANES_LEFT, _HEADING, _GAP, _MOST_HEIGHT = 76, 18, 6, 900  # of lanes of time
INK = "#1f2328"  # of text
_UPRIGHT = 260  # pixels of a scene whose bars stand
_ROOM_FOR_TEXTS = 130
_LINE = 17  # of text
_TILE, _ACROSS = 38, 5  # pixels of a tile, and how many lie beside each other in a cell
_FONT = "font-family='system-ui,-apple-system,Segoe UI,sans-serif'"
_RULES = {
    "text": "fill:#1f2328;font-size:12px",
    "text.faint": "fill:#59636e",
    "text.bold": "font-weight:600",
    "text.large": "font-weight:700;font-size:15px",
    "text.on-heat": "fill:#fff",
    ".grid": "stroke:#e6e8ea;fill:none",
    ".axis": "stroke:#59636e;fill:none",
    ".heat": f"fill:{COLOURS['heat']};stroke:#d8dee4;stroke-width:.5",
    **ROLE_RULES,
}
_Named = Bars | Spans | Line | Band  # what a legend may have
_PATTERNS = (
    "<defs><pattern id='hatch' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['waiting']}'/><path d='M-1 7L7 -1M-1 1L1 -1M5 7L7 5' stroke='#000' "
    "stroke-opacity='.6'/></pattern><pattern id='dots' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['queued']}'/>"
    "<path d='M1 1h1.3v1.3h-1.3zM4 4h1.3v1.3h-1.3z' fill-opacity='.6'/></pattern></defs>"
)
# Prefixed: if the picture is part of an HTML page, its rules must not apply to other pictures.
_CSS = "".join(f".ddp-picture {selector}{{{rule}}}" for selector, rule in _RULES.items())


@dataclass(frozen=True)
class _Plot:
    """The area of a panel in pixels, and the values at the ends of its axes."""

    left: float
    top: float
    width: float
    height: float
    most: float
    low: float = 0.0
    log: bool = False

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height

    def x(self, value: Any) -> Any:
        """The pixel of a value, or of several, on the horizontal axis."""
        return self.left + self.width * value / self.most

    def y(self, value: float) -> float:
        """The pixel of a value on the vertical axis; values that are too large or too small are cut."""
        low, value, most = self.low, max(self.low, min(value, self.most)), self.most
        if self.log:
            low, value, most = math.log10(low), math.log10(value), math.log10(most)
        return self.top + self.height * (1 - (value - low) / (most - low))


def picture(scene: Scene) -> str:
    """Returns a scene that is not empty as SVG without colours of its own."""
    patterned = any(isinstance(mark, Spans) for panel in scene.panels for mark in panel.marks)
    body: list[str] = [_PATTERNS] if patterned else []
    width, bottom = 240.0, 0.0
    for number, panel in enumerate(scene.panels, 1):
        marks, right, bottom = _paint(panel, bottom, number == len(scene.panels))
        body += marks
        width = max(width, right)
    return (
        f'<svg viewBox="0 0 {width:.0f} {bottom:.0f}" role="img" aria-label="{escape(scene.title)}" '
        f'style="max-width:{width:.0f}px;min-width:{min(width, 620):.0f}px">{"".join(body)}</svg>'
    )


def framed(scene: Scene) -> str:
    """Returns a scene as a self-contained picture, on a white background with its title and legend."""
    if scene.empty:
        return empty_svg(f"{scene.title}: {scene.empty}.")
    return sheet(picture(scene), scene.title, _named(scene), scene.summary)


def empty_svg(text: str, width: int = 860) -> str:
    """Returns a picture of `text` on a white background, legible on light and dark pages."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='44' viewBox='0 0 {width} 44' "
        "font-family='system-ui,-apple-system,Segoe UI,sans-serif'>"
        "<rect width='100%' height='100%' rx='4' fill='#fff'/>"
        f"<text x='14' y='27' font-size='13' fill='#222'>{escape(text)}</text></svg>"
    )


def sheet(inner: str, title: str, legend: Sequence[_Named] = (), summary: str = "") -> str:
    """Puts SVG that takes its colours from classes on a white background, with title, summary, legend and colours."""
    size = inner[inner.index('viewBox="') + 13 :].split('"', 1)[0].split()
    lines = textwrap.wrap(summary, 140)[:2]
    top = 30 + 16 * len(lines) + (20 if legend else 0)
    placed = f"<svg x='8' y='{top}' width='{size[0]}' height='{size[1]}' viewBox=\"0 0 {size[0]} {size[1]}\">"
    placed += inner[inner.index(">") + 1 :]
    words = [text(8, 36 + 16 * number, line, "faint") for number, line in enumerate(lines)]
    x = 10.0
    for mark in legend:
        high = 4 if isinstance(mark, Spans) and mark.thin else 10
        box = f"x='{x:.0f}' y='{top - 10 - high}' width='14' height='{high}'"
        words.append(f"<rect class='role-{mark.role}' {box}{_pattern(mark)}/>")
        words.append(text(x + 19, top - 11, mark.name, "faint"))
        x += 40 + 6.3 * len(mark.name)
    width, height = max(int(size[0]), round(7.6 * len(title)), round(x)) + 16, int(size[1]) + top + 8
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' class='ddp-picture' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img' aria-label='{escape(f'{title}. {summary}', quote=True)}' {_FONT}>"
        f"<style>{_CSS}</style><rect width='100%' height='100%' rx='4' fill='#fff'/>"
        f"<text x='8' y='19' style='font-weight:600;font-size:13px'>{escape(title)}</text>"
        f"{''.join(words)}{placed}</svg>"
    )


def drawing(width: float, height: float, body: Sequence[str], title: str, summary: str = "") -> str:
    """Puts SVG of this size on a sheet."""
    return sheet(f'<svg viewBox="0 0 {width:.0f} {height:.0f}">{"".join(body)}</svg>', title, summary=summary)


def listed(title: str, blocks: Iterable[Block], summary: str = "") -> str:
    """Returns sentences, notices, tables and advice as lines of text on a sheet."""
    body: list[str] = []
    y = 16.0
    for block in blocks:
        lines = _lines_of(block)
        body += [text(x, y + down, words, style) for x, down, words, style in lines]
        y += max((down for _, down, *_ in lines), default=0.0) + _LINE + 8
    return drawing(WIDTH, y - 8, body, title, summary)


_Placed = tuple[float, float, str, str]  # x, y below the first line, words, style


def _lines_of(block: Block) -> list[_Placed]:
    if isinstance(block, Table):
        return _cells_of(block)
    if isinstance(block, str | Notice):
        words, style = (block, "") if isinstance(block, str) else (block.text, "bold role-bad")
        lines = [line for part in words.splitlines() for line in textwrap.wrap(part, 140)]
        return [(6.0, _LINE * number, line, style) for number, line in enumerate(lines)]
    return [] if isinstance(block, Scene) else _advice_of(block)


def _cells_of(table: Table) -> list[_Placed]:
    """Columns as wide as their longest text; the last one is wrapped."""
    rows = [[str(name).rstrip(":") for name in table.head], *([str(value) for value in row] for row in table.rows)]
    widths = [6.6 * max(map(len, column)) + 22 for column in zip(*rows, strict=True)]
    lefts = [6.0, *(6.0 + sum(widths[: column + 1]) for column in range(len(widths) - 1))]
    most, made, y = max(24, int((WIDTH - lefts[-1]) / 6.6)), list[_Placed](), 0.0
    for number, row in enumerate(rows):
        style = "bold" if not number else "role-bad" if number - 1 in table.warned else ""
        last = textwrap.wrap(row[-1], most) or [""]
        made += [(left, y, words, style) for left, words in zip(lefts, row[:-1], strict=False)]
        made += [(lefts[-1], y + _LINE * line, words, style) for line, words in enumerate(last)]
        y += _LINE * len(last)
    return made


def _advice_of(found: Sequence[Advice]) -> list[_Placed]:
    made, y = list[_Placed](), 0.0
    for one in found:
        made.append((6.0, y, one.saving, "large"))
        for style, words in (("bold", one.title), ("", one.evidence), ("role-forward", f"→ {one.remedy}")):
            for line in textwrap.wrap(words, 120):
                made.append((80.0, y, line, style))
                y += _LINE
        y += 9
    return made


def legend(scene: Scene) -> str:
    """Returns the legend, names and colours, as HTML."""
    entries = "".join(f'<li><i class="role-{one.role}"></i>{escape(one.name)}</li>' for one in _named(scene))
    return f'<ul class="legend">{entries}</ul>' if entries else ""


def _named(scene: Scene) -> list[_Named]:
    """The marks of the legend; a single one needs no legend."""
    found = [mark for panel in scene.panels for mark in panel.marks if isinstance(mark, _Named) and mark.name]
    return found if len(found) > 1 else []


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start", ink: str = "") -> str:
    """Returns text at a place, in a class of the style sheet or in a colour of its own."""
    colour = f' style="fill:{ink}"' if ink else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}"{colour}>{escape(words)}</text>'


def tile(
    x: float, y: float, width: float, height: float, fill: str = "none", *,
    edge: tuple[str, int] | None = None, tip: str = "", words: str = "", ink: str = "",
) -> str:  # fmt: skip
    """Returns a rectangle; `edge`: colour and width of its outline, `tip`: its tooltip, `words`: its text."""
    line = f' stroke="{edge[0]}" stroke-width="{edge[1]}"' if edge else ""
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{line}>'
    about = f"<title>{escape(tip)}</title>" if tip else ""
    return f"{box}{about}</rect>{text(x + 4, y + 19, words, ink=ink) if words else ''}"


def _paint(panel: Panel, top: float, last: bool) -> tuple[list[str], float, float]:
    """Returns a panel's SVG, its right edge and its lower edge; the last panel has the x axis."""
    if isinstance(panel.marks[0], Cells):
        return _paint_cells(panel, panel.marks[0], top)
    if isinstance(panel.marks[0], Tiles):
        return _paint_tiles(panel, panel.marks[0], top)
    if isinstance(panel.marks[0], Spans):
        return _paint_spans(panel, top)
    return _paint_lanes(panel, top) if panel.y.lanes else _paint_steps(panel, top, last)


def _stacked(marks: Sequence[Bars], places: int) -> Iterator[tuple[Bars, Values, Values]]:
    """Yields bars with their begins and ends, each stacked on those before it at the same place, 0 to `places` - 1."""
    level = np.zeros(places)
    for bars in marks:
        begin = level[bars.at]
        end = begin + np.nan_to_num(bars.size)
        level[bars.at] = end
        yield bars, begin, end


def _paint_steps(panel: Panel, top: float, last: bool) -> tuple[list[str], float, float]:
    """Upright bars, drawn as areas without gaps, and lines; steps are equally spaced."""
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    lines = [mark for mark in panel.marks if isinstance(mark, Line)]
    bands = [mark for mark in panel.marks if isinstance(mark, Band)]
    steps = np.unique(np.concatenate([*(one.at for one in bars), *(one.x for one in lines), *(one.x for one in bands)]))
    stack = list(_stacked([replace(one, at=np.searchsorted(steps, one.at)) for one in bars], len(steps)))
    heights = [*(end for *_, end in stack), *(one.y for one in lines), *(one.high for one in bands)]
    highest = max(float(np.nan_to_num(one).max(initial=0.0)) for one in heights)
    left, y = 62.0, panel.y
    height, most = max(_UPRIGHT * panel.share - 20, 64), y.top or highest or 1.0
    plot = _Plot(left, top + _TOP, WIDTH - left - _RIGHT, height, most, y.low, y.log)
    body = []
    for mark, words in round_between(y.low, most, 5 if panel.share > 0.5 else 2, y.log):
        body.append(f'<path class="grid" d="M{left} {plot.y(mark):.1f}H{WIDTH - _RIGHT}"/>')
        body.append(text(left - 6, plot.y(mark) + 4, words, "faint", "end"))
    edges = plot.left + plot.width * np.arange(len(steps) + 1) / len(steps)
    for one, begin, end in stack:
        over = "".join(f"L{a:.1f} {plot.y(v):.1f}H{b:.1f}" for a, b, v in zip(edges, edges[1:], end, strict=False))
        back = zip(edges[-2::-1], edges[:0:-1], begin[::-1], strict=False)
        under = "".join(f"L{b:.1f} {plot.y(v):.1f}H{a:.1f}" for a, b, v in back)
        body.append(f'<path class="role-{one.role}" d="M{over[1:]}{under}z"><title>{escape(one.name)}</title></path>')
    middles = (edges[:-1] + edges[1:]) / 2
    for band in bands:
        known = np.isfinite(band.low) & np.isfinite(band.high)
        x = middles[np.searchsorted(steps, band.x[known])]
        over, under = _path(x, band.high[known], plot.y), _path(x[::-1], band.low[known][::-1], plot.y)
        body.append(f'<path class="role-{band.role}" fill-opacity=".45" d="{over}{under.replace("M", "L", 1)}z"/>')
    for line in lines:
        path = _path(middles[np.searchsorted(steps, line.x)], line.y, plot.y)
        dashes = f' stroke-dasharray="{" ".join(map(str, line.dash))}"' if line.dash else ""
        body.append(f'<path class="role-{line.role}-line" stroke-width="{line.width}"{dashes} d="{path}"/>')
    for rule in (mark for mark in panel.marks if isinstance(mark, Rule)):
        x = middles[np.searchsorted(steps, rule.x)]
        body.append(f'<path class="role-{rule.role}-line" stroke-width="2" d="M{x:.1f} {plot.top}V{plot.bottom}"/>')
        body.append(text(x, plot.top - 2, rule.text, "", "middle"))
    middle = plot.top + plot.height / 2
    turned = f'transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle"'
    body.append(f'<path class="axis" d="M{left} {plot.bottom}H{WIDTH - _RIGHT}"/>')
    body.append(f'<text class="faint" {turned}>{escape(panel.y.label)}</text>')
    if plot.most < highest:
        unit = panel.y.label.split()[0]
        body.append(text(WIDTH - _RIGHT, plot.top - 3, f"longest: {highest:.0f} {unit}", "faint", "end"))
    if last:
        body += _step_numbers(steps, plot, panel.x)
    return body, WIDTH, plot.bottom + (40 if last else 8)


def _step_numbers(steps: Numbers, plot: _Plot, axis: Axis) -> Iterator[str]:
    """Numbers below an axis of steps, and its name."""
    for index in sorted({min(quarter * len(steps) // 4, len(steps) - 1) for quarter in range(5)}):
        middle = plot.left + plot.width * (index + 0.5) / len(steps)
        yield text(middle, plot.bottom + 16, str(int(steps[index])), "faint", "middle")
    yield text(plot.left + plot.width / 2, plot.bottom + 34, axis.label, "faint", "middle")


def _path(x: Values, values: Values, y: Callable[[float], float]) -> str:
    """The path of a line with gaps where a value is NaN."""
    path, pen = "", "M"
    for at, value in zip(x, values, strict=True):
        path, pen = (path, "M") if np.isnan(value) else (f"{path}{pen}{at:.1f} {y(value):.1f}", "L")
    return path


def _left_of(names: Sequence[str]) -> float:
    """The width of the lane names."""
    return max(62.0, 14 + 6.4 * max(map(len, names)))


def _paint_lanes(panel: Panel, top: float) -> tuple[list[str], float, float]:
    """Horizontal bars, one lane per name, with texts at their ends."""
    names, bars = panel.y.lanes, [mark for mark in panel.marks if isinstance(mark, Bars)]
    stack = list(_stacked(bars, len(names)))
    line, left = 22 if len(names) <= 20 else 14, _left_of(names)
    most = panel.x.top or max(float(end.max(initial=0.0)) for *_, end in stack) or 1.0
    plot = _Plot(left, top + _TOP, WIDTH - left - _RIGHT - _ROOM_FOR_TEXTS, line * len(names), most)
    body = []
    for mark, words in round_between(0.0, most, 5):
        body.append(f'<path class="grid" d="M{plot.x(mark):.1f} {plot.top}V{plot.bottom}"/>')
        body.append(text(plot.x(mark), plot.bottom + 16, words, "faint", "middle"))
    body += [text(left - 8, plot.top + (row + 0.5) * line + 3, name, "", "end") for row, name in enumerate(names)]
    for one, begins, ends in stack:
        for index, (row, begin, end) in enumerate(zip(one.at, begins, ends, strict=True)):
            y, width = plot.top + row * line, plot.x(end) - plot.x(begin)
            tip = one.tips[index] if one.tips else f"{names[row]}: {one.name} {end - begin:.2f} ms"
            body.append(
                f'<rect class="role-{one.role}" x="{plot.x(begin):.1f}" y="{y + 2}" width="{width:.1f}" '
                f'height="{line - 4}"><title>{escape(tip)}</title></rect>'
            )
            if one.texts:
                body.append(text(plot.x(end) + 6, y + line / 2 + 3, one.texts[index], "faint"))
    body.append(text(left + plot.width / 2, plot.bottom + 34, panel.x.label, "faint", "middle"))
    return body, WIDTH, plot.bottom + 40


def _paint_cells(panel: Panel, cells: Cells, top: float) -> tuple[list[str], float, float]:
    """Cells; larger values have a stronger colour."""
    rows, columns = cells.values.shape
    names, left = panel.y.lanes, _left_of(panel.y.lanes)
    cell = max(10.0, min(72.0, (WIDTH - left - _RIGHT) / max(columns, 1)))
    line, largest = 26, float(cells.values.max(initial=0.0)) or 1.0
    body = []
    for row in range(rows):
        y = top + 4 + row * line
        body.append(text(left - 8, y + 17, names[row], "", "end"))
        for column, value in enumerate(cells.values[row].tolist()):
            x, share = left + column * cell, value / largest
            tip = f"{names[row]}, {panel.x.label} {panel.x.lanes[column]}: {cells.tip(row, column)}"
            body.append(
                f'<rect class="heat" x="{x:.1f}" y="{y}" width="{cell - 2:.1f}" height="{line - 2}" rx="2" '
                f'style="fill-opacity:{share:.3f}"><title>{escape(tip)}</title></rect>'
            )
            if cell >= 34:
                words, style = f"{value:.2f}" if value < 10 else f"{value:.0f}", "on-heat" if share > 0.55 else ""
                body.append(text(x + cell / 2 - 1, y + 17, words, style, "middle"))
    bottom, right = top + 4 + rows * line, left + columns * cell
    labels = [ending(one) for one in panel.x.lanes]
    room = max(26, 8 + 6 * max(map(len, labels), default=0))
    for column in range(0, columns, max(1, math.ceil(room / cell))):
        body.append(text(left + (column + 0.5) * cell - 1, bottom + 14, labels[column], "faint", "middle"))
    body.append(text((left + right) / 2, bottom + 30, panel.x.label, "faint", "middle"))
    return body, right + _RIGHT, bottom + 38


def _paint_tiles(panel: Panel, tiles: Tiles, top: float) -> tuple[list[str], float, float]:
    """Boxes in cells; a row is as high as its fullest cell needs."""
    wide, row_of, y = WIDTH / len(panel.x.lanes), panel.y, top + 32.0
    body = []
    for index, name in enumerate(panel.x.lanes):
        body.append(tile(index * wide + 2, top + 4, wide - 4, 20, "#eceff1"))
        body.append(text((index + 0.5) * wide, top + 18, name, "bold", "middle"))
    for lane, (name, note) in enumerate(zip(row_of.lanes, row_of.notes, strict=True)):
        chosen = np.flatnonzero(tiles.y == lane)
        strong, count = lane in row_of.headings, [0] * len(panel.x.lanes)
        inside = []
        for index in chosen.tolist():
            column = int(tiles.x[index])
            left = column * wide + 8 + (count[column] % _ACROSS) * (_TILE + 3)
            inside.append((index, left, y + 26 + (count[column] // _ACROSS) * 26))
            count[column] += 1
        height = 30 + 26 * max(1, -(-max(count) // _ACROSS))
        body.append(tile(1, y, WIDTH - 2, height, edge=(COLOURS["bad"], 2) if strong else ("#c4c4c4", 1)))
        body.append(text(8, y + 17, f"{name}, {note}", "bold" if strong else ""))
        for index, left, upper in inside:
            body += _paint_tile(tiles, index, left, upper)
        y += height + 6
    return body, WIDTH, y + 4


def _paint_tile(tiles: Tiles, index: int, x: float, y: float) -> Iterator[str]:
    fill, ink = bucket_colour(float(tiles.shade[index]), 2)
    share, role = float(tiles.filled[index]), tiles.edges[index]
    yield tile(x, y, _TILE * share, 22, fill)
    edge = (COLOURS[role], 3) if role else ("#808080", 1)
    yield tile(x, y, _TILE, 22, edge=edge, tip=tiles.tips[index].replace("\t", ": "))
    yield text(x + _TILE / 2, y + 15, tiles.texts[index][-1], "", "middle", ink if share > 0.5 else INK)


def _paint_spans(panel: Panel, top: float) -> tuple[list[str], float, float]:
    """Bars from one time to another, on lanes that shrink if there are many; one path for all bars of a kind."""
    lanes, heads = panel.y.headed, np.isin(np.arange(len(panel.y.lanes)), panel.y.headings)
    room = 606 - heads.sum() * (_HEADING + _GAP)
    line = int(min(max(room // max((~heads).sum(), 1), 3), 16))
    bottoms = np.cumsum(np.where(heads, _HEADING + _GAP, line)) - _GAP
    bottoms = bottoms[bottoms <= _MOST_HEIGHT]
    tops = top + bottoms - np.where(heads, _HEADING, line)[: len(bottoms)]
    low, most = panel.x.low, float(panel.x.top or 1.0)
    plot = _Plot(_LANES_LEFT, top, WIDTH - _LANES_LEFT - _RIGHT, float(bottoms[-1]) + _GAP, most - low)
    marks = round_between(low, most, 9)
    body = [f'<path class="grid" d="{"".join(f"M{plot.x(at - low):.1f} {top}V{plot.bottom}" for at, _ in marks)}"/>']
    body += _lane_names(lanes[: len(tops)], heads[: len(tops)], tops, line)
    for spans in (mark for mark in panel.marks if isinstance(mark, Spans)):
        body += _paint_span(spans, plot, low, tops, np.where(heads, _HEADING, line))
    for rule in (mark for mark in panel.marks if isinstance(mark, Rule)):
        first, last = rule.lanes
        if last < len(tops):
            path = f"M{plot.x(rule.x - low):.1f} {tops[first]:g}V{tops[last] + line:g}"
            body.append(f'<path class="role-{rule.role}-line" stroke-dasharray="1 3" d="{path}"/>')
    body.append(f'<path class="axis" d="M{plot.left} {plot.bottom:.0f}H{WIDTH - _RIGHT}"/>')
    body += [text(plot.x(at - low), plot.bottom + 15, words, "faint", "middle") for at, words in marks]
    body.append(text(plot.left + plot.width / 2, plot.bottom + 31, panel.x.label, "faint", "middle"))
    bottom = plot.bottom + 38
    if len(tops) < len(lanes):
        ranks = [lanes[index] for index in panel.y.headings]
        cut = ranks[int(heads[: len(tops) + 1].sum()) - 1]
        body.append(text(plot.left, bottom + 12, f"cut: {cut} to {ranks[-1]} are not drawn"))
        bottom += 18
    return body, WIDTH, bottom


def _lane_names(names: Sequence[str], heads: Any, tops: Any, line: int) -> Iterator[str]:
    """The names of headings, and of as many other lanes as fit."""
    every, count = -(-13 // line), 0
    for name, head, y in zip(names, heads, tops, strict=True):
        count = 0 if head else count + 1
        if head:
            yield text(4, y + 13, name, "bold")
        elif (count - 1) % every == 0:
            label = name if line >= 12 else name.split()[-1]
            yield text(_LANES_LEFT - 6, y + line / 2 + 4, label, "faint", "end")


def _pattern(mark: _Named) -> str:
    """The attribute that fills spans with the pattern of their role, if it has one."""
    pattern = PATTERNS.get(mark.role) if isinstance(mark, Spans) else None
    return f" style='fill:url(#{pattern})'" if pattern in ("dots", "hatch") else ""


def _paint_span(spans: Spans, plot: _Plot, low: float, tops: Any, heights: Any) -> Iterator[str]:
    """One path for all bars, and the texts that fit into them."""
    chosen = spans.lane < len(tops)
    lane, begin, end = spans.lane[chosen], spans.begin[chosen], spans.end[chosen]
    if not len(lane):
        return
    x = plot.x(np.clip(begin - low, 0, plot.most))
    width = np.maximum(plot.x(np.clip(end - low, 0, plot.most)) - x, 0.8)
    height = heights[lane] - np.where(heights[lane] >= 5, 1, 0)
    thin = np.maximum(1, heights[lane] // 5) if spans.thin else height
    boxes = zip(x.tolist(), (tops[lane] + height - thin).tolist(), width.tolist(), thin.tolist(), strict=True)
    path = "".join(f"M{left:.1f} {y:g}h{wide:.1f}v{high:g}h-{wide:.1f}z" for left, y, wide, high in boxes)
    yield f'<path class="role-{spans.role}" d="{path}"{_pattern(spans)}/>'
    for words, left, wide, y in zip(
        np.array(spans.texts)[chosen] if spans.texts else (), x, width, tops[lane], strict=False
    ):
        if 6.4 * len(words) + 8 < wide:
            yield text(left + 4, y + 13, words)
