"""What a view shows, in data units: no pixels, no colours. Painters make SVG and plotly figures of it.

A role is a key of `paint.palette.COLOURS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Bars", "Cells", "Line", "Mark", "Numbers", "Panel", "Rule", "Scene", "Spans", "Table", "Values"]

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """One direction of a panel.

    Attributes:
        label: what it shows, with its unit.
        lanes: names of the places 0, 1, ... along it; none: numbers.
        headings: which lanes stand above those of a group.
        low: where its numbers begin.
        top: where its numbers end, what is larger is cut; None: where the largest mark ends.
    """

    label: str = ""
    lanes: Sequence[str] = ()
    headings: Sequence[int] = ()
    low: float = 0.0
    top: float | None = None


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, each on top of those before it in the panel at the same place.

    Attributes:
        name: in the legend.
        at: place of each, shape ``[bars]``: a step, or the number of a lane.
        size: how long each is, NaN: not drawn.
        texts: at their ends; none: none.
        tips: what each is, in words; none: its name and size.
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
        name: in the legend; "": not there, the texts say it.
        lane, begin, end: shape ``[spans]``.
        thin: a line at the lower edge of the lane, above what else is there.
        texts: written into those that have room; none: none.
        tips: what each is, in lines; none: none.
    """

    name: str
    role: str
    lane: Numbers
    begin: Values
    end: Values
    thin: bool = False
    texts: Sequence[str] = ()
    tips: Sequence[str] = ()


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
    """A table of cells, the stronger the larger they are: shape ``[rows, columns]``, ≥ 0, in `unit`."""

    values: Values
    unit: str


@dataclass(frozen=True)
class Rule:
    """A line across the panel, or its lanes from one to another, at one place of the x axis, with a word."""

    role: str
    x: float
    text: str
    lanes: tuple[int, int] = (0, 0)


Mark = Bars | Spans | Line | Cells | Rule


@dataclass(frozen=True)
class Panel:
    """Marks on two axes. Bars stand on the x axis, or lie on the y axis where that has lanes.

    Attributes:
        share: of the scene's height, where it has several panels; they have one x axis.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    share: float = 1.0


@dataclass(frozen=True)
class Table:
    """The scene's numbers; columns whose name ends in a colon hold text."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Scene:
    """One view.

    Attributes:
        title: what is shown.
        panels: one below the other.
        table: the same numbers as text.
        summary: what the numbers say, in a sentence or two.
        empty: why there is nothing to show; then the rest has no meaning.
    """

    title: str
    panels: Sequence[Panel] = ()
    table: Table | None = None
    summary: str = ""
    empty: str = ""
