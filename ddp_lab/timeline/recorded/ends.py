"""How the ranks of a recorded run ended, and why: the source of `ddp_lab.diagnosis.crashes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...diagnosis.crashes import Entered, Failure, Group, RankAtEnd, diagnose_crash, without_noise
from ...diagnosis.rules import Diagnosis
from ...diagnosis.snapshot import Steps
from ...protocol.black_box import BlackBox, with_ranks_of_groups
from ...protocol.events import OF_GROUPS, Batch, Kind
from ...protocol.journal import ENDED_WITH_RUN, EXITED
from ..event_tables import TimelineModel
from ..tables.collectives import GroupInfo, purpose_of
from ..tables.span_columns import Columns

__all__ = ["cause_of", "failure_of"]

_PARTED = ("all_gather", "gather", "scatter")  # their bytes are those of all ranks' parts
_ENDED = ("complete", "unseen")  # states of a collective
_GOOD = ("finished", "saved")
_INTERRUPTED = "interrupted"
_VERBS = {"finished": "", "exited": "", "failed": "failed: ", "killed": "was ", "ended": ""}  # before how it ended


def failure_of(timeline: TimelineModel) -> Failure | None:
    """How the run failed, or what its ranks called that does not fit; None if all ranks finished it and called the
    same, or if it was interrupted.

    Args:
        timeline: of one life of each rank.
    """
    said = {one.rank: str(one.status.get("state", "")) for one in timeline.ranks()}
    is_good = all(how in _GOOD for how in said.values())
    if not said or (is_good and "saved" in said.values()) or _INTERRUPTED in said.values():
        return None
    last = {one.rank: str(one.status.get("last_words", "")) for one in timeline.ranks()}
    ends = {rank: _state(how) for rank, how in said.items()}
    ranks, cause = _explained(timeline, ends, last, only_different=is_good)
    if is_good:
        return None if cause is None else Failure((), cause)
    return Failure(tuple(f"rank {one.rank} {_VERBS[one.state]}{one.how}" for one in ranks), cause)


def cause_of(left: Mapping[int, BlackBox], ends: Mapping[int, tuple[str, str]], since_ns: int) -> Diagnosis | None:
    """Why ranks that left this in a cell have ended, or wait; None if nothing more is known than how they did.

    Args:
        left: rank -> its last events.
        ends: rank -> its state and how it ended, in words: see `RankAtEnd`.
        since_ns: what they recorded before, on the host's monotonic clock, is left out.
    """
    timeline, last_words = TimelineModel(), {}
    for rank, one in left.items():
        found = one.events[one.events["host_ns"] >= since_ns]
        used = found["process_group"][found["kind"] >= OF_GROUPS]  # not those of before a rejoin, of the same name
        for description in with_ranks_of_groups(one.descriptions):
            if description.get("type") != "group" or description["index"] in used:
                timeline.describe(rank, description)
        timeline.extend(Batch(rank, 0, int(found["sequence"][0]) if len(found) else 0, 0, found))
        if not (found["kind"] == Kind.COLLECTIVE_ENTERED).any():
            last_words[rank] = "it had entered no collective in this cell"
    return _explained(timeline, ends, last_words)[1]


def _explained(
    timeline: TimelineModel,
    ends: Mapping[int, tuple[str, str]],
    last_words: Mapping[int, str],
    *,
    only_different: bool = False,
) -> tuple[list[RankAtEnd], Diagnosis | None]:
    """The ranks at their end, and the cause; nothing if `only_different` and all called the same."""
    columns = timeline.collective_columns()
    rows = np.flatnonzero((columns["peer"] < 0) & ~_directed(columns))
    if only_different:  # of these, there may be many
        rows = _different(columns, rows)
        if not len(rows):
            return [], None
    groups = {one.group: one for one in timeline.groups()}
    entered = _entered(columns, rows, groups, {one.reducer: one.module for one in timeline.reducers()})
    steps = _steps(timeline)
    buffers = timeline.buffer_shapes()
    messages = _messages(columns)
    ranks = [
        RankAtEnd(
            rank,
            *end,
            entered=entered.get(rank, {}),
            steps=steps.get(rank, {}),
            last_words=last_words.get(rank, ""),
            buffers=buffers.get(rank, {}),
            messages=messages.get(rank, ()),
        )
        for rank, end in ends.items()
    ]
    return ranks, diagnose_crash(ranks, {number: _group(one) for number, one in groups.items()})


def _state(how: str) -> tuple[str, str]:
    """The state, and how it ended in words."""
    if how in _GOOD:
        return "finished", "finished the program"
    if how == EXITED:
        return "exited", how
    if how in ("killed", ENDED_WITH_RUN):
        return "ended", ENDED_WITH_RUN
    return ("killed", how) if how.startswith("killed by") else ("failed", without_noise(how))


def _group(one: GroupInfo) -> Group:
    return Group("" if one.description == "default_pg" or one.name == "0" else one.title, one.ranks)


def _different(columns: Columns, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Of these rows, those of which ranks entered something else under the same number."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((columns["sequence"][rows], columns["group"][rows]))]
    known = {name: columns[name][rows] for name in ("group", "sequence", "operation", "bytes", "dtype")}
    changes = {name: known[name][1:] != known[name][:-1] for name in known}
    begins = changes["group"] | changes["sequence"]
    differs = ~begins & (changes["operation"] | changes["bytes"] | changes["dtype"])
    number = np.concatenate([[0], np.cumsum(begins)])  # of what was entered under one number
    return rows[np.isin(number, number[1:][differs])]


def _entered(
    columns: Columns, rows: npt.NDArray[np.intp], groups: Mapping[int, GroupInfo], modules: Mapping[int, str]
) -> dict[int, dict[int, dict[int, Entered]]]:
    """Rank -> group -> number in the group, from 1 -> collective."""
    made: dict[int, dict[int, dict[int, Entered]]] = {}
    for row in rows.tolist():
        told: dict[str, Any] = {
            name: columns[name][row]
            for name in ("operation", "bytes", "dtype", "place", "function", "module", "use", "reducer", "state")
        }
        name, model = str(told["operation"]), int(told["reducer"])
        parts = len(groups[int(columns["group"][row])].ranks) if name.startswith(_PARTED) else 1
        purpose, sharded = purpose_of(columns, row), model >= 0 and bool(told["use"])
        if sharded:
            purpose = f"{told['module'] or modules.get(model, '?')} ({told['use']})"
        elif model in modules:
            purpose = f"{purpose} of {modules[model]}"
        of_group = made.setdefault(int(columns["rank"][row]), {}).setdefault(int(columns["group"][row]), {})
        of_group[int(columns["sequence"][row]) + 1] = Entered(
            name=name,
            bytes=int(told["bytes"]) // max(parts, 1),
            dtype=str(told["dtype"]),
            place=str(told["place"]),
            function=str(told["function"]),
            purpose=purpose,
            model=model,
            ended=str(told["state"]) in _ENDED,
            sharded=sharded,
        )
    return made


def _messages(columns: Columns) -> dict[int, list[Entered]]:
    """Rank -> the messages that it has sent or received, or was to."""
    made: dict[int, list[Entered]] = {}
    for row in np.flatnonzero((columns["peer"] >= 0) & _directed(columns)).tolist():
        one = Entered(
            name=str(columns["operation"][row]),
            bytes=int(columns["bytes"][row]),
            dtype=str(columns["dtype"][row]),
            place=str(columns["place"][row]),
            function=str(columns["function"][row]),
            purpose="",
            model=-1,
            ended=str(columns["state"][row]) in _ENDED,
            peer=int(columns["peer"][row]),
        )
        made.setdefault(int(columns["rank"][row]), []).append(one)
    return made


def _directed(columns: Columns) -> npt.NDArray[np.bool_]:
    return np.array([one == "send" or one.startswith("recv") for one in columns["operation"].tolist()], bool)


def _steps(timeline: TimelineModel) -> dict[int, dict[int, Steps]]:
    """Rank -> model -> its steps."""
    modules = {one.reducer: one.module for one in timeline.reducers()}
    chunks: dict[int, list[npt.NDArray[np.void]]] = {}
    for rank, events in timeline.since(0)[0]:
        chunks.setdefault(rank, []).append(events)
    made: dict[int, dict[int, Steps]] = {}
    for rank, parts in chunks.items():
        events = np.concatenate(parts)
        for model, module in modules.items():
            own = events[(events["reducer"] == model) & (events["kind"] < Kind.COLLECTIVE_ENTERED)]
            begun = own["step"][own["kind"] == Kind.BACKWARD_BEGIN]
            ended = own["step"][own["kind"] == Kind.BACKWARD_END]
            if len(begun):
                steps, counts = np.unique(own["step"][own["kind"] == Kind.FORWARD_END], return_counts=True)
                made.setdefault(rank, {})[model] = Steps(
                    module=module,
                    backwards=int(begun.max()) + 1,
                    ended=int(ended.max()) + 1 if len(ended) else 0,
                    forwards=dict(zip(steps.tolist(), counts.tolist(), strict=True)),
                )
    return made
