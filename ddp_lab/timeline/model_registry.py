"""The models and process groups of a timeline: to which one an event belongs, and the bucket layouts of models.

Ranks number their reducers alike within one group and one lifetime of their processes. After a restart, or with two
groups of ranks that build their own models, equal numbers mean different models. So each model gets a unique number
here, the rank's number if that is free.

[Note: models that are gone]
Only the ranks know which models exist, and they report once when a model no longer exists (`ddp_lab.recording`). A rank
with a new process has none of its former models, until `copy_state_from` gives it a copy of another rank's, which
continues with the next generation. A model that is missing on one of its ranks can't train, so it counts as gone.

[Note: the layout that is judged]
Every rebuild, every change and every rejoin gives the bucket layout a new version number (its generation). A rejoin
restores the initial layout until the next step, so that the newest generation may have no steps. Generations with the
same buckets, options and ranks are one layout, even if there were others in between. The analysis uses the newest
layout with at least 5 complete steps; if there is none, the newest with any.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_parts import Place
from .model_kinds import ModelKind, kind_of
from .records import Inspection
from .tables.collectives import GroupInfo
from .tables.gradients import GradientLog

__all__ = ["FEWEST_STEPS", "FLEETING", "NOTICED", "Layout", "ModelRegistry", "alike", "layouts", "newest"]

_PLACE_FIELDS = (("part", "code"), ("name", "?"), ("text", ""), ("workers", -1), ("pin_memory", False))
# Types of descriptions that come with each step: only the newest are kept.
FLEETING = ("gradients", "drift", "value", "buffers")
NOTICED = ("unchanged_buffers", "accumulation")
"""Types of descriptions of what a rank has noticed of a model: of each only the newest counts."""
FEWEST_STEPS = 5  # fewer are not enough: the first ones after a rebuild take longer than others
_FIELDS = ("parameters", "buckets", "options", "group_ranks", "backend")
_Numbers = npt.NDArray[np.int64]
_Own = tuple[int, int, int]  # rank, its life, its number
_MOST_VALUES = 20_000  # of a name, of all ranks


@dataclass(frozen=True)
class Layout:
    """A bucket layout of a model, and its steps.

    Attributes:
        description: of its newest generation, None if no rank has described it.
        step: steps that all ranks have completed with it, ascending.
        generation: shape of `step`: the generation of each step.
    """

    description: dict[str, Any] | None
    step: _Numbers
    generation: _Numbers

    def only(self, chosen: npt.NDArray[np.bool_]) -> Layout:
        """The same with some of its steps."""
        return replace(self, step=self.step[chosen], generation=self.generation[chosen])

    def warm(self, warm_up: int, last_steps: int | None = None) -> _Numbers:
        """The newest `last_steps`, without the first `warm_up` of each generation if as many others remain.

        Steps after a rebuild take longer than others, because memory is newly allocated.
        """
        first = np.zeros(len(self.step), bool)
        for number in np.unique(self.generation):
            first[np.flatnonzero(self.generation == number)[:warm_up]] = True
        kept = self.step[~first] if (~first).sum() >= warm_up else self.step
        return kept if last_steps is None else kept[max(0, len(kept) - last_steps) :]


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are one layout: equal buckets of equal parameters, options and ranks."""
    return all(one.get(name) == other.get(name) for name in _FIELDS)


def layouts(done: Sequence[tuple[_Numbers, _Numbers]], described: Mapping[int, dict[str, Any]]) -> list[Layout]:
    """The layouts that have steps, in the order of their newest step.

    Args:
        done: for each rank the steps that it has completed, ascending, and the generation of each.
        described: generation -> its description. If there are any, steps of other generations are ignored.
    """
    step, generation = _common(done)
    if not described:
        return [Layout(None, step, generation)] if len(step) else []
    of_layout: dict[int, int] = {}  # generation -> the first one that is alike
    for number in np.unique(generation).tolist():
        if number in described:
            same = (known for known in of_layout.values() if alike(described[known], described[number]))
            of_layout[number] = next(same, number)
    made = []
    for first in sorted(set(of_layout.values())):
        members = [number for number, of in of_layout.items() if of == first]
        rows = np.isin(generation, members)
        made.append(Layout(described[max(members)], step[rows], generation[rows]))
    return sorted(made, key=lambda one: int(one.step[-1]))


def newest(known: Sequence[Layout]) -> Layout | None:
    """The layout that is analysed: see [Note: the layout that is judged]; None if there is none."""
    enough = [one for one in known if len(one.step) >= FEWEST_STEPS]
    return next(reversed(enough or known), None)


def _common(done: Sequence[tuple[_Numbers, _Numbers]]) -> tuple[_Numbers, _Numbers]:
    """The steps that are in all lists with the same generation, and that generation."""
    if not done:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    step, generation = done[0]
    for other, of_other in done[1:]:
        step, here, there = np.intersect1d(step, other, assume_unique=True, return_indices=True)
        generation = generation[here]
        same = generation == of_other[there]
        step, generation = step[same], generation[same]
    return step, generation


class ModelRegistry:
    """Numbers reducers for a timeline and keeps their bucket layouts, inspections and the names of marks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}  # (rank, life, rank's number) -> number here
        self._models: dict[tuple[int, tuple[int, ...]], int] = {}  # (ranks' number, ranks) -> number here, the newest
        self._lives: dict[int, int] = {}  # rank -> its life
        self._members: dict[int, dict[int, int]] = {}  # number here -> rank -> its life when it named the model last
        self._missing: dict[int, set[int]] = {}  # number here -> ranks that do not have it any more
        self._assignments: dict[int, dict[int, dict[str, Any]]] = {}  # reducer -> generation -> description
        self._inspections: dict[tuple[int, int], dict[int, list[dict[str, Any]]]] = {}  # (reducer, step) -> rank
        self._marks: dict[tuple[int, int, int], int] = {}  # (rank, life, rank's index) -> index in mark_names
        self.mark_names: list[str] = []
        self._mark_places: dict[str, int] = {}  # name -> index in mark_names
        self.groups = GroupRegistry()
        self._place_of: dict[tuple[int, int, int], int] = {}  # (rank, life, rank's index) -> index in places
        self._place_numbers: dict[Place, int] = {}
        self.places: list[Place] = []
        self.processes: dict[int, dict[str, Any]] = {}  # rank -> facts about its process
        self.watched = GradientLog()
        self.memory: dict[int, dict[int, dict[str, Any]]] = {}  # number here -> rank -> its newest measured step
        self.noticed: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}  # (type, number here) -> rank
        self.buffers: dict[int, dict[str, tuple[int, ...]]] = {}  # rank -> name -> its last shape
        self.logged: dict[str, deque[tuple[int, dict[str, Any]]]] = {}  # name -> rank, description

    def number(self, rank: int, life: int, reducer: int, ranks: tuple[int, ...] = (), generation: int = 0) -> int:
        """The number here of this rank's `reducer`, in this process; the last two arguments are of its description."""
        own = (rank, life, reducer)
        if own not in self._numbers:
            number = self._models.get((reducer, ranks))
            if number is None or not self._is_same(number, rank, generation):
                number = reducer if reducer not in self._members else max(self._members) + 1
                self._models[reducer, ranks] = number
                self._members[number], self._missing[number] = {}, set()
            self._members[number][rank] = self._lives[rank] = life
            self._missing[number].discard(rank)
            self._numbers[own] = number
        return self._numbers[own]

    def _is_same(self, number: int, rank: int, generation: int) -> bool:
        """Whether a model that this rank's process names for the first time is that one."""
        members = self._members[number]
        if rank not in members:  # the others may have named it and deleted it already: models can be short-lived
            return all(life == self._lives[of] for of, life in members.items())
        return generation > 0 and any(life == self._lives[of] for of, life in members.items() if of != rank)

    def own_number(self, rank: int, life: int, reducer: int) -> int | None:
        """The number of this reducer on this rank, in this process; None if the rank has no such model."""
        for (of_rank, of_life, own), number in self._numbers.items():
            if (of_rank, of_life, number) == (rank, life, reducer):
                return own
        return None

    def is_gone(self, reducer: int) -> bool:
        """Whether a rank of this model is known not to have it. See [Note: models that are gone]."""
        return bool(self._missing.get(reducer))

    def begin_life(self, rank: int, life: int) -> None:
        """Notes that this rank has a new process."""
        self._lives[rank] = life
        for number, members in self._members.items():
            if rank in members:
                self._missing[number].add(rank)

    def mark(self, rank: int, life: int, index: int) -> int:
        """Index in `mark_names` of this rank's mark `index`, in this process; -1 if it has no name."""
        return self._marks.get((rank, life, index), -1)

    def place(self, rank: int, life: int, index: int) -> int:
        """Index in `places` of this rank's place `index`, in this process; -1 if it is not described."""
        return self._place_of.get((rank, life, index), -1)

    def _add_place(self, rank: int, life: int, made: dict[str, Any]) -> dict[str, Any]:
        one = Place(*(made.get(name, default) for name, default in _PLACE_FIELDS))
        index = self._place_numbers.setdefault(one, len(self.places))
        if index == len(self.places):
            self.places.append(one)
        self._place_of[rank, life, made["index"]] = index
        return {**made, "index": index}

    def describe(self, rank: int, life: int, description: dict[str, Any]) -> dict[str, Any]:
        """Adds a description and returns it with the numbers used here; descriptions of unknown types are only kept."""
        made = {key: value for key, value in description.items() if key != "session"}
        kind = made.get("type")
        if kind == "mark":
            index = self._mark_places.setdefault(made["name"], len(self.mark_names))
            if index == len(self.mark_names):
                self.mark_names.append(made["name"])
            self._marks[rank, life, made["index"]] = index
            return {**made, "index": index}
        if kind == "place":
            return self._add_place(rank, life, made)
        if kind == "process":
            self.processes[rank] = made
        elif kind == "assignment":
            ranks = tuple(made["group_ranks"])
            made["reducer"] = self.number(rank, life, made["reducer"], ranks, made["generation"])
            self._share(made)
            self._assignments.setdefault(made["reducer"], {})[made["generation"]] = made
        elif kind == "group":
            return self.groups.describe_group(rank, life, made)
        elif kind == "call":
            if "reducer" in made:
                made["reducer"] = self.number(rank, life, made["reducer"])
            return self.groups.describe_call(rank, life, made)
        elif kind == "gone":
            known = self._numbers.get((rank, life, made["reducer"]))
            if known is not None:  # else it no longer existed when this was read
                self._missing[known].add(rank)
        elif kind == "inspection":
            made["reducer"] = self.number(rank, life, made["reducer"])
            self._inspections.setdefault((made["reducer"], made["step"]), {})[rank] = made["buckets"]
        elif kind == "memory":
            made["reducer"] = self.number(rank, life, made["reducer"])
            self.memory.setdefault(made["reducer"], {})[rank] = made
        elif kind in NOTICED:
            made["reducer"] = self.number(rank, life, made["reducer"])
            self.noticed.setdefault((kind, made["reducer"]), {})[rank] = made
        elif kind == "value":
            self.logged.setdefault(made["name"], deque(maxlen=_MOST_VALUES)).append((rank, made))
        elif kind == "buffers":
            self.buffers.setdefault(rank, {}).update({one["name"]: tuple(one["shape"]) for one in made["buffers"]})
        elif kind in FLEETING:
            made["reducer"] = self.number(rank, life, made["reducer"])
            self.watched.add(rank, made)
        return made

    def _share(self, made: dict[str, Any]) -> None:
        """Shares equal parts with the model's last layout: every rank describes each generation, and each rejoin begins
        a new one."""
        last = next(reversed(self._assignments.get(made["reducer"], {}).values()), None)
        for field in ("parameters", "buckets", "options", "group_ranks"):
            if last is not None and field in made and last.get(field) == made[field]:
                made[field] = last[field]

    def assignment(self, reducer: int, generation: int | None = None) -> dict[str, Any]:
        """The description of a bucket layout, the newest for None; raises `KeyError` if there is none."""
        of_reducer = self._assignments[reducer]
        return of_reducer[max(of_reducer) if generation is None else generation]

    def kind(self, model: int) -> ModelKind:
        """The kind of a model, as its newest layout says it."""
        return kind_of(self.assignment(model) if model in self._assignments else None)

    def layout(self, model: int) -> list[dict[str, Any]]:
        """The buckets, or parameter groups, of the newest layout as they are described; empty if none is."""
        return self.assignment(model)["buckets"] if model in self._assignments else []

    def generations(self, reducer: int) -> tuple[int, ...]:
        """The described generations of a reducer, ascending."""
        return tuple(sorted(self._assignments.get(reducer, ())))

    def reducers(self) -> list[int]:
        """Reducers that have been described."""
        return sorted(self._assignments)

    def sizes(self) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
        """(reducer, generation) -> number of parameters by bucket."""
        return {
            key: np.array([len(bucket["parameters"]) for bucket in description["buckets"]], np.int64)
            for key, description in self._described()
        }

    def buckets(self) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
        """(reducer, generation) -> bucket by parameter."""
        made = {}
        for key, description in self._described():
            made[key] = np.zeros(1 + max((p["index"] for p in description["parameters"]), default=-1), np.int64)
            for bucket in description["buckets"]:
                made[key][bucket["parameters"]] = bucket["bucket"]
        return made

    def _described(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for reducer, of_reducer in self._assignments.items():
            yield from (((reducer, generation), one) for generation, one in of_reducer.items())

    def names(self, reducer: int) -> list[str]:
        """Qualified names by parameter index; empty if the reducer was not described."""
        if reducer not in self._assignments:
            return []
        return [parameter["name"] for parameter in self.assignment(reducer)["parameters"]]

    def inspections(self, reducer: int, ranks: tuple[int, ...]) -> list[Inspection]:
        """Inspections of a reducer, oldest step first."""
        made = []
        for (of, step), by_rank in sorted(self._inspections.items()):
            if of == reducer:
                buckets = sorted({entry["bucket"] for entries in by_rank.values() for entry in entries})
                found = {rank: {entry["bucket"]: entry for entry in entries} for rank, entries in by_rank.items()}
                checksums = {b: {r: e[b]["checksum"] for r, e in found.items() if b in e} for b in buckets}
                norms = {b: {r: e[b]["norm"] for r, e in found.items() if b in e} for b in buckets}
                missing = tuple(rank for rank in ranks if rank not in by_rank)
                made.append(Inspection(reducer, step, checksums, norms, missing))
        return made


class GroupRegistry:
    """Numbers the process groups of a timeline and the calls of their operations, from what ranks say of theirs.

    Each rank numbers its groups and calls by itself. One group has the same name and ranks on all its members; after a
    rejoin another one may have them, too. A rank is in a group once, so the second one that it describes is another
    one.

    Attributes:
        calls: descriptions of type ``"call"`` by their numbers.
    """

    def __init__(self) -> None:
        self._groups: list[GroupInfo] = []
        self._newest: dict[tuple[str, tuple[int, ...]], int] = {}  # (name, ranks) -> number
        self._members: list[set[int]] = []  # number -> ranks that have described it
        self._numbers: dict[_Own, int] = {}
        self.calls: list[dict[str, Any]] = []
        self._texts: dict[str, int] = {}  # a call as text -> its number
        self._calls: dict[_Own, int] = {}

    @property
    def groups(self) -> dict[int, GroupInfo]:
        """The groups by their numbers, in the order in which they were first described."""
        return {one.group: one for one in self._groups}

    def group(self, rank: int, life: int, own: int) -> int:
        """The number here of this rank's group, in this process; -1 if it was not described."""
        return self._numbers.get((rank, life, own), -1)

    def call(self, rank: int, life: int, own: int) -> int:
        """The number here of this rank's call, in this process; -1 if it was not described."""
        return self._calls.get((rank, life, own), -1)

    def describe_group(self, rank: int, life: int, made: dict[str, Any]) -> dict[str, Any]:
        """Adds a group as a rank describes it; returns that with the number used here."""
        key = (made["name"], tuple(made["ranks"]))
        number = self._newest.get(key)
        if number is None or rank in self._members[number]:
            number = self._newest[key] = len(self._groups)
            description, dimension, backend = (
                str(made.get(name, "")) for name in ("description", "mesh_dimension", "backend")
            )
            self._groups.append(GroupInfo(number, made["name"], description, dimension, key[1], backend))
            self._members.append(set())
        self._members[number].add(rank)
        self._numbers[rank, life, made["index"]] = number
        return {**made, "index": number}

    def describe_call(self, rank: int, life: int, made: dict[str, Any]) -> dict[str, Any]:
        """Adds a call as a rank describes it; returns that with the number used here."""
        said = {name: value for name, value in made.items() if name != "index"}
        number = self._texts.setdefault(json.dumps(said, sort_keys=True), len(self.calls))
        if number == len(self.calls):
            self.calls.append(said)
        self._calls[rank, life, made["index"]] = number
        return {**made, "index": number}
