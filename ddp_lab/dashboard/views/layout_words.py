"""The words of views for the parts in which a model's gradients are reduced, and for the collective that does it.

A DistributedDataParallel has buckets, which have numbers. A model with `fully_shard` or `replicate` has parameter
groups, which have the names of their modules. A page gets the words with each bucket layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from ...formatting import counted, names, rate
from ...timeline.model_kinds import ModelKind, kind_of
from ..paint.palette import TITLES

__all__ = ["BUCKETS", "LayoutWords", "layout_words"]


@dataclass(frozen=True)
class LayoutWords:
    """The words for one layout of buckets.

    Attributes:
        reduction: the collective that reduces them.
        modules: number -> name of the module; empty for buckets.
        unit: what its gradients are reduced in: ``"bucket"`` or ``"parameter group"``.
        column: the title of a column with their names.
        head: `column` as the head of a `Table`.
        order: the order of their numbers.
        exposed: what exposed communication is.
        unseen: parts of a bucket's time that no event tells.
        dark: what the dark colours of the map mean.
        speed: which bandwidth a report shows.
        falls_behind: which cell of a rank's row tells where it falls behind.
        reductions: the title of a table of them.
        holds: the heads of columns for `members`.
        page: what the dashboard's page says and shows of them, beside these; see `page_of`.
    """

    reduction: str
    modules: Mapping[int, str]
    page: Mapping[str, Any] = field(compare=False)

    unit: ClassVar[str] = "bucket"
    column: ClassVar[str] = "bucket"
    head: ClassVar[str] = "bucket"
    order: ClassVar[str] = "in launch order"
    exposed: ClassVar[str] = TITLES["exposed"]
    unseen: ClassVar[Collection[str]] = ()
    dark: ClassVar[str] = "dark: launched first"
    falls_behind: ClassVar[str] = "first cell of its row with a strong colour"
    reductions: ClassVar[str] = "Buckets (medians)"
    holds: ClassVar[Sequence[str]] = ("holds:",)

    def name(self, number: int) -> str:
        """``"bucket 2"``, or the name of the module."""
        return self.modules.get(number, f"{self.unit} {number}")

    def where(self, number: int) -> str:
        """``"bucket 2"``, or ``"parameter group blocks.1"``."""
        return f"{self.unit} {self.cell(number)}"

    def cell(self, number: int) -> str:
        """The same in a column whose title is `column`."""
        return self.modules.get(number, str(number))

    def tag(self, number: int) -> str:
        """The same beside a parameter in the map of the model; "" if the map names it already."""
        return f"b{number}"

    def placed(self, rebuilt: bool) -> str:
        """The order of their numbers in a layout that was rebuilt, or not."""
        return "rebuilt in the order of readiness" if rebuilt else "not rebuilt"

    @property
    def speed(self) -> str:
        """The bandwidth that `rates` shows, in a sentence."""
        return "the bus bandwidth: the rate over each link of a ring of these ranks"

    def rates(self, algorithm_gb_s: Sequence[float], bus_gb_s: Sequence[float]) -> list[str]:
        """The bandwidth of each beside its bar; "" where it is not known."""
        return [f"{rate(one)} (bus)" if one == one else "" for one in bus_gb_s]

    def members(self, parameters: Sequence[str]) -> list[str]:
        """What one of them holds, in columns headed by `holds`."""
        return [names(parameters, 2)]

    @classmethod
    def page_of(cls, kind: ModelKind, described: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a page says and shows of a layout.

        Texts: ``counted`` and ``arranged`` of the layout, ``origin`` of one of its buckets; ``label`` and ``size``,
        what the columns hold; ``parts``, what overlapped and exposed is; ``parameters``, the caption of its table. And
        whether ``gradients`` are recorded one by one, whether there is a bandwidth of the ``bus``, whether the user
        ``compares`` averaged gradients, and the ``views`` that only this kind of model has.
        """
        rebuilt = bool(described.get("rebuilt"))
        order = "rebuilt in the order of readiness" if rebuilt else "in reverse order of registration"
        return {
            "counted": counted(len(described.get("buckets", ())), cls.unit),
            "arranged": order if rebuilt else f"not rebuilt: {order}",
            "origin": f"buckets {order}",
            "label": "number of the bucket",
            "size": "bytes of the bucket's buffer",
            "parts": "during the backward's computation | after it",
            "parameters": "Parameters, in the order of the bucket's buffer",
            "gradients": True,
            "bus": True,
            "compares": True,
            "views": kind.views,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the words for a page, which has the names of the modules from the layout."""
        words = {name: getattr(self, name) for name in ("unit", "column", "order", "exposed", "reduction")}
        return {**words, "title": self.title, "named": bool(self.modules), **self.page}

    @property
    def title(self) -> str:
        """The unit as the first word of a sentence."""
        return self.unit[:1].upper() + self.unit[1:]


class _GroupWords(LayoutWords):
    """The words for parameter groups: they are modules, of which no single gradient is recorded."""

    unit = "parameter group"
    column = "module"
    head = "module:"
    order = "in the order of their modules"
    exposed = "the rank waits for it: it adds to the step time"
    unseen = ("filling",)
    dark = "dark: the first ones"
    falls_behind = "last cell of its row with a strong colour: the backward ends with the first module"
    reductions = "Parameter groups: reductions (medians)"
    holds = ()

    @classmethod
    def page_of(cls, kind: ModelKind, described: Mapping[str, Any]) -> dict[str, Any]:
        """The same of parameter groups."""
        return {
            **super().page_of(kind, described),
            "counted": f"{counted(len(described.get('buckets', ())), cls.unit)} of {kind.name}",
            "arranged": cls.order,
            "origin": f"parameter group of {kind.name}",
            "label": "module of the parameter group",
            "size": "bytes of its gradients",
            "parts": "the rank computes meanwhile | the rank waits",
            "parameters": "Parameters",
            "gradients": False,
            "bus": False,
            "compares": False,
        }

    def tag(self, number: int) -> str:
        """None: the map names the module."""
        return ""

    def placed(self, rebuilt: bool) -> str:
        """That of the modules."""
        return self.order

    @property
    def speed(self) -> str:
        """That of the gradients."""
        return f"the algorithm bandwidth: the bytes of the gradients divided by the time of the {self.reduction}"

    def rates(self, algorithm_gb_s: Sequence[float], bus_gb_s: Sequence[float]) -> list[str]:
        """The algorithm's."""
        return [rate(one) if one == one else "" for one in algorithm_gb_s]

    def members(self, parameters: Sequence[str]) -> list[str]:
        """Nothing: the name of the module says it."""
        return []


_OF_UNIT: Final = {one.unit: one for one in (LayoutWords, _GroupWords)}


def layout_words(assignment: Mapping[str, Any] | None) -> LayoutWords:
    """Returns the words for a bucket layout.

    Args:
        assignment: its description (see tutorials/site/descriptions.md); None or empty if it is not known.
    """
    kind, buckets = kind_of(assignment), (assignment or {}).get("buckets", ())
    dimensions = max([len(one.get("mesh", ())) for one in buckets], default=0)
    reduction = kind.reductions[min(max(dimensions, 1), len(kind.reductions)) - 1]
    words, modules = _OF_UNIT[kind.unit], {one["bucket"]: one["name"] for one in buckets if one.get("name")}
    return words(reduction, modules, words.page_of(kind, assignment or {}))


BUCKETS: Final = layout_words(None)
"""The words for a layout that is not known."""
