"""Small charts as inline SVG that takes its colours from the page's style sheet (classes, no colours of its own)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

__all__ = ["Series", "heat", "legend", "rows", "stacked"]

_Values = npt.NDArray[np.float64]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 920, 62, 14, 12, 40
_MOST_COLUMNS = 400


@dataclass(frozen=True)
class Series:
    """One colour of a chart.

    Attributes:
        name: in the legend.
        style: class in the style sheet.
        values: milliseconds; NaN counts as 0.
    """

    name: str
    style: str
    values: _Values


def _svg(width: float, height: float, label: str, body: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:.0f}px;min-width:{min(width, 620):.0f}px">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_marks(top: float, count: int = 5) -> list[float]:
    """0 and round numbers up to `top`."""
    if top <= 0:
        return [0.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [mark * unit for mark in range(math.floor(top / unit + 1e-9) + 1)]


def legend(series: Sequence[Series]) -> str:
    """The names beside their colours, as HTML."""
    entries = "".join(f'<li><i class="{one.style}"></i>{escape(one.name)}</li>' for one in series)
    return f'<ul class="legend">{entries}</ul>'


def stacked(x: npt.NDArray[np.int64], series: Sequence[Series], label: str, axis: str) -> str:
    """Areas on top of each other over steps; of more than 400 steps, neighbours are drawn as their median.

    Args:
        x: numbers of the steps.
        series: lowest first, each with a value for each step.
        label: what a screen reader says.
        axis: name of the horizontal axis.
    """
    height = 260
    every = -(-len(x) // _MOST_COLUMNS)
    firsts = np.arange(0, len(x), every)
    binned = [np.array([np.nanmedian(np.nan_to_num(one.values[i : i + every])) for i in firsts]) for one in series]
    levels = np.cumsum([np.zeros(len(firsts)), *binned], axis=0)
    # A few long steps (the first ones) must not flatten all others.
    top = float(min(levels[-1].max(), 1.6 * np.quantile(levels[-1], 0.95))) or 1.0
    plot_w, plot_h = _WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    edges = _LEFT + plot_w * np.concatenate([firsts, [len(x)]]) / len(x)

    def y(value: float) -> float:
        return _TOP + plot_h * (1 - min(value, top) / top)

    body = []
    for mark in _round_marks(top):
        body.append(f'<path class="grid" d="M{_LEFT} {y(mark):.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(_text(_LEFT - 6, y(mark) + 4, f"{mark:g}", "faint", "end"))
    for number, one in enumerate(series):
        over = "".join(
            f"L{edges[i]:.1f} {y(v):.1f}L{edges[i + 1]:.1f} {y(v):.1f}" for i, v in enumerate(levels[number + 1])
        )
        under = "".join(
            f"L{edges[i + 1]:.1f} {y(levels[number][i]):.1f}L{edges[i]:.1f} {y(levels[number][i]):.1f}"
            for i in reversed(range(len(firsts)))
        )
        body.append(f'<path class="{one.style}" d="M{over[1:]}{under}z"><title>{escape(one.name)}</title></path>')
    bottom = height - _BOTTOM
    body.append(f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        index = min(int(share * len(x)), len(x) - 1)
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        body.append(_text(_LEFT + plot_w * share, bottom + 16, str(int(x[index])), "faint", anchor))
    body.append(_text(_LEFT + plot_w / 2, height - 6, axis, "faint", "middle"))
    body.append(f'<text class="faint" transform="translate(14 {_TOP + plot_h / 2}) rotate(-90)" '
                'text-anchor="middle">ms</text>')  # fmt: skip
    if top < levels[-1].max():
        body.append(_text(_WIDTH - _RIGHT, _TOP - 3, f"longest: {levels[-1].max():.0f} ms", "faint", "end"))
    return _svg(_WIDTH, height, label, body)


def heat(values: _Values, row_names: Sequence[str], label: str, axis: str) -> str:
    """A table of cells, whose colour is the stronger the larger they are.

    Args:
        values: shape ``[rows, columns]``, ≥ 0.
        row_names: of each row.
        label: what a screen reader says.
        axis: name of the horizontal axis; columns are numbered from 0.
    """
    rows_, columns = values.shape
    cell = max(10.0, min(72.0, (_WIDTH - _LEFT - _RIGHT) / max(columns, 1)))
    line, largest = 26, float(values.max(initial=0.0)) or 1.0
    every = max(1, math.ceil(26 / cell))
    body = []
    for row in range(rows_):
        top = 4 + row * line
        body.append(_text(_LEFT - 8, top + 17, row_names[row], "", "end"))
        for column in range(columns):
            value, left = float(values[row, column]), _LEFT + column * cell
            share = value / largest
            shown = f"{row_names[row]}, {axis} {column}: {value:.2f} ms"
            body.append(
                f'<rect class="heat" x="{left:.1f}" y="{top}" width="{cell - 2:.1f}" height="{line - 2}" rx="2" '
                f'style="fill-opacity:{share:.3f}"><title>{escape(shown)}</title></rect>'
            )
            if cell >= 34:
                style = "on-heat" if share > 0.55 else ""
                body.append(_text(left + cell / 2 - 1, top + 17, f"{value:.2f}" if value < 10 else f"{value:.0f}",
                                  style, "middle"))  # fmt: skip
    bottom = 4 + rows_ * line
    for column in range(0, columns, every):
        body.append(_text(_LEFT + column * cell + cell / 2 - 1, bottom + 14, str(column), "faint", "middle"))
    width = max(_LEFT + columns * cell + _RIGHT, 240.0)
    body.append(_text((_LEFT + width) / 2, bottom + 30, axis, "faint", "middle"))
    return _svg(width, bottom + 38, label, body)


def rows(names: Sequence[str], series: Sequence[Series], notes: Sequence[str], label: str) -> str:
    """Horizontal bars of stacked parts, one for each name.

    Args:
        names: of the rows.
        series: from left to right, each with a value for each row.
        notes: text after each bar.
        label: what a screen reader says.
    """
    line = 22 if len(names) <= 20 else 14
    totals = np.sum([np.nan_to_num(one.values) for one in series], axis=0)
    top = float(totals.max(initial=0.0)) or 1.0
    plot = _WIDTH - _LEFT - 30 - 130
    left = _LEFT + 30
    height = _TOP + len(names) * line + _BOTTOM
    bottom = height - _BOTTOM
    body = []
    for mark in _round_marks(top):
        x = left + plot * mark / top
        body.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        body.append(_text(x, bottom + 16, f"{mark:g}", "faint", "middle"))
    for row, name in enumerate(names):
        y, x = _TOP + row * line, float(left)
        body.append(_text(left - 8, y + line / 2 + 3, name, "", "end"))
        for one in series:
            value = float(np.nan_to_num(one.values[row]))
            width = plot * value / top
            body.append(
                f'<rect class="{one.style}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{line - 4}">'
                f"<title>{escape(f'{name}: {one.name} {value:.2f} ms')}</title></rect>"
            )
            x += width
        body.append(_text(x + 6, y + line / 2 + 3, notes[row], "faint"))
    body.append(_text(left + plot / 2, height - 6, "ms (median)", "faint", "middle"))
    return _svg(_WIDTH, height, label, body)
