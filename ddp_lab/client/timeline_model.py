"""What a timeline holds: appended by the receiver thread, read by any other, bounded, losses counted."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import events
from . import span_columns
from .event_store import EventStore
from .reducer_book import FLEETING, ReducerBook
from .span_columns import Columns, TableView
from .step_table import StepTable
from .timeline_records import Inspection, RankStatus, ReducerInfo

__all__ = ["TimelineModel"]


class _Rank:
    """What the timeline knows of one rank (guarded by the timeline's lock)."""

    def __init__(self) -> None:
        self.sessions: list[int] = []  # of its processes, one after the other
        self.next = 0  # sequence number of the next event
        self.events = self.dropped = self.last_event_ns = 0
        self.step = -1
        self.status: dict[str, Any] = {}

    @property
    def life(self) -> int:
        """How many processes it had before this one."""
        return max(0, len(self.sessions) - 1)


class TimelineModel:
    """The appending side of `Timeline`, and access to what it holds without pandas."""

    def __init__(self, max_steps: int = 1_000, max_events: int = 1_000_000) -> None:
        self._max_steps, self._max_events = max_steps, max_events
        self._lock = threading.RLock()
        self.version = 0
        """Grows whenever something was appended: a view that has drawn this version has nothing to do."""
        self._start()

    def _start(self) -> None:
        self._store = EventStore(self._max_events)
        self._book = ReducerBook()
        self._ranks: dict[int, _Rank] = {}
        self._tables: dict[tuple[int, int], StepTable] = {}  # (reducer, rank)
        self._latest: dict[int, int] = {}  # reducer -> time of its latest event
        self._described: list[tuple[int, dict[str, Any]]] = []

    # ---- appending --------------------------------------------------------------------------------------

    def extend(self, batch: events.Batch) -> None:
        """Takes one batch; events that it has had already (sent again after a rejoin) are left out."""
        with self._lock:
            rank = self._enter(batch.rank, batch.session)
            if rank is None:
                return
            self.version += 1
            taken = batch.events
            repeated = rank.next - batch.first
            if repeated > 0:
                taken = taken[repeated:]
            elif repeated < 0:
                rank.dropped -= repeated
            rank.next = max(rank.next, batch.first + len(batch.events))
            if not len(taken):
                return
            rank.events += len(taken)
            self._append(batch.rank, self._renumbered(batch.rank, rank.life, taken))

    def _append(self, rank: int, taken: npt.NDArray[np.void]) -> None:
        known = self._ranks[rank]
        known.last_event_ns = max(known.last_event_ns, int(taken["host_ns"].max()))
        self._store.append(rank, taken)
        for reducer in np.unique(taken["reducer"]).tolist():
            if reducer >= 0:
                self._extend_table(reducer, rank, taken[taken["reducer"] == reducer])

    def _extend_table(self, reducer: int, rank: int, taken: npt.NDArray[np.void]) -> None:
        table = self._tables.get((reducer, rank))
        if table is None:
            table = self._tables[reducer, rank] = StepTable(self._max_steps)
        table.extend(taken)
        self._ranks[rank].step = table.last_step
        self._latest[reducer] = max(self._latest.get(reducer, 0), int(taken["host_ns"].max()))

    def _renumbered(self, rank: int, life: int, taken: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Replaces the rank's numbers of reducers and marks by those of this timeline."""
        changes: list[tuple[str, npt.NDArray[np.bool_], int]] = []
        for reducer in np.unique(taken["reducer"]).tolist():
            number = self._book.number(rank, life, reducer) if reducer >= 0 else reducer
            if number != reducer:
                changes.append(("reducer", taken["reducer"] == reducer, number))
        marks = taken["kind"] == events.Kind.MARK
        for index in np.unique(taken["parameter"][marks]).tolist():
            changes.append(("parameter", marks & (taken["parameter"] == index), self._book.mark(rank, life, index)))
        if not changes:
            return taken
        changed: npt.NDArray[np.void] = taken.copy()
        for field, where, number in changes:
            changed[field][where] = number
        return changed

    def _enter(self, number: int, session: int | None) -> _Rank | None:
        """The rank, after beginning a new life if the session is new; None for a message of a former life."""
        rank = self._ranks.setdefault(number, _Rank())
        if session is None or (rank.sessions and session == rank.sessions[-1]):
            return rank
        if session in rank.sessions:
            return None
        rank.sessions.append(session)
        rank.next = rank.events = rank.dropped = 0
        rank.status = {}
        return rank

    def describe(self, rank: int, description: dict[str, Any]) -> None:
        """Takes one description of a rank (assignment, mark, inspection); it may name its ``"session"``."""
        with self._lock:
            known = self._enter(rank, description.get("session"))
            if known is not None:
                self.version += 1
                made = self._book.describe(rank, known.life, description)
                if made.get("type") not in FLEETING:
                    self._described.append((rank, made))

    def set_status(self, rank: int, status: dict[str, Any]) -> None:
        """Takes a rank's status: ``state``, ``cell``, ``pid``, ... (see `RankStatus`); merged into the last."""
        with self._lock:
            known = self._enter(rank, status.get("session"))
            if known is not None:
                self.version += 1
                known.status.update(status)

    def clear(self) -> None:
        """Forgets all events, descriptions and ranks."""
        with self._lock:
            self.version += 1
            self._start()

    def own_numbers(self, reducer: int) -> dict[int, int]:
        """rank -> what that rank itself calls this reducer, for the living ranks that have it."""
        with self._lock:
            found = {rank: self._book.own_number(rank, known.life, reducer) for rank, known in self._ranks.items()}
            return {rank: own for rank, own in found.items() if own is not None}

    # ---- who and what -----------------------------------------------------------------------------------

    def ranks(self) -> list[RankStatus]:
        """One record for each rank that has sent anything."""
        with self._lock:
            return [
                RankStatus(
                    rank=number,
                    session=rank.sessions[-1] if rank.sessions else None,
                    pid=rank.status.get("pid"),
                    state=rank.status.get("state", "unknown"),
                    cell=rank.status.get("cell"),
                    step=rank.step,
                    last_event_ns=rank.last_event_ns,
                    events=rank.events,
                    dropped=rank.dropped,
                    status=dict(rank.status),
                )
                for number, rank in sorted(self._ranks.items())
            ]

    def reducers(self) -> list[ReducerInfo]:
        """One record for each model, the most recently active last."""
        with self._lock:
            made = [self._info(reducer) for reducer in {*self._book.reducers(), *self._latest}]
        return sorted(made, key=lambda one: (one.last_event_ns, one.reducer))

    def _info(self, reducer: int) -> ReducerInfo:
        ranks = tuple(sorted(rank for of, rank in self._tables if of == reducer))
        generations = self._book.generations(reducer)
        module, buckets = "?", 0
        if generations:
            newest = self._book.assignment(reducer)
            module, buckets, ranks = newest["module"], len(newest["buckets"]), tuple(newest["group_ranks"])
        tables = [table for (of, _), table in self._tables.items() if of == reducer]
        buckets = buckets or max((table.buckets.shape[1] for table in tables), default=0)
        last = max((table.last_step for table in tables), default=-1)
        return ReducerInfo(reducer, module, ranks, generations, buckets, last, self._latest.get(reducer, 0))

    def assignment(self, reducer: int, generation: int | None = None) -> dict[str, Any]:
        """Which parameters each bucket holds: the description that the ranks sent (see ARCHITECTURE.md).

        Args:
            reducer: which model.
            generation: which assignment; None for the newest.

        Raises:
            ValueError: there is no such assignment (yet).
        """
        with self._lock:
            try:
                return self._book.assignment(reducer, generation)
            except KeyError:
                known = {number: self._book.generations(number) for number in self._book.reducers()}
                asked = f"reducer {reducer}, generation {'newest' if generation is None else generation}"
                raise ValueError(f"no assignment of {asked}; known (reducer: generations): {known}") from None

    def inspections(self, reducer: int) -> list[Inspection]:
        """What the ranks answered when asked for their gradients' norms and checksums, oldest step first."""
        with self._lock:
            return self._book.inspections(reducer, self._info(reducer).ranks)

    # ---- times ------------------------------------------------------------------------------------------

    def since(self, cursor: int) -> tuple[list[tuple[int, npt.NDArray[np.void]]], int, int]:
        """Raw events that arrived since an earlier call.

        Args:
            cursor: 0, or the second value that the previous call returned.

        Returns:
            Pairs of rank and events (dtype `ddp_lab.events.DTYPE`) in the order of arrival, the next cursor, and
            how many events in between are no longer kept.
        """
        with self._lock:
            return self._store.since(cursor)

    def marks(self) -> list[tuple[int, int, str]]:
        """(rank, host time in ns, name) of every mark among the raw events that are kept."""
        with self._lock:
            chunks, _, _ = self._store.since(self._store.start)
            names = list(self._book.mark_names)
        found = []
        for rank, chunk in chunks:
            marked = chunk[(chunk["kind"] == events.Kind.MARK) & (chunk["parameter"] >= 0)]
            found += [(rank, int(event["host_ns"]), names[event["parameter"]]) for event in marked]
        return found

    def mark_names(self) -> list[str]:
        """Names of the marks; the field ``parameter`` of a mark's event is an index of it."""
        with self._lock:
            return list(self._book.mark_names)

    def views(self, reducer: int | None = None, last_steps: int | None = None) -> list[TableView]:
        """Copies of the tables behind `spans`, `steps` and `sync`, for drawing without pandas."""
        with self._lock:
            chosen = [key for key in sorted(self._tables) if reducer is None or key[0] == reducer]
            steps: dict[int, npt.NDArray[np.int64] | None] = {}
            for of in {of for of, _ in chosen}:
                held = [self._tables[key].step[self._tables[key].rows(last_steps)] for key in chosen if key[0] == of]
                steps[of] = None if last_steps is None else np.unique(np.concatenate(held))[-last_steps:]
            return [span_columns.view(rank, of, self._tables[of, rank], steps[of]) for of, rank in chosen]

    def columns(self, reducer: int | None = None, last_steps: int | None = None) -> Columns:
        """The columns of `spans` as numpy arrays: for live views."""
        with self._lock:
            views, sizes = self.views(reducer, last_steps), self._book.sizes()
        return span_columns.span_columns(views, sizes)

    def _chosen(self, reducer: int | None) -> ReducerInfo | None:
        """The record of a reducer, for None of the most recently active one; None if there is none."""
        known = [one for one in self.reducers() if one.last_step >= 0 and reducer in (None, one.reducer)]
        return known[-1] if known else None

    def _bucket_of(self, reducer: int) -> dict[int, int]:
        if not self._book.generations(reducer):
            return {}
        buckets = self._book.assignment(reducer)["buckets"]
        return {parameter: one["bucket"] for one in buckets for parameter in one["parameters"]}
