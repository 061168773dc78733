"""The content of a view in data units, without pixels or colours. Painters make SVG and plotly figures of it.

A role is a key of `paint.palette.COLOURS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Advice",
    "Arrows",
    "Axis",
    "Band",
    "Bars",
    "Block",
    "Cells",
    "Dots",
    "Line",
    "Mark",
    "Notice",
    "Numbers",
    "Panel",
    "Rule",
    "Scene",
    "Spans",
    "Table",
    "Tiles",
    "Values",
    "robust_top",
    "round_between",
]

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """One direction of a panel.

    Attributes:
        label: what it shows, with its unit.
        lanes: names of the places 0, 1, ... along it; empty: numbers.
        headings: which lanes are headings of the lanes below them.
        low: its smallest number.
        top: its largest number, larger values are cut; None: the end of the largest mark.
        log: its scale is logarithmic; `low` and `top` are powers of ten.
        notes: a remark on each lane, "" for none; on headings only where there is little room.
        tips: what a tooltip says of each place, in lines: of a lane as a whole, of a step below the numbers of the
            marks; a tab divides a line into a name and a value.
        unit: after a number of it in a tooltip.
        ends: the last number at each place of an axis of steps, if a place stands for several.
        chooses: what a click on a place chooses in a page: ``"step"``, ``"bucket"`` (its index) or nothing.
        marked: the step that is marked; None: the one that a page shows.
    """

    label: str = ""
    lanes: Sequence[str] = ()
    headings: Sequence[int] = ()
    low: float = 0.0
    top: float | None = None
    log: bool = False
    notes: Sequence[str] = ()
    tips: Sequence[str] = ()
    unit: str = ""
    ends: Sequence[int] = ()
    chooses: str = ""
    marked: int | None = None

    @property
    def headed(self) -> list[str]:
        """The lanes; headings with their notes."""
        noted = {at: f"{self.lanes[at]}: {self.notes[at]}" for at in self.headings if self.notes and self.notes[at]}
        return [noted.get(at, name) for at, name in enumerate(self.lanes)]


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, each stacked on those before it in the panel at the same place.

    Attributes:
        name: in the legend.
        at: the place of each, shape ``[bars]``: a step, or the number of a lane.
        size: the length of each; NaN: not drawn.
        texts: at their ends; may be empty.
        tips: their tooltips; if empty, the name and the size.
        about: what the name means, where there is room for it.
    """

    name: str
    role: str
    at: Numbers
    size: Values
    texts: Sequence[str] = ()
    tips: Sequence[str] = ()
    about: str = ""


@dataclass(frozen=True)
class Spans:
    """Bars of one kind from one number of the x axis to another.

    Attributes:
        name: in the legend; "": not in the legend, the texts name it.
        lane, begin, end: shape ``[spans]``.
        thin: a line at the lower edge of the lane, on top of other spans.
        texts: written into the spans that have room; may be empty.
        tips: their tooltips; may be empty.
        about: what the name means, where there is room for it.
    """

    name: str
    role: str
    lane: Numbers
    begin: Values
    end: Values
    thin: bool = False
    texts: Sequence[str] = ()
    tips: Sequence[str] = ()
    about: str = ""


@dataclass(frozen=True)
class Line:
    """A line through points, with gaps where `y` is NaN; both of shape ``[points]``.

    Attributes:
        dash: lengths of strokes and gaps in pixels; empty: a whole line.
        about: what the name means, where there is room for it.
    """

    name: str
    role: str
    x: Numbers
    y: Values
    width: float = 1.5
    dash: Sequence[int] = ()
    about: str = ""


@dataclass(frozen=True)
class Band:
    """The area between two lines through points, without those where either is NaN; all of shape ``[points]``."""

    name: str
    role: str
    x: Numbers
    low: Values
    high: Values
    about: str = ""


@dataclass(frozen=True)
class Dots:
    """Dots on lanes, which only pages paint.

    Attributes:
        name: in the legend; "": not in the legend, the lanes are named.
        shape: which of eight: circle, square, triangle, diamond, each filled, then hollow.
        x, lane: shape ``[dots]``.
        spread: the dots of a lane lie below each other, the last one on top.
    """

    name: str
    role: str
    shape: int
    x: Values
    lane: Numbers
    spread: bool = False


@dataclass(frozen=True)
class Tiles:
    """Boxes in the cells of two axes of lanes, in each from left to right and from top to bottom, with a line around
    each row: a strong one around headings of the y axis. Lanes have their notes beside their names.

    Attributes:
        x, y: the cell of each, shape ``[tiles]``.
        shade: its place in a ramp of colours, 0 (dark) to 1.
        filled: which share of it is coloured.
        texts: of each, of which the first one that fits is written.
        tips: their tooltips.
        edges: the role of its strong outline, or "".
        faint: of each row whether its boxes are pale.
    """

    x: Numbers
    y: Numbers
    shade: Values
    filled: Values
    texts: Sequence[Sequence[str]]
    tips: Sequence[str]
    edges: Sequence[str]
    faint: Sequence[bool]


@dataclass(frozen=True)
class Arrows:
    """Arrows from lanes of the y axis to others; only pages paint them. `name`: above them."""

    name: str
    role: str
    begin: Numbers
    end: Numbers


@dataclass(frozen=True)
class Cells:
    """A heat map; larger values have a stronger colour.

    Attributes:
        values: ≥ 0, in `unit`, shape ``[rows, columns]``.
        name: what a value is.
        others: names and values of what a tooltip shows of a cell instead; shapes ``[rows, columns]`` or ``[columns]``.
    """

    values: Values
    unit: str
    name: str = ""
    others: Sequence[tuple[str, Values]] = ()

    def tip(self, row: int, column: int) -> str:
        """What a tooltip shows of a cell."""
        if not self.others:
            return f"{self.values[row, column]:.2f} {self.unit}"
        found = ((name, np.broadcast_to(values, self.values.shape)[row, column]) for name, values in self.others)
        return ", ".join(f"{name} {value:.3g}" for name, value in found)


@dataclass(frozen=True)
class Rule:
    """A labelled line at one place of the x axis, across the panel or some of its lanes."""

    role: str
    x: float
    text: str
    lanes: tuple[int, int] = (0, 0)


def robust_top(values: Values) -> float:
    """Returns the top of a scale: a few long steps (the first ones) must not flatten all others."""
    known = values[np.isfinite(values)]
    return float(min(known.max(), 1.6 * np.quantile(known, 0.95))) or 1.0 if len(known) else 1.0


def round_between(low: float, high: float, count: int, log: bool = False) -> list[tuple[float, str]]:
    """Returns about so many round numbers between two, with as many digits as they need.

    Args:
        low: the least.
        high: the most.
        count: of numbers.
        log: powers of ten, of which `low` and `high` are two.
    """
    if log:
        least, most = round(math.log10(low)), round(math.log10(high))
        return [(10.0**power, f"{10.0**power:g}") for power in range(least, most + 1, -(-(most - least + 1) // count))]
    if not high > low:
        return [(low, f"{low:g}")]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / count * 0.999)
    digits = max(0, -math.floor(math.log10(unit) + 1e-9))
    numbers = range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)
    return [(one * unit, f"{one * unit:.{digits}f}" if digits <= 4 else f"{one * unit:.3g}") for one in numbers]


Mark = Bars | Spans | Line | Band | Dots | Tiles | Arrows | Cells | Rule


@dataclass(frozen=True)
class Panel:
    """Marks on two axes. Bars are upright, or horizontal if the y axis has lanes.

    Attributes:
        share: share of the scene's height if it has several panels; they share one x axis.
        heading: above it; only pages show it.
        total: what the sum of the bars at a place is called in a tooltip; "": it is not told.
        more: what a page calls the lanes after the first one, which it shows once a reader asks for them; "": always.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    share: float = 1.0
    heading: str = ""
    total: str = ""
    more: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers; columns whose names end in a colon hold text.

    Attributes:
        head: the names of the columns.
        rows: their cells; a row that begins with spaces belongs to the one above.
        caption: what it shows.
        notes: what each column means; may be empty.
        folded: a page shows it once it is opened.
        warned: which rows say that something is wrong.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    notes: Sequence[str] = ()
    folded: bool = False
    warned: Sequence[int] = ()


@dataclass(frozen=True)
class Notice:
    """Sentences that something is wrong, one a line."""

    text: str


@dataclass(frozen=True)
class Advice:
    """What to change.

    Attributes:
        kind: of finding.
        gain_percent: the estimated saving in percent of the step.
        title, evidence, remedy: in sentences.
        view: where it can be seen; "": nowhere else.
        rank, bucket, step: at which place of that view; None: at none.
    """

    kind: str
    gain_percent: float
    title: str
    evidence: str
    remedy: str
    view: str = ""
    rank: int | None = None
    bucket: int | None = None
    step: int | None = None

    @property
    def saving(self) -> str:
        """The saving as text."""
        gain = self.gain_percent
        return f"{gain:.0f} %" if gain >= 10 else f"{gain:.1f} %" if gain >= 0.1 else "< 0.1 %"

    @property
    def remedy_parts(self) -> list[str]:
        """The remedy as texts in turn: words, and calls and settings, which are code."""
        return _CODE.split(self.remedy)


_CODE = re.compile(r"([\w.]+\((?:[^()]|\([^()]*\))*\)|[\w.]+=(?:\[[^\]]*\]|[\w.\-]*\w)|\b\w+_\w+\b)")


@dataclass(frozen=True)
class Scene:
    """One view.

    Attributes:
        title: the title.
        panels: from top to bottom.
        table: the same numbers as text.
        summary: one or two sentences about the numbers.
        empty: why there is nothing to show; if set, the rest is ignored.
    """

    title: str
    panels: Sequence[Panel] = ()
    table: Table | None = None
    summary: str = ""
    empty: str = ""


Block = str | Notice | Scene | Table | Sequence[Advice]
"""A part of a view, from top to bottom: a sentence, a notice, a picture, a table, or what to change."""
