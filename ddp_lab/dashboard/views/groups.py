"""Collectives by group: a lane for each rank of each process group, over the newest time; in numbers and as a scene."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...formatting import ms, rate, size
from ...timeline import collective_summary
from ...timeline.collective_summary import GroupFacts
from ...timeline.tables.collectives import purpose_of
from ...timeline.tables.span_columns import Columns
from ...timeline.timeline import Timeline
from ..paint.palette import LABELS
from ..scene import Axis, Block, Panel, Scene, Spans, Table
from .view import Reported, Selection, View

__all__ = ["GroupLanes", "Groups", "group_lanes", "groups_scene"]

_NEWEST = 2_000  # operations of a rank that are looked at
_WINDOW = 60  # operations of the busiest rank that are drawn
_MOST_ROWS = 50
_EMPTY = "no collective has been recorded yet"
_TRANSFER = "in flight"
_ROLES = {"bad": "not ended, or failed", "waiting": LABELS["waiting"], "reducing": _TRANSFER}  # as they are painted


class Groups(View):
    """The operations of the process groups."""

    name = "groups"
    title = "Collectives by group"
    about = "Every collective, send and receive of every process group, from any source: who was last, how fast it was."
    question = "Who is late"
    steps = model = False
    also = ()
    pixels = (170, 20)

    def facts(self, timeline: Timeline, chosen: Selection) -> GroupLanes:
        return group_lanes(timeline, chosen.last_steps)

    def scene(self, facts: GroupLanes) -> Scene:
        return groups_scene(facts)

    def blocks(self, facts: GroupLanes) -> Sequence[Block]:
        scene = self.scene(facts)
        return super().blocks(facts) if scene.empty else [*facts.words, scene, *([scene.table] if scene.table else ())]

    def words(self, timeline: Timeline, facts: GroupLanes) -> str:
        return timeline.group_summary()

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported | None:
        scene = self.scene(group_lanes(timeline, of_each=None))
        caption = (
            "Every collective, send and receive, from any source: the newest ones of the recording. The table sums "
            "up each group."
        )
        return None if scene.empty else Reported(self.title, caption, scene, style="step")


@dataclass(frozen=True)
class GroupLanes:
    """What is drawn: lanes from top to bottom, a heading above those of each group.

    Attributes:
        lanes: their names.
        headings: places of the headings among them.
        notes: what a reader is told about each lane; "" for nothing.
        lane, begin, end, role, row: of each span: its lane, milliseconds since the first one, key of `_ROLES`, and the
            operation as a row of `columns`.
        columns: the operations.
        facts: of each group.
        words: sentences about them.
    """

    lanes: list[str]
    headings: list[int]
    notes: list[str]
    lane: npt.NDArray[np.int64]
    begin: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    role: npt.NDArray[Any]
    row: npt.NDArray[np.int64]
    columns: Columns
    facts: Sequence[GroupFacts]
    words: Sequence[str]

    def lines(self, row: int) -> list[str]:
        """A tooltip: what is known about one operation."""
        told = {name: values[row] for name, values in self.columns.items()}
        peer = f" with rank {told['peer']}" if told["peer"] >= 0 else ""
        lines = [f"rank {told['rank']}: {told['operation']} {told['sequence']:,}{peer}"]
        what = (size(float(told["bytes"])), told["dtype"], told["reduction"], purpose_of(self.columns, row))
        lines.append(", ".join(str(one) for one in what if one))
        if told["place"]:
            lines.append(str(told["place"]) + (f" in {told['function']}" if told["function"] else ""))
        if told["last_rank"] >= 0 and told["ranks"] > 1:
            lines.append(f"last to enter: rank {told['last_rank']}; this rank waited {ms(float(told['wait_ms']))}")
        if told["transfer_ms"] == told["transfer_ms"]:
            lines.append(
                f"{_TRANSFER}: {ms(float(told['transfer_ms']))}, {rate(float(told['bus_gb_s']))} over each link"
            )
        if told["waited_ms"] > 0:
            lines.append(f"a thread waited {ms(float(told['waited_ms']))} for it")
        return lines if told["state"] == "complete" else [*lines, f"state: {told['state']}"]


def group_lanes(timeline: Timeline, newest: int | None = None, of_each: int | None = _NEWEST) -> GroupLanes:
    """Reads a timeline.

    Args:
        timeline: the source of the operations.
        newest: how many operations of the busiest rank to draw; None for the default.
        of_each: how many of each rank to sum up; None for all.
    """
    columns = timeline.collective_columns(of_each)
    facts = collective_summary.group_facts(columns, timeline.groups())
    said = collective_summary.words(facts, columns, timeline.forgotten_collectives(of_each))
    lanes, headings, notes, lane_of = _lanes(facts, columns)
    shown, origin = _window(columns, newest or _WINDOW)
    entered, ended = columns["entered_ns"][shown], columns["ended_ns"][shown]
    latest = max(int(entered.max(initial=0)), int(ended.max(initial=0)))
    known = columns["last_rank"][shown] >= 0
    wait = np.where(known, np.nan_to_num(columns["wait_ms"][shown]), 0.0)
    begin, last = np.maximum(entered - origin, 0) / 1e6, np.maximum((entered - origin) / 1e6 + wait, 0)
    done, unseen = (columns["state"][shown] == state for state in ("complete", "unseen"))
    end = np.where(ended > 0, (ended - origin) / 1e6, (latest - origin) / 1e6)
    lane = np.array([lane_of[group, rank] for group, rank in _pairs(columns, shown)], np.int64)
    parts = [
        (known & (wait > 0) & (last > begin), begin, np.minimum(last, end), "waiting"),
        (done, np.where(known, np.minimum(last, end), begin), end, "reducing"),
        (~done & ~unseen, np.where(known, last, begin), np.maximum(end, begin), "bad"),
    ]
    of = [np.flatnonzero(chosen) for chosen, *_ in parts]
    return GroupLanes(
        lanes=lanes,
        headings=headings,
        notes=notes,
        lane=np.concatenate([lane[one] for one in of]),
        begin=np.concatenate([left[one] for one, (_, left, _, _) in zip(of, parts, strict=True)]),
        end=np.concatenate([right[one] for one, (_, _, right, _) in zip(of, parts, strict=True)]),
        role=np.repeat(np.array([role for *_, role in parts], object), [len(one) for one in of]),
        row=np.concatenate([shown[one] for one in of]),
        columns=columns,
        facts=facts,
        words=said,
    )


def _pairs(columns: Columns, rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    return list(zip(columns["group"][rows].tolist(), columns["rank"][rows].tolist(), strict=True))


def _lanes(
    facts: Sequence[GroupFacts], columns: Columns
) -> tuple[list[str], list[int], list[str], dict[tuple[int, int], int]]:
    lanes: list[str] = []
    headings, notes, lane_of = [], [], {}
    for one in facts:
        headings.append(len(lanes))
        lanes.append(str(one.group))
        notes.append("no rate yet" if one.bus_gb_s != one.bus_gb_s else f"{rate(one.bus_gb_s)} over each link")
        present = np.unique(columns["rank"][columns["group"] == one.group.group]).tolist()
        for rank in present:
            lane_of[one.group.group, rank] = len(lanes)
            lanes.append(f"rank {rank}")
            is_last = rank == one.last_rank and one.late_ms >= 0.1
            notes.append(f"last in {100 * one.last_share:.0f} %" if is_last else "")
    return lanes, headings, notes, lane_of


def _window(columns: Columns, newest: int) -> tuple[npt.NDArray[np.int64], int]:
    """Rows of the newest time, in which the busiest rank has so many operations; its begin in ns."""
    firsts = []
    for rank in np.unique(columns["rank"]).tolist():
        entered = columns["entered_ns"][columns["rank"] == rank]
        firsts.append(int(np.sort(entered)[max(0, len(entered) - newest)]))
    begin = max(firsts, default=0)
    known = np.isin(columns["group"], np.unique(columns["group"][columns["group"] >= 0]))
    reaches = (columns["entered_ns"] >= begin) | (columns["ended_ns"] > begin) | (columns["state"] == "running")
    shown = np.flatnonzero(known & reaches)
    return shown, begin


def groups_scene(found: GroupLanes) -> Scene:
    """Returns the lanes with their spans, and a table of the groups."""
    if not len(found.row):  # none, or none whose group is known
        return Scene("Collectives by group", empty=_EMPTY)
    spans = []
    for role, name in _ROLES.items():
        of = np.flatnonzero(found.role == role)
        if len(of):
            tips = ["\n".join(found.lines(row)) for row in found.row[of].tolist()]
            spans.append(Spans(name, role, found.lane[of], found.begin[of], found.end[of], tips=tips))
    top = float(found.end.max(initial=0.0)) or 1.0
    x = Axis("milliseconds", top=1.02 * top)
    return Scene(
        "Collectives by group: the newest operations of each rank",
        (Panel(x, Axis("", found.lanes, headings=found.headings, notes=found.notes), spans),),
        Table(_HEAD, _table(found.facts), "Process groups"),
        summary=" ".join(found.words),
    )


_HEAD = ("group:", "backend:", "operations:", "bytes:", "last rank", "last, %", "late ms", "in flight ms", "GB/s (bus)")


def _table(facts: Sequence[GroupFacts]) -> list[list[object]]:
    return [
        [
            str(one.group),
            one.group.backend,
            ", ".join(f"{count:,} {name}" for name, count in one.operations.items()),
            size(one.bytes),
            one.last_rank if one.last_rank >= 0 else float("nan"),
            100 * one.last_share if one.last_rank >= 0 else float("nan"),
            one.late_ms,
            one.transfer_ms,
            one.bus_gb_s,
        ]
        for one in facts[:_MOST_ROWS]
    ]
