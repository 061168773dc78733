"""The words of views for the parts in which a model's gradients are reduced, and for the collective that does it.

A DistributedDataParallel has buckets, which have numbers. A model with `fully_shard` or `replicate` has parameter
groups, which have the names of their modules. A page gets the words with each bucket layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...timeline.model_kinds import KINDS
from ..paint.palette import TITLES

__all__ = ["BUCKETS", "LayoutWords", "layout_words"]

_WORDS: Final[dict[str, dict[str, Any]]] = {
    name: {"exposed": TITLES["exposed"], **kind.words} for name, kind in KINDS.items()
}
"""Kind of a model -> its words; `reductions` by the number of dimensions of its mesh, the last one for more."""


@dataclass(frozen=True)
class LayoutWords:
    """The words for one bucket layout.

    Attributes:
        unit: what its gradients are reduced in: ``"bucket"`` or ``"parameter group"``.
        column: the title of a column with their names.
        order: the order of their numbers.
        exposed: what exposed communication is.
        reduction: the collective that reduces them.
        grouped: whether they are parameter groups.
        modules: number -> name of the module; empty for buckets.
    """

    unit: str
    column: str
    order: str
    exposed: str
    reduction: str
    grouped: bool
    modules: Mapping[int, str]

    def name(self, number: int) -> str:
        """``"bucket 2"``, or the name of the module."""
        return self.modules.get(number, f"{self.unit} {number}")

    def where(self, number: int) -> str:
        """``"bucket 2"``, or ``"parameter group blocks.1"``."""
        return f"{self.unit} {self.cell(number)}"

    def cell(self, number: int) -> str:
        """The same in a column whose title is `column`."""
        return self.modules.get(number, str(number))

    @property
    def head(self) -> str:
        """`column` as the head of a `Table`."""
        return f"{self.column}:" if self.grouped else self.column

    def as_dict(self) -> dict[str, Any]:
        """Returns the words for a page, which has the names of the modules from the layout."""
        words = {name: getattr(self, name) for name in ("unit", "column", "order", "exposed", "reduction", "grouped")}
        return {**words, "title": self.title}

    @property
    def title(self) -> str:
        """The unit as the first word of a sentence."""
        return self.unit[:1].upper() + self.unit[1:]


def layout_words(assignment: Mapping[str, Any] | None) -> LayoutWords:
    """Returns the words for a bucket layout.

    Args:
        assignment: its description (see tutorials/site/descriptions.md); None or empty if it is not known.
    """
    described = assignment or {}
    kind, buckets = str(described.get("kind", "")), described.get("buckets", ())
    words = _WORDS.get(kind, _WORDS[""])
    dimensions = max([len(one.get("mesh", ())) for one in buckets], default=0)
    of_mesh = words["reductions"]
    return LayoutWords(
        words["unit"],
        words["column"],
        words["order"],
        words["exposed"],
        of_mesh[min(max(dimensions, 1), len(of_mesh)) - 1],
        words is not _WORDS[""],
        {one["bucket"]: one["name"] for one in buckets if one.get("name")},
    )


BUCKETS: Final = layout_words(None)
"""The words for a layout that is not known."""
