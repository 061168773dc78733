"""The figures of a report, with captions and with their numbers as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...timeline.timeline import Timeline
from ..paint import scene_svg
from ..views.catalogue import VIEWS
from ..views.view import Reported, Selection
from .data import ReportData

__all__ = ["Figure", "figures"]


@dataclass(frozen=True)
class Figure:
    """A picture (SVG) with its title, caption and legend (HTML), and its numbers as a table: column names and rows."""

    title: str
    caption: str
    picture: str
    legend: str = ""
    style: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


def figures(timeline: Timeline, found: ReportData | None = None) -> Iterator[Figure]:
    """Yields the figures for which something was recorded; None: those that need no model."""
    chosen = Selection() if found is None else Selection(found.reducer, found.last_steps, step=found.drawn[0])
    for view in VIEWS.values():
        shown = view.reported(timeline, chosen) if found is not None or not view.model else None
        if shown is not None:
            yield _figure(shown)


def _figure(shown: Reported) -> Figure:
    scene = shown.scene
    if scene.empty:
        return Figure(shown.title, scene.empty, "")
    table = None if scene.table is None else (scene.table.head, scene.table.rows)
    picture, legend = scene_svg.picture(scene), scene_svg.legend(scene)
    return Figure(shown.title, shown.caption, picture, legend, shown.style, table)
