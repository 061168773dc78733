"""What the operations of each process group say: counts, bytes, who was last; in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formatting import counted, enumeration, label_of, ms, rate, size
from .tables.collectives import GroupInfo, purpose_of
from .tables.span_columns import Columns

__all__ = ["GroupFacts", "group_facts", "words"]

_TOGETHER_MS = 0.1
_MOST_GROUPS, _MOST_OPEN, _MOST_KINDS = 6, 3, 3


@dataclass(frozen=True)
class GroupFacts:
    """The recorded operations of one process group.

    Attributes:
        group: which.
        operations: how often each was entered, by all ranks together counted once; the most frequent first.
        bytes: of all of them (of input or output, whichever is more), counted once.
        last_rank: who was last in most of the collectives that all ranks have entered; -1 if there are none.
        last_share: in which share of them, 0 to 1.
        late_ms: by how much after the first rank, median over those.
        transfer_ms: from the last rank's entering to the end, median.
        bus_gb_s: over each link of a ring, in all of that time.
        running: places (in the columns) of operations that have not ended.
        mismatched: numbers of collectives that ranks entered as different operations.
    """

    group: GroupInfo
    operations: dict[str, int]
    bytes: int
    last_rank: int
    last_share: float
    late_ms: float
    transfer_ms: float
    bus_gb_s: float
    running: tuple[int, ...]
    mismatched: tuple[int, ...]


def group_facts(columns: Columns, groups: Sequence[GroupInfo]) -> list[GroupFacts]:
    """Sums up each group that has operations, those with the most bytes first.

    Args:
        columns: of `Timeline.collectives`.
        groups: of `Timeline.groups`.
    """
    found = []
    for group in groups:
        rows = np.flatnonzero(columns["group"] == group.group)
        if len(rows):
            found.append(_facts(group, {name: values[rows] for name, values in columns.items()}, rows))
    return sorted(found, key=lambda one: (-one.bytes, one.group.group))


def _facts(group: GroupInfo, columns: Columns, rows: npt.NDArray[np.int64]) -> GroupFacts:
    operation, sequence = columns["operation"], columns["sequence"]
    directed = columns["peer"] >= 0
    # Once for each operation: a collective where its first rank entered it, a send or receive on each side.
    _, once = np.unique(sequence[~directed], return_index=True)
    counted_once = np.concatenate([np.flatnonzero(~directed)[once], np.flatnonzero(directed)])
    names, counts = np.unique(operation[counted_once].astype(str), return_counts=True)
    many = sorted(zip(names.tolist(), counts.tolist(), strict=True), key=lambda one: (-one[1], one[0]))
    together = counted_once[columns["last_rank"][counted_once] >= 0]
    last, lead = columns["last_rank"][together], -1
    if len(last) and len(group.ranks) > 1:
        lead = int(np.bincount(last).argmax())
    mine = (columns["last_rank"] == lead) & (lead >= 0)
    ended = np.isfinite(columns["transfer_ms"])
    moved = columns["bus_gb_s"][ended] * columns["transfer_ms"][ended]
    return GroupFacts(
        group=group,
        operations=dict(many),
        bytes=int(columns["bytes"][counted_once].sum()),
        last_rank=lead,
        last_share=float((last == lead).mean()) if lead >= 0 else 0.0,
        late_ms=_median(columns["late_ms"][mine & (columns["rank"] == lead)]),
        transfer_ms=_median(columns["transfer_ms"]),
        bus_gb_s=float(moved.sum() / columns["transfer_ms"][ended].sum()) if ended.any() else float("nan"),
        running=tuple(rows[columns["state"] == "running"].tolist()),
        mismatched=_mismatched(sequence[~directed], operation[~directed]),
    )


def _mismatched(sequence: npt.NDArray[np.int64], operation: npt.NDArray[Any]) -> tuple[int, ...]:
    if not len(sequence):
        return ()
    order = np.argsort(sequence, kind="stable")
    number, what = sequence[order], operation[order]
    differs = (number[1:] == number[:-1]) & (what[1:] != what[:-1])
    return tuple(np.unique(number[1:][differs]).tolist())


def _median(values: npt.NDArray[Any]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def words(found: Sequence[GroupFacts], columns: Mapping[str, npt.NDArray[Any]], older: int = 0) -> list[str]:
    """Sentences about the groups; empty if there are none.

    Args:
        found: of `group_facts`.
        columns: those that they are made from.
        older: how many operations they leave out.
    """
    if not found:
        return []
    said = [_of_group(one) for one in found[:_MOST_GROUPS]]
    if len(found) > _MOST_GROUPS:
        said.append(f"{counted(len(found) - _MOST_GROUPS, 'other group')} moved less.")
    for one in found:
        said += [_mismatch(one, columns, number) for number in one.mismatched[:1]]
    running = [row for one in found for row in one.running]
    said += [_open(columns, row) for row in running[:_MOST_OPEN]]
    if len(running) > _MOST_OPEN:
        more = len(running) - _MOST_OPEN
        said.append(f"{counted(more, 'further operation')} {'has' if more == 1 else 'have'} not ended.")
    if older:
        said.append(f"These are the newest operations: {older:,} older ones are left out here.")
    return said


def _of_group(one: GroupFacts) -> str:
    kinds = list(one.operations.items())
    told = [f"{count:,} {name}" for name, count in kinds[:_MOST_KINDS]]
    if len(kinds) > _MOST_KINDS:
        told.append(f"{sum(count for _, count in kinds[_MOST_KINDS:]):,} others")
    text = (
        f"{str(one.group)[:1].upper()}{str(one.group)[1:]}, {one.group.backend}: {enumeration(told)}, {size(one.bytes)}"
    )
    if one.transfer_ms == one.transfer_ms:
        text += f"; {ms(one.transfer_ms)} once all ranks have entered ({rate(one.bus_gb_s)} over each link)"
    if one.last_rank < 0:
        return f"{text}."
    if not one.late_ms >= _TOGETHER_MS:
        return f"{text}; the ranks enter within {ms(one.late_ms)} of each other (median)."
    return f"{text}; rank {one.last_rank} was last in {100 * one.last_share:.0f} %, by {ms(one.late_ms)} (median)."


def _mismatch(one: GroupFacts, columns: Mapping[str, npt.NDArray[Any]], number: int) -> str:
    rows = np.flatnonzero((columns["group"] == one.group.group) & (columns["sequence"] == number))
    rows = rows[columns["peer"][rows] < 0]
    by_operation: dict[str, list[int]] = {}
    for row in rows.tolist():
        by_operation.setdefault(f"{columns['operation'][row]}{_at(columns, row)}", []).append(int(columns["rank"][row]))
    told = enumeration([f"{label_of(set(ranks))} {what}" for what, ranks in by_operation.items()])
    return f"Collective mismatch in {one.group}: as its collective #{number + 1:,}, {told}."


def _open(columns: Mapping[str, npt.NDArray[Any]], row: int) -> str:
    what, rank = str(columns["operation"][row]), int(columns["rank"][row])
    peer = f" with rank {columns['peer'][row]}" if columns["peer"][row] >= 0 else ""
    return f"Rank {rank} entered {what}{peer}{_at(columns, row)}; it has not ended."


def _at(columns: Mapping[str, npt.NDArray[Any]], row: int) -> str:
    place, purpose = str(columns["place"][row]), purpose_of(columns, row)
    return (f" for {purpose}" if purpose else "") + (f" at {place}" if place else "")
