"""Timeline: what all ranks' events say, from batches to spans per rank, step and bucket.

The receiver thread appends (`extend`, `describe`, `set_status`); any other thread reads. Raw events are kept for
readers with a cursor and for `save`; the times of steps and buckets are kept in dense tables, which reach further
back. Everything is bounded, and what was lost is counted and shown.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import events
from ..insight import stragglers, trace_export
from . import span_columns, timeline_files, timeline_words
from .event_store import EventStore
from .reducer_book import ReducerBook
from .span_columns import Columns, TableView
from .step_table import STEP_FIELDS, StepTable
from .timeline_records import Inspection, LatePlace, RankStatus, ReducerInfo

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Inspection", "LatePlace", "RankStatus", "ReducerInfo", "Timeline"]


class _Rank:
    """What the timeline knows of one rank (guarded by the timeline's lock)."""

    def __init__(self) -> None:
        self.session: int | None = None
        self.life = -1  # how many sessions it had before this one
        self.next = 0  # sequence number of the next event
        self.events = self.dropped = self.last_event_ns = 0
        self.step = -1
        self.status: dict[str, Any] = {}


class Timeline:
    """Events of all ranks, by rank, reducer, step and bucket.

    Two models in one program are two reducers. Buckets that were assigned anew are a new generation. A rank whose
    process was replaced goes on under its number, and models that it builds then are new reducers.

    Args:
        max_steps: steps of each model to keep. 8 ranks with 50 buckets and 200 parameters take 4.9 kB each and step:
            40 MB in all for 1,000 steps.
        max_events: raw events to keep for `since` and `save`, 72 bytes each.
    """

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
            self.version += 1
            rank = self._enter(batch.rank, batch.session)
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
        changed = taken.copy()
        for field, where, number in changes:
            changed[field][where] = number
        return changed

    def _enter(self, number: int, session: int | None) -> _Rank:
        rank = self._ranks.setdefault(number, _Rank())
        if session is not None and session != rank.session:
            rank.session, rank.next, rank.events, rank.dropped = session, 0, 0, 0
            rank.life += 1
            rank.status = {}
        return rank

    def describe(self, rank: int, description: dict[str, Any]) -> None:
        """Takes one description of a rank (assignment, mark, inspection); it may name its ``"session"``."""
        with self._lock:
            self.version += 1
            life = max(0, self._enter(rank, description.get("session")).life)
            self._described.append((rank, self._book.describe(rank, life, description)))

    def set_status(self, rank: int, status: dict[str, Any]) -> None:
        """Takes a rank's status: ``state``, ``cell``, ``pid``, ... (see `RankStatus`); merged into the last."""
        with self._lock:
            self.version += 1
            self._enter(rank, status.get("session")).status.update(status)

    def clear(self) -> None:
        """Forgets all events, descriptions and ranks."""
        with self._lock:
            self.version += 1
            self._start()

    # ---- who and what -----------------------------------------------------------------------------------

    def ranks(self) -> list[RankStatus]:
        """One record for each rank that has sent anything."""
        with self._lock:
            return [
                RankStatus(
                    rank=number,
                    session=rank.session,
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

    def spans(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank, step and bucket.

        Columns: ``rank``, ``reducer``, ``process_group`` (index on that rank), ``step``, ``generation`` (of the
        assignment), ``bucket``, ``bytes``, ``n_parameters``. Host times in ns, 0 where it has not happened:
        ``backward_begin_ns``, ``first_ready_ns`` (first gradient of the bucket), ``ready_ns`` (its last one),
        ``launched_ns``, ``reduced_ns``, ``finalize_ns`` (the rank's own computation was over); device times on
        the same axis, 0 on a CPU: ``device_begin_ns``, ``device_end_ns``. Milliseconds since ``backward_begin_ns``,
        NaN where it has not happened: ``first_ready_ms``, ``ready_ms``, ``launched_ms``, ``reduced_ms``. Durations:
        ``fill_ms`` (first gradient to ready), ``all_reduce_ms`` (launched to reduced, waiting for other ranks
        included), ``device_ms``, ``hidden_ms`` and ``exposed_ms`` (parts of the collective before and after the
        end of the rank's computation, on ``clock``: "host" or "device"). ``complete``: the backward has ended.

        Args:
            reducer: which model; None for all.
            last_steps: only so many newest steps of each; None for all that are kept.
        """
        return _frame(self.columns(reducer, last_steps))

    def steps(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank and step.

        Columns: ``rank``, ``reducer``, ``step``, ``generation``, ``state`` ("running", "complete", "abandoned"),
        ``buckets``, ``bytes`` (launched), ``forward_begin_ns``, ``forward_end_ns``, ``backward_begin_ns``,
        ``finalize_ns``, ``backward_end_ns`` (host), ``step_ms`` (from the end of the step before), ``forward_ms`` (of the last
        forward before the backward), ``backward_ms``, ``compute_ms`` (the backward's own computation),
        ``communication_ms`` (at least one collective under way), of which ``hidden_ms`` under the computation and
        ``exposed_ms`` after it, on ``clock``.
        """
        return _frame(span_columns.step_columns(self.views(reducer, last_steps)))

    def sync(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Gradient sync: one row per reducer, step and bucket that all ranks have reduced.

        Columns: ``reducer``, ``step``, ``generation``, ``bucket``, ``bytes``, ``n_parameters``, ``ranks`` (number),
        ``all_reduce_ms`` (last rank's launch to last rank's reduced), ``bandwidth_gb_s`` (bytes over that time,
        10⁹ bytes), ``last_rank`` (to launch), ``late_ms`` (last launch minus first), ``wait_ms`` (dict rank ->
        ms that its launched collective waited for the last rank's), ``hidden_ms`` and ``exposed_ms`` (mean over
        the ranks). Needs one clock for all ranks: that of one host.
        """
        columns = self.columns(reducer, last_steps)
        ranks = {one.reducer: len(one.ranks) for one in self.reducers()}
        chosen = {number: ranks[number] for number in np.unique(columns["reducer"]).astype(int).tolist()}
        return _frame(span_columns.sync_columns(columns, chosen))

    def find_late(
        self, reducer: int | None = None, last_steps: int = 50, minimum_ms: float = 1.0, minimum_share: float = 0.5
    ) -> list[LatePlace]:
        """Names the ranks whose own computation falls behind, and the bucket and parameter where it does.

        Args:
            reducer: which model; None for the most recently active.
            last_steps: how many complete steps to look at.
            minimum_ms: smaller delays are taken for noise.
            minimum_share: fraction of the steps in which a rank has to be late at that place.
        """
        chosen = self._chosen(reducer)
        if chosen is None:
            return []
        with self._lock:
            views = self.views(chosen.reducer, last_steps + 1)
            bucket_of = self._bucket_of(chosen.reducer)
            names = self._book.names(chosen.reducer)
        begin, ready = _aligned(views, last_steps)
        late = stragglers.find_late(begin, ready, minimum_ns=minimum_ms * 1e6, minimum_share=minimum_share)
        return [
            LatePlace(
                rank=views[one.rank].rank,
                bucket=bucket_of.get(one.place),
                parameter=names[one.place] if 0 <= one.place < len(names) else None,
                delay_ms=one.delay_ns / 1e6,
                share=one.share,
            )
            for one in late
        ]

    def _chosen(self, reducer: int | None) -> ReducerInfo | None:
        """The record of a reducer, for None of the most recently active one; None if there is none."""
        known = [one for one in self.reducers() if one.last_step >= 0 and reducer in (None, one.reducer)]
        return known[-1] if known else None

    def _bucket_of(self, reducer: int) -> dict[int, int]:
        if not self._book.generations(reducer):
            return {}
        buckets = self._book.assignment(reducer)["buckets"]
        return {parameter: one["bucket"] for one in buckets for parameter in one["parameters"]}

    # ---- out --------------------------------------------------------------------------------------------

    def summary(self, reducer: int | None = None, last_steps: int = 200) -> str:
        """A few sentences computed from the events: what a step costs, what waited, who was late, what was lost."""
        chosen = self._chosen(reducer)
        if chosen is None:
            return timeline_words.NOTHING
        facts = timeline_words.Facts(
            info=chosen,
            steps=span_columns.step_columns(self.views(chosen.reducer, last_steps)),
            sync={name: column.to_numpy() for name, column in self.sync(chosen.reducer, last_steps).items()},
            late=self.find_late(chosen.reducer, last_steps),
            assignments={g: self.assignment(chosen.reducer, g) for g in chosen.generations},
            dropped=sum(rank.dropped for rank in self.ranks()),
        )
        return timeline_words.summary(facts)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the raw events that are kept and all descriptions to an ``.npz`` file; `load` reads it."""
        with self._lock:
            chunks, _, _ = self._store.since(self._store.start)
            described = list(self._described)
            ranks = {r.rank: {"dropped": r.dropped, "status": r.status} for r in self.ranks()}
        return timeline_files.write(Path(path), timeline_files.Saved(chunks, described, ranks))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Reads what `save` wrote (or `ddp_lab.recording.save`, for one rank).

        Raises:
            ValueError: it is no such file, or of another schema version.
        """
        saved = timeline_files.read(Path(path))
        made = cls(max_events=max(1_000_000, sum(len(events) for _, events in saved.chunks)))
        for number, about in saved.ranks.items():
            made._enter(number, 0).dropped = about["dropped"]
            made._ranks[number].status = about["status"]
        for number, description in saved.described:
            made.describe(number, description)
        for number, chunk in saved.chunks:
            made._ranks[number].events += len(chunk)
            made._append(number, chunk)
        return made

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Writes a Chrome trace (JSON) for ui.perfetto.dev: one process per rank, a track for each bucket."""
        names = {one.reducer: one.module for one in self.reducers()}
        with self._lock:
            columns, steps, marks = self.columns(), span_columns.step_columns(self.views()), self.marks()
        return timeline_files.write_json(Path(path), trace_export.chrome_trace(columns, steps, names, marks))

    def figure(self, **options: Any) -> Any:
        """The spans as a plotly figure, for reports (see `ddp_lab.widgets.figures.timeline_figure`)."""
        from ..widgets import figures

        return figures.timeline_figure(self, **options)


def _aligned(views: list[TableView], last_steps: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Begin of backward and readiness of gradients in the steps that all ranks have completed, ranks first."""
    column = STEP_FIELDS.index("backward_end")
    common: npt.NDArray[np.int64] | None = None
    for one in views:
        done = one.step[one.steps[:, column] > 0]
        common = done if common is None else np.intersect1d(common, done)
    if common is None or not len(views):
        return np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.int64)
    common = common[-last_steps:]
    places = max(one.gradients.shape[1] for one in views)
    begin = np.zeros((len(views), len(common)), np.int64)
    ready = np.zeros((len(views), len(common), places), np.int64)
    for index, one in enumerate(views):
        row = np.searchsorted(one.step, common)
        begin[index] = one.steps[row, STEP_FIELDS.index("backward_begin")]
        ready[index, :, : one.gradients.shape[1]] = one.gradients[row]
    return begin, ready


def _frame(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns)
