"""The content of a view in data units, without pixels or colours. Painters make SVG and plotly figures of it.

A role is a key of `paint.palette.COLOURS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Axis",
    "Bars",
    "Cells",
    "Line",
    "Mark",
    "Numbers",
    "Panel",
    "Rule",
    "Scene",
    "Spans",
    "Table",
    "Values",
    "robust_top",
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
        notes: a remark on each lane, "" for none; on headings only where there is little room.
        unit: after a number of it in a tooltip.
        ends: the last number at each place of an axis of steps, if a place stands for several.
        chooses: what a click on a place chooses in a page: ``"step"``, ``"bucket"`` (its index) or nothing.
    """

    label: str = ""
    lanes: Sequence[str] = ()
    headings: Sequence[int] = ()
    low: float = 0.0
    top: float | None = None
    notes: Sequence[str] = ()
    unit: str = ""
    ends: Sequence[int] = ()
    chooses: str = ""

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
    """

    name: str
    role: str
    at: Numbers
    size: Values
    texts: Sequence[str] = ()
    tips: Sequence[str] = ()


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
    """A line through points, with gaps where `y` is NaN; both of shape ``[points]``."""

    name: str
    role: str
    x: Numbers
    y: Values
    width: float = 1.5


@dataclass(frozen=True)
class Cells:
    """A heat map: values ≥ 0 in `unit`, shape ``[rows, columns]``; larger values have a stronger colour; `name`: what
    a value is."""

    values: Values
    unit: str
    name: str = ""


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


Mark = Bars | Spans | Line | Cells | Rule


@dataclass(frozen=True)
class Panel:
    """Marks on two axes. Bars are upright, or horizontal if the y axis has lanes.

    Attributes:
        share: share of the scene's height if it has several panels; they share one x axis.
        heading: above it; only pages show it.
        total: what the sum of the bars at a place is called in a tooltip; "": it is not told.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    share: float = 1.0
    heading: str = ""
    total: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers; columns whose names end in a colon hold text.

    Attributes:
        head: the names of the columns.
        rows: their cells; a row that begins with spaces belongs to the one above.
        caption: what it shows.
        notes: what each column means; may be empty.
        folded: a page shows it once it is opened.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    notes: Sequence[str] = ()
    folded: bool = False


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
