"""A map of the model: nested cells from left to right, with width by size and colour by bucket; pure functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ...formatting import counted
from .layout_words import BUCKETS, LayoutWords, layout_words

__all__ = ["Cell", "cell_label", "cell_rows", "map_cells", "map_words"]


@dataclass(frozen=True)
class Cell:
    """One module or parameter.

    Attributes:
        depth, rows: its first row, and how many rows it fills (a parameter: all the rest).
        begin, end: from 0 to 1.
        name: the text in the cell, without the names of the modules around it.
        path: its qualified name.
        parameter: index of the parameter, -1 for a module.
        bucket: the bucket that holds all of it, -1 if there are several.
    """

    depth: int
    rows: int
    begin: float
    end: float
    name: str
    path: str
    parameter: int
    bucket: int


@dataclass
class _Node:
    name: str = ""
    path: str = ""
    children: dict[str, _Node] = field(default_factory=dict)
    weight: int = 0
    buckets: set[int] = field(default_factory=set)
    parameter: int = -1

    @property
    def depth(self) -> int:
        """The number of rows that it needs."""
        return 1 + max((child.depth for child in self.children.values()), default=0)


def map_cells(assignment: dict[str, Any], *, equal: bool = False) -> tuple[list[Cell], int]:
    """Returns the cells of a model, each before those inside it, and how many rows they need.

    Args:
        assignment: description of the buckets (see tutorials/site/descriptions.md).
        equal: give all parameters the same width; by default the width is in proportion to the bytes.
    """
    top = _joined(_tree(assignment, equal))
    depth = top.depth
    cells: list[Cell] = []

    def place(node: _Node, level: int, begin: float, scale: float) -> float:
        end = begin + node.weight * scale
        leaf = node.parameter >= 0
        name = node.name or assignment["module"]
        bucket = next(iter(node.buckets)) if len(node.buckets) == 1 else -1
        cells.append(Cell(level, depth - level if leaf else 1, begin, end, name, node.path, node.parameter, bucket))
        for child in node.children.values():
            begin = place(child, level + 1, begin, scale)
        return end

    place(top, 0, 0.0, 1 / max(top.weight, 1))
    return cells, depth


def cell_label(cell: Cell, idle: Collection[int], words: LayoutWords = BUCKETS) -> tuple[str, str]:
    """Returns the text of a cell (for a module, only its name), and the bucket of its parameters.

    Args:
        cell: of the map.
        idle: parameters without a gradient.
        words: for the layout. Parameter groups are modules, which the map names already.
    """
    without = cell.parameter in idle
    name = f"layer {cell.name}" if cell.name.isdigit() else cell.name
    where = f"several {words.unit}s" if cell.bucket < 0 else words.where(cell.bucket)
    where += ", gradient never ready: unused" if without else ""
    said = "unused" if without else words.tag(cell.bucket)
    return name if cell.parameter < 0 or not said else f"{name} · {said}", where


def map_words(assignment: dict[str, Any], idle: Collection[int]) -> tuple[str, str]:
    """Returns how many buckets the map shows and in which order, and what its colours and hatching mean.

    Args:
        assignment: description of the buckets.
        idle: parameters without a gradient.
    """
    words = layout_words(assignment)
    order = words.placed(bool(assignment.get("rebuilt")))
    hatched = f"; hatched: {counted(len(idle), 'unused parameter')}" if idle else ""
    return f"{counted(len(assignment['buckets']), words.unit)}, {order}", words.dark + hatched


def cell_rows(assignment: dict[str, Any]) -> list[list[Any]]:
    """Returns the cells in the form that `buckets.js` reads.

    Returns:
        Rows of name, path, parameter, bucket, depth, begin and end by bytes, begin and end with equal parameters.
    """
    (cells, _), (equal, _) = map_cells(assignment), map_cells(assignment, equal=True)
    return [
        [one.name, one.path, one.parameter, one.bucket, one.depth]
        + [round(at, 7) for at in (one.begin, one.end, other.begin, other.end)]
        for one, other in zip(cells, equal, strict=True)
    ]


def _tree(assignment: dict[str, Any], equal: bool) -> _Node:
    bucket_of = {index: one["bucket"] for one in assignment["buckets"] for index in one["parameters"]}
    root = _Node()
    for parameter in assignment["parameters"]:
        bucket = bucket_of.get(parameter["index"], -1)
        weight = 1 if equal else max(parameter["bytes"], 1)
        parts = parameter["name"].split(".")
        nodes = [root]
        for depth, name in enumerate(parts):
            path = ".".join(parts[: depth + 1])
            nodes.append(nodes[-1].children.setdefault(name, _Node(name, path)))
        nodes[-1].parameter = parameter["index"]
        for node in nodes:
            node.weight += weight
            node.buckets.add(bucket)
    return root


def _joined(node: _Node) -> _Node:
    """Merges each module that has a module as its only child with that child."""
    children = list(node.children.values())
    if len(children) == 1 and children[0].parameter < 0 and node.name:
        only = children[0]
        name = f"{node.name}.{only.name}"
        return _joined(_Node(name, only.path, only.children, only.weight, only.buckets, only.parameter))
    node.children = {child.name: _joined(child) for child in children}
    return node
