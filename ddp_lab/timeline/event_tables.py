"""What a timeline holds: appended by the receiver thread, read by any other, bounded, losses counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.parameter_groups import ModelCollectives
from ..analysis.step_parts import StepParts, step_parts
from ..diagnosis.crashes import Failure
from ..protocol import descriptions, events
from ..protocol.archive import Archive
from .history import EventStore, StepHistory
from .model_kinds import ModelKind
from .model_registry import FEWEST_STEPS, FLEETING, Layout, ModelRegistry, layouts, newest
from .recorded import chrome_trace
from .records import DriftRecord, Inspection, Kept, RankStatus, ReducerInfo
from .tables import span_columns
from .tables.activity import ActivityTable
from .tables.collectives import CollectiveTable, GroupInfo, collective_columns
from .tables.gradients import drift_record, gradient_columns
from .tables.parameter_groups import parameter_group_columns
from .tables.span_columns import Columns, TableView
from .tables.step_table import STEP_FIELDS, StepTable

__all__ = ["TimelineModel"]

_MAX_MARKS = 20_000
_NO_OPERATIONS = CollectiveTable()
_MOST_TRIED = 8  # models, to find one to analyse
_MARK, _OF_GROUPS = int(events.Kind.MARK), int(events.OF_GROUPS)
_ACTIVITY, _SAMPLE = int(events.Kind.ACTIVITY), int(events.Kind.SAMPLE)
_BEGIN, _END, _ABANDONED = map(STEP_FIELDS.index, ("backward_begin", "backward_end", "abandoned"))


class _Rank:
    """What the timeline knows about one rank (guarded by the timeline's lock)."""

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
        self._most_waiting = min(4 * max_steps, max_events // 250)  # events of a rank: few of what is kept
        self._lock = threading.RLock()
        self._up_to_date: int | None = None  # the thread within `snapshot_of_events`
        self.version = 0
        """Grows with everything that is appended; a view that has drawn this version is up to date."""
        self.cleared = 0
        """How often the timeline was cleared."""
        self.recorded = False
        self.failure: Failure | None = None  # of a recorded run that ended early
        """Whether it holds a recording, whose times have no relation to the present."""
        self._deleted: dict[tuple[int, int], int] = {}  # (rank, session) -> how many of its events `clear` has deleted
        self._start()

    def _start(self) -> None:
        self._store = EventStore(self._max_events, thinned=self._max_events // 4)
        self._marks = EventStore(_MAX_MARKS)
        self._book = ModelRegistry()
        self._ranks: dict[int, _Rank] = {}
        self._tables: dict[int, dict[int, StepTable]] = {}  # reducer -> rank
        self._activity: dict[int, ActivityTable] = {}  # by rank
        self._latest: dict[int, int] = {}  # reducer -> time of its latest event
        self._operations: dict[int, CollectiveTable] = {}  # rank -> those of its process groups
        self._histories: dict[int, StepHistory] = {}  # reducer -> all of its steps
        self._described: list[tuple[int, dict[str, Any]]] = []
        self._waiting: dict[int, list[npt.NDArray[np.void]]] = {}  # by rank: [Note: batches wait]

    # ---- appending --------------------------------------------------------------------------------------

    def extend(self, batch: events.Batch) -> None:
        """Appends a batch; duplicate events (sent again after a rejoin) are ignored.

        [Note: batches wait]
        Ranks send fifty small batches a second each, and what a batch costs hardly depends on its size. So batches only
        wait here, until somebody reads or a rank has many events: the thread that receives stays free to answer.
        """
        with self._lock:
            rank = self._enter(batch.rank, batch.session)
            if rank is None:
                return
            self.version += 1
            if not rank.events:
                rank.next = min(rank.next, batch.first)  # events of before a `clear` may arrive after it
            repeated = rank.next - batch.first
            taken = batch.events[max(repeated, 0) :]
            rank.dropped += max(-repeated, 0)
            rank.next = max(rank.next, batch.first + len(batch.events))
            if not len(taken):
                return
            rank.events += len(taken)
            waiting = self._waiting.setdefault(batch.rank, [])
            waiting.append(taken)
            if sum(map(len, waiting)) > self._most_waiting:
                self._flush_pending()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Holds the lock, with every batch in the tables (within `snapshot_of_events`: those that it took); who reads
        descriptions alone takes the lock."""
        with self._lock:
            if self._up_to_date != threading.get_ident():
                self._flush_pending()
            yield

    @contextmanager
    def snapshot_of_events(self) -> Iterator[None]:
        """Puts the batches that have arrived into the tables, once for all reads of this thread within.

        Each read would do that for those that arrived since the last one, and what a batch costs hardly depends on its
        size. What arrives meanwhile is seen by the next read afterwards, or earlier if another thread reads.
        """
        with self._reading():
            self._up_to_date = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                if self._up_to_date == threading.get_ident():
                    self._up_to_date = None

    def _flush_pending(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for rank, batches in waiting.items():
            taken = batches[0] if len(batches) == 1 else np.concatenate(batches)
            self._append(rank, self._renumbered(rank, self._ranks[rank].life, taken))

    def _append(self, rank: int, taken: npt.NDArray[np.void]) -> None:
        known, newest = self._ranks[rank], int(taken["host_ns"].max())
        known.last_event_ns = max(known.last_event_ns, newest)
        self._store.append(rank, taken)
        marked = (taken["kind"] == _MARK) & (taken["parameter"] >= 0)
        if marked.any():
            self._marks.append(rank, taken[marked])
        of_groups = taken["kind"] >= _OF_GROUPS
        if of_groups.any():
            self._operations.setdefault(rank, CollectiveTable()).extend(taken[of_groups])
        self._activity.setdefault(rank, ActivityTable()).extend(taken, self._book.places)
        for reducer, of_reducer in _by_model(taken):
            if reducer >= 0:
                of_model = self._tables.setdefault(reducer, {})
                if rank not in of_model:
                    of_model[rank] = StepTable(self._max_steps)
                of_model[rank].extend(of_reducer)
                known.step = of_model[rank].last_step
                behind = known.step - self._histories.setdefault(reducer, StepHistory()).last
                if behind > self._book.kind(reducer).steps_behind(self._max_steps):
                    self.history(reducer)  # before the tables forget these steps, or their collectives
                at = newest if of_reducer is taken else int(of_reducer["host_ns"].max())
                self._latest[reducer] = max(self._latest.get(reducer, 0), at)

    def _renumbered(self, rank: int, life: int, taken: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Replaces the rank's numbers of reducers and marks by those of this timeline."""
        models = _models(taken)
        numbers = [self._book.number(rank, life, reducer) if reducer >= 0 else reducer for reducer in models]
        kinds = taken["kind"]
        marks, of_groups, places = kinds == _MARK, kinds >= _OF_GROUPS, (kinds == _ACTIVITY) | (kinds == _SAMPLE)
        if numbers == models and not (marks | of_groups | places).any():
            return taken
        changed: npt.NDArray[np.void] = taken.copy()
        changed["reducer"] = np.array(numbers)[np.searchsorted(models, taken["reducer"])]
        book = self._book
        for field, chosen, number in (
            ("parameter", marks, book.mark),
            ("parameter", places, book.place),
            ("parameter", of_groups, book.groups.call),
            ("process_group", of_groups, book.groups.group),
        ):
            own, place = np.unique(taken[field][chosen], return_inverse=True)
            changed[field][chosen] = np.array([number(rank, life, one) for one in own.tolist()], np.int64)[place]
        return changed

    def _enter(self, number: int, session: int | None) -> _Rank | None:
        """The rank, reset if the session is new; None for a message of an earlier process."""
        rank = self._ranks.setdefault(number, _Rank())
        if session is None or (rank.sessions and session == rank.sessions[-1]):
            return rank
        if session in rank.sessions:
            return None
        self._flush_pending()  # what the former process sent has its numbers
        rank.sessions.append(session)
        if rank.life:
            self._abandon(number)
            self._book.begin_life(number, rank.life)
        rank.events = rank.dropped = 0
        rank.next = 0 if self.recorded else self._deleted.get((number, session), 0)  # a replay begins anew
        rank.status = {}
        return rank

    def _abandon(self, rank: int) -> None:
        """Notes which backwards the former process of a rank has left unfinished: they will never be complete."""
        for reducer, table in [(of, tables[rank]) for of, tables in self._tables.items() if rank in tables]:
            for row in table.rows()[-1:]:
                begun, ended, abandoned = table.steps[row, [_BEGIN, _END, _ABANDONED]]
                if not begun or ended or abandoned:
                    continue
                event = np.zeros(1, events.DTYPE)
                event["kind"], event["host_ns"] = events.Kind.ABANDONED, self._ranks[rank].last_event_ns
                event["reducer"], event["step"] = reducer, table.step[row]
                event["generation"], event["process_group"] = table.generation[row], table.process_group[row]
                event["bucket"] = event["parameter"] = -1
                self._append(rank, event)

    def describe(self, rank: int, description: dict[str, Any]) -> None:
        """Adds a description of a rank (bucket layout, mark, inspection); it may name its ``"session"``.

        Raises:
            ValueError: it is not valid; names the field.
        """
        description = descriptions.checked(description)
        with self._lock:
            known = self._enter(rank, description.get("session"))
            if known is not None:
                self.version += 1
                if description.get("type") == "assignment":
                    self._flush_pending()  # models are numbered in the order in which they are named
                made = self._book.describe(rank, known.life, description)
                if made.get("type") not in FLEETING:
                    self._described.append((rank, made))

    def set_status(self, rank: int, status: dict[str, Any]) -> None:
        """Updates a rank's status: ``state``, ``cell``, ``pid``, ... (see `RankStatus`); merged into the last."""
        with self._lock:
            known = self._enter(rank, status.get("session"))
            if known is not None:
                self.version += 1
                known.status.update(status)

    def clear(self) -> None:
        """Deletes all events, descriptions and ranks."""
        with self._lock:
            self.version += 1
            self.cleared += 1
            self._deleted |= {
                (number, one.sessions[-1]): one.next for number, one in self._ranks.items() if one.sessions
            }
            self._start()

    def events(self) -> Archive:
        """The data that `save` writes: raw events in the order of arrival, descriptions, and the ranks' status."""
        with self._reading():
            chunks = [*self._store.thinned(), *self._store.since(self._store.start)[0]]
            described = [*self._described, *self._book.watched.everything()]
            described += [one for values in self._book.logged.values() for one in values]
            ranks = {r.rank: {"dropped": r.dropped, "status": r.status} for r in self.ranks()}
        return Archive(chunks, described, ranks)

    def restore(self, archive: Archive) -> None:
        """Fills an empty timeline with the data of another timeline's `events`."""
        with self._reading():
            self.recorded = True
            for number, about in archive.ranks.items():
                self._enter(number, 0)
                self._ranks[number].dropped, self._ranks[number].status = about["dropped"], about["status"]
            for number, description in archive.described:
                self.describe(number, description)
            for number, chunk in archive.chunks:
                self._ranks[number].events += len(chunk)
                self._append(number, chunk)

    def processes(self) -> dict[int, dict[str, Any]]:
        """rank -> facts about its process: ``host``, ``cores``, ``threads``, and for GPUs ``contexts``."""
        with self._lock:
            return dict(self._book.processes)

    def own_numbers(self, model: int) -> dict[int, int]:
        """rank -> that rank's own number of this model, for the running ranks that have it."""
        with self._reading():
            found = {rank: self._book.own_number(rank, known.life, model) for rank, known in self._ranks.items()}
            return {rank: own for rank, own in found.items() if own is not None}

    # ---- who and what -----------------------------------------------------------------------------------

    def ranks(self) -> list[RankStatus]:
        """One record for each rank that has sent anything."""
        with self._reading():
            return [
                RankStatus(
                    rank=number,
                    session=rank.sessions[-1] if rank.sessions else None,
                    **{name: rank.status[name] for name in ("pid", "state", "cell") if name in rank.status},
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
        with self._reading():
            made = [self._info(reducer) for reducer in {*self._book.reducers(), *self._latest}]
        return sorted(made, key=lambda one: (one.last_event_ns, one.reducer))

    def living(self) -> list[ReducerInfo]:
        """Those of `reducers` that still exist on all their ranks, as far as is known."""
        with self._reading():
            return [one for one in self.reducers() if not self._book.is_gone(one.reducer)]

    def _tables_of(self, reducer: int) -> dict[int, StepTable]:
        """rank -> its table of a model, ascending."""
        return dict(sorted(self._tables.get(reducer, {}).items()))

    def _info(self, reducer: int) -> ReducerInfo:
        tables_by_rank = self._tables_of(reducer)
        tables, ranks = list(tables_by_rank.values()), tuple(tables_by_rank)
        generations = self._book.generations(reducer)
        module, buckets = "?", 0
        if generations:
            newest = self._book.assignment(reducer)
            module, buckets, ranks = newest["module"], len(newest["buckets"]), tuple(newest["group_ranks"])
        buckets = buckets or max((table.buckets.shape[1] for table in tables), default=0)
        last = max((table.last_step for table in tables), default=-1)
        return ReducerInfo(reducer, module, ranks, generations, buckets, last, self._latest.get(reducer, 0))

    def assignment(self, model: int, generation: int | None = None) -> dict[str, Any]:
        """The bucket layout: the description that the ranks sent (see tutorials/site/descriptions.md).

        Args:
            model: which model.
            generation: which version of the layout; None for the newest.

        Raises:
            ValueError: there is no such layout yet.
        """
        with self._lock:
            try:
                return self._book.assignment(model, generation)
            except KeyError:
                known = {number: self._book.generations(number) for number in self._book.reducers()}
                asked = f"model {model}, generation {'newest' if generation is None else generation}"
                raise ValueError(f"no bucket layout of {asked}; known (model: generations): {known}") from None

    def watched_gradients(self, model: int | None, last_steps: int | None = None) -> list[dict[str, Any]]:
        """Descriptions of a model's monitored steps, oldest first; for None those of all models."""
        with self._lock:
            return self._book.watched.described("gradients", model, last_steps)

    def drift_records(self, model: int | None = None, last_steps: int | None = None) -> list[DriftRecord]:
        """Comparisons of the ranks' replicas, by model and step."""
        with self._lock:
            return [drift_record(one) for one in self._book.watched.described("drift", model, last_steps)]

    def inspection_count(self, model: int, kind: str = "drift") -> int:
        """How many descriptions of type ``"drift"`` or ``"gradients"`` of a model have arrived in total."""
        with self._lock:
            return self._book.watched.arrived[kind, model]

    def inspections(self, model: int) -> list[Inspection]:
        """The ranks' answers to requests for gradient norms and checksums, oldest step first."""
        with self._reading():
            return self._book.inspections(model, self._info(model).ranks)

    def kept(self, model: int) -> Kept:
        """Which steps of a model are kept: the newest, and older ones that are evenly spaced over the whole past."""
        held = self.held_steps(model)
        if not len(held):
            return Kept(0, 0, -1, 0, 0)
        gaps = np.flatnonzero(np.diff(held) > 1)
        whole = int(gaps[-1]) + 1 if len(gaps) else 0
        return Kept(len(held), int(held[0]), int(held[-1]), int(held[whole]), whole)

    def groups(self) -> list[GroupInfo]:
        """One record for each process group whose operations were recorded."""
        with self._lock:
            return list(self._book.groups.groups.values())

    def noticed(self, kind: str, model: int) -> dict[int, dict[str, Any]]:
        """Rank -> the newest description of this type (one of `NOTICED`) of a model."""
        with self._reading():
            return dict(self._book.noticed.get((kind, model), {}))

    def buffer_shapes(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Rank -> name -> the last shape of the buffers that DistributedDataParallel has broadcast."""
        with self._reading():
            return {rank: dict(found) for rank, found in self._book.buffers.items()}

    # ---- times ------------------------------------------------------------------------------------------

    def collective_columns(self, last: int | None = None) -> Columns:
        """The columns of `collectives` as numpy arrays.

        Args:
            last: how many of the newest operations of each rank; None for all that are kept.
        """
        with self._reading():
            by_rank = {rank: table.rows(last) for rank, table in self._operations.items()}
            groups, calls = self._book.groups.groups, list(self._book.groups.calls)
        return collective_columns(by_rank, groups, calls)

    def forgotten_collectives(self, last: int | None = None) -> int:
        """How many operations of process groups are no longer kept, over all ranks.

        Args:
            last: count those, too, that are not among so many of the newest of each rank.
        """
        with self._reading():
            return sum(table.first(last) for table in self._operations.values())

    def since(self, cursor: int) -> tuple[list[tuple[int, npt.NDArray[np.void]]], int, int]:
        """Raw events that arrived since an earlier call.

        Args:
            cursor: 0, or the second value that the previous call returned.

        Returns:
            Pairs of rank and events (dtype `ddp_lab.protocol.events.DTYPE`) in the order of arrival, the next cursor,
            and how many events in between are no longer kept.
        """
        with self._reading():
            return self._store.since(cursor)

    def marks(self) -> list[tuple[int, int, str]]:
        """(rank, host time in ns, name) of the newest marks, at most 20,000."""
        with self._reading():
            chunks, _, _ = self._marks.since(self._marks.start)
            names = list(self._book.mark_names)
        return [
            (rank, int(at), names[index])
            for rank, chunk in chunks
            for at, index in zip(chunk["host_ns"].tolist(), chunk["parameter"].tolist(), strict=True)
            if index < len(names)
        ]

    def logged(self) -> list[tuple[int, int, str, float]]:
        """(rank, host time in ns, name, value) of what the program logged (`recording.log`), by name and arrival; of
        each name the newest 20,000."""
        with self._lock:
            kept = [one for values in self._book.logged.values() for one in values]
        return [(rank, one["at_ns"], one["name"], float(one["value"])) for rank, one in kept]

    def mark_names(self) -> list[str]:
        """Names of the marks; the field ``parameter`` of a mark's event is an index of it."""
        with self._lock:
            return list(self._book.mark_names)

    def layouts(self, model: int, generation: int | None = None) -> list[Layout]:
        """The bucket layouts of a model that have complete steps, in the order of their newest step.

        Args:
            model: which model.
            generation: only steps with this version of the layout; None for all.
        """
        with self._reading():
            done = []
            for table in self._tables.get(model, {}).values():
                rows = table.rows()
                ended = rows[table.steps[rows, _END] > 0]
                done.append((table.step[ended], table.generation[ended]))
            known = self._book.generations(model) if generation is None else (generation,)
            described = {number: self.assignment(model, number) for number in known}
        return layouts(done, described)

    def analysis_layout(self, model: int) -> Layout | None:
        """The layout whose steps are analysed: see [Note: the layout that is judged]."""
        return newest(self.layouts(model))

    def views_of(self, model: int, steps: npt.NDArray[np.int64]) -> list[TableView]:
        """Copies of the rows of these steps in a model's tables."""
        with self._reading():
            made = []
            for rank, table in self._tables_of(model).items():
                self._activity[rank].digest(self._book.places)
                view = span_columns.view_of(rank, model, table, steps, self._activity[rank])
                kind, operations = self._book.kind(model), self._operations.get(rank, _NO_OPERATIONS)
                made.append(kind.measured(view, self._collectives_of(view), operations))
            return made

    def kind(self, model: int) -> ModelKind:
        """What is particular to models of its kind."""
        with self._lock:
            return self._book.kind(model)

    def _collectives_of(self, view: TableView) -> list[ModelCollectives]:
        """What the parameter groups of a model communicated in these steps: one record, or none for other models."""
        operations, groups = self._operations.get(view.rank, _NO_OPERATIONS), self._book.groups
        layout = self._book.layout(view.reducer)
        return self._book.kind(view.reducer).collectives(view, operations, groups.calls, groups.groups, layout)

    def collectives_in(self, views: Sequence[TableView]) -> list[tuple[TableView, ModelCollectives]]:
        """What models with parameter groups communicated in the steps of views; without other models."""
        with self._reading():
            return [(view, found) for view in views for found in self._collectives_of(view)]

    def parts_of(self, model: int, steps: npt.NDArray[np.int64]) -> StepParts:
        """The named parts of these steps, by rank, as far as they are held: [Note: parts] in `step_parts.py`."""
        with self._reading():
            views = self.views_of(model, steps)
            by_rank = {one.rank: span_columns.rank_steps(one, self._activity[one.rank]) for one in views}
            return step_parts(by_rank, self._book.places)

    def held_steps(self, model: int) -> npt.NDArray[np.int64]:
        """Numbers of the steps in a model's tables, ascending."""
        with self._reading():
            held = [table.step[table.rows()] for table in self._tables.get(model, {}).values()]
            return np.unique(np.concatenate([np.empty(0, np.int64), *held]))

    def history(self, model: int) -> StepHistory:
        """The times of all steps of a model since its start: see [Note: a bounded history] in `history.py`."""
        with self._reading():
            known = self._histories.setdefault(model, StepHistory())
            steps = self.held_steps(model)
            steps = steps[steps > known.last]
            if len(steps):
                known.extend(*span_columns.whole_steps(self.views_of(model, steps)))
            return known

    def changed_steps(self, seen: dict[tuple[int, int], int]) -> dict[int, list[int]]:
        """Steps of each model that have changed since an earlier call, ascending.

        Args:
            seen: empty, or what the earlier call left in it: revisions of the tables.
        """
        changed: dict[int, set[int]] = {}
        with self._reading():
            for reducer, tables in self._tables.items():
                for rank, table in tables.items():
                    steps, seen[reducer, rank] = table.changed(seen.get((reducer, rank), 0))
                    changed.setdefault(reducer, set()).update(steps.tolist())
        return {reducer: sorted(steps) for reducer, steps in changed.items() if steps}

    def finished_steps(self, model: int, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these steps are over: their backward has ended on every rank, or a rank has abandoned it, or they
        are no longer held. Costs far less than reading them.

        Args:
            model: which model.
            steps: shape ``[steps]``.
        """
        with self._reading():
            tables = self._tables.get(model, {})
            known = self._book.generations(model)
            group = self._book.assignment(model)["group_ranks"] if known else ()
            left, held = np.zeros(len(steps), bool), np.zeros(len(steps), bool)
            running = np.full(len(steps), any(rank not in tables for rank in group))
            for rank, table in tables.items():
                rows = table.find(steps)
                of_rank, times = rows >= 0, table.steps[rows]
                held |= of_rank
                left |= of_rank & (times[:, _ABANDONED] > 0)
                running |= np.where(of_rank, times[:, _END] == 0, rank in group)
        over: npt.NDArray[np.bool_] = ~held | left | ~running
        return over

    def views(self, model: int | None = None, last_steps: int | None = None) -> list[TableView]:
        """Copies of the tables behind `spans`, `steps` and `all_reduces`, for drawing without pandas."""
        made = []
        with self._reading():
            for of in sorted(self._tables) if model is None else [model]:
                steps = self.held_steps(of)
                made += self.views_of(of, steps if last_steps is None else steps[max(0, len(steps) - last_steps) :])
        return made

    def columns(self, model: int | None = None, last_steps: int | None = None) -> Columns:
        """The columns of `spans` as numpy arrays."""
        with self._reading():
            views, sizes = self.views(model, last_steps), self._book.sizes()
        return span_columns.span_columns(views, sizes)

    def step_columns(self, model: int | None = None, last_steps: int | None = None) -> Columns:
        """The columns of `steps` as numpy arrays."""
        return span_columns.step_columns(self.views(model, last_steps))

    def parameter_group_columns(self, model: int | None = None, last_steps: int | None = None) -> Columns:
        """The columns of `parameter_groups` as numpy arrays."""
        with self._reading():
            parts = self.collectives_in(self.views(model, last_steps))
            models = {view.reducer for view, _ in parts}
            described = {
                (of, generation): self._book.assignment(of, generation)
                for of in models
                for generation in self._book.generations(of)
            }
        return parameter_group_columns(parts, described)

    def sync_columns(self, model: int | None = None, last_steps: int | None = None) -> Columns:
        """The columns of `all_reduces` as numpy arrays."""
        ranks_of = {one.reducer: len(one.ranks) for one in self.reducers()}
        return span_columns.sync_columns(self.columns(model, last_steps), dict(sorted(ranks_of.items())))

    def _trace(self, last_steps: int | None) -> chrome_trace.Trace:
        """The data of `Timeline.to_perfetto`."""
        reducers = self.reducers()
        with self._reading():
            views, marks = self.views(None, last_steps), self.marks()
            buckets, sizes = self._book.buckets(), self._book.sizes()
            names = {one.reducer: self._book.names(one.reducer) for one in reducers}
        many = sum(view.gradients.size for view in views) > chrome_trace.MOST_GRADIENTS
        return chrome_trace.Trace(
            spans=span_columns.span_columns(views, sizes),
            steps=span_columns.step_columns(views),
            gradients=gradient_columns(views, buckets, completing=many),
            modules={one.reducer: one.module for one in reducers},
            names=names,
            marks=marks,
            notes=[note for note in (str(self.kept(one.reducer)) for one in reducers) if note],
            operations=self.collective_columns(),
            groups={one.group: str(one) for one in self.groups()},
        )

    def model_to_analyse(self, model: int | None = None) -> ReducerInfo | None:
        """The record of a model that is analysed; for None the most recently active one with enough complete steps.

        So the analysis of a training stays while other code, or a model that has just begun, runs.
        """
        if model is not None:
            return self.model(model)
        known = [one for one in self.reducers() if one.last_step >= 0]
        judged = [(one, self.analysis_layout(one.reducer)) for one in reversed(known[-_MOST_TRIED:])]
        for fewest in (FEWEST_STEPS, 1):
            for one, layout in judged:
                if layout is not None and len(layout.step) >= fewest:
                    return one
        return known[-1] if known else None

    def model_with_groups(self, model: int | None = None) -> int | None:
        """The number of a model with `fully_shard` or `replicate`; None if it is none, or there is none.

        Args:
            model: which model; None for the most recently active one of these.
        """
        known = [one.reducer for one in self.reducers() if one.last_step >= 0 and model in (None, one.reducer)]
        return next((one for one in reversed(known) if "parameter_groups" in self.kind(one).views), None)

    def model(self, model: int | None = None) -> ReducerInfo | None:
        """The record of a model, for None of the most recently active one; None if there is none."""
        known = [one for one in self.reducers() if one.last_step >= 0 and model in (None, one.reducer)]
        return known[-1] if known else None


def _by_model(taken: npt.NDArray[np.void]) -> list[tuple[int, npt.NDArray[np.void]]]:
    """(reducer, its events in their order), in time that grows with the events, however many reducers they name."""
    models = _models(taken)
    if len(models) == 1:
        return [(models[0], taken)]
    order = np.argsort(taken["reducer"], kind="stable")
    ends = np.searchsorted(taken["reducer"][order], models, side="right").tolist()
    begins = [0, *ends[:-1]]
    return [(one, taken[order[begin:end]]) for one, begin, end in zip(models, begins, ends, strict=True)]


def _models(taken: npt.NDArray[np.void]) -> list[int]:
    """The distinct numbers of reducers; nearly always one, which costs little to find out."""
    reducer = taken["reducer"]
    lowest = int(reducer.min())
    return [lowest] if lowest == int(reducer.max()) else np.unique(reducer).tolist()
