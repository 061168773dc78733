"""The steps that are analysed: those that all ranks have completed with one bucket layout, and the facts about them.

[Note: the layout that is judged]
Every rebuild, every change and every rejoin gives the bucket layout a new version number (its generation). A rejoin
restores the initial layout until the next step, so that the newest generation may have no steps. Generations with the
same buckets, options and ranks are one layout, even if there were others in between. The analysis uses the newest
layout with at least 5 complete steps; if there is none, the newest with any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.findings import Accumulation, Facts, MeshDimension, UnchangedBuffers
from ..analysis.parameter_groups import ModelCollectives
from ..analysis.steps import DeviceSteps, Steps
from ..formatting import step_range
from .model_kinds import ModelKind
from .tables.collectives import GroupInfo
from .tables.span_columns import Columns, TableView, device_rows, step_columns, typical_step
from .tables.step_table import BUCKET_FIELDS, STEP_FIELDS

__all__ = ["ANALYSED_STEPS", "FEWEST_STEPS", "WARM_UP", "Layout", "SideBySide", "accumulation", "alike", "facts"]
__all__ += ["layouts", "mesh_dimensions", "newest", "step_to_draw", "unchanged_buffers"]

_Numbers = npt.NDArray[np.int64]

ANALYSED_STEPS = 100
"""How many complete steps the numbers of views, summary, findings and reports are from, unless they say otherwise."""
FEWEST_STEPS = 5  # fewer are not enough: the first ones after a rebuild take longer than others
WARM_UP = 3
"""How many first steps of a bucket layout are ignored, if as many others remain."""
_FIELDS = ("parameters", "buckets", "options", "group_ranks", "backend")


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


class SideBySide:
    """Steps out of the tables of all ranks of one model: arrays of shape ``[ranks, steps, ...]``.

    Args:
        views: one for each rank.
        step: which, ascending; all of them are in all tables.

    Attributes:
        before: shape ``[ranks, steps]``: the end of the step before each, 0 if unknown.
        gradients: shape ``[ranks, steps, parameters]``: when each gradient was accumulated.
    """

    def __init__(self, views: Sequence[TableView], step: _Numbers) -> None:
        self.views, self.step = views, step
        shape = (len(views), len(step))
        self._steps, self.before = np.zeros((*shape, len(STEP_FIELDS)), np.int64), np.zeros(shape, np.int64)
        buckets = max((one.buckets.shape[1] for one in views), default=0)
        self._buckets = np.zeros((*shape, buckets, len(BUCKET_FIELDS)), np.int64)
        parameters = max((one.gradients.shape[1] for one in views), default=0)
        self.gradients = np.zeros((*shape, parameters), np.int64)
        for rank, one in enumerate(views):
            row = np.searchsorted(one.step, step)
            self._steps[rank], self.before[rank] = one.steps[row], one.previous_end[row]
            self._buckets[rank, :, : one.buckets.shape[1]] = one.buckets[row]
            self.gradients[rank, :, : one.gradients.shape[1]] = one.gradients[row]

    def field(self, name: str) -> _Numbers:
        """A time of each step, by its name in `STEP_FIELDS`: shape ``[ranks, steps]``."""
        return np.asarray(self._steps[:, :, STEP_FIELDS.index(name)])

    def bucket(self, name: str, buckets: int | None = None) -> _Numbers:
        """A time of each of the first so many buckets, by its name in `BUCKET_FIELDS`; None for all."""
        return np.asarray(self._buckets[:, :, :buckets, BUCKET_FIELDS.index(name)])

    def steps(self, buckets: int | None = None) -> Steps:
        """The same as `Steps`, those of devices where devices have timed all collectives.

        Args:
            buckets: how many these steps have; None: as many as the tables, which are as wide as the widest layout.
        """
        of_device = bool(len(self.step)) and all(device_rows(of_rank).all() for of_rank in self._buckets)
        times = ("device_begin", "device_begin", "device_end") if of_device else ("ready", "launched", "reduced")
        ready, launched, reduced = (self.bucket(name, buckets) for name in times)
        return (DeviceSteps if of_device else Steps)(
            ranks=tuple(one.rank for one in self.views),
            step=self.step,
            before=self.before,
            forward_begin=self.field("forward_begin"),
            forward_end=self.field("forward_end"),
            begin=self.field("backward_begin"),
            finalize=self.field("finalize"),
            end=self.field("backward_end"),
            gradients=self.gradients,
            ready=ready,
            launched=launched,
            reduced=reduced,
        )


def facts(
    views: Sequence[TableView],
    layout: Layout,
    steps: npt.NDArray[np.int64],
    *,
    kind: ModelKind,
    found: Sequence[ModelCollectives] = (),
    newer: int = 0,
    minimum_ms: float = 1.0,
    minimum_share: float = 0.25,
) -> Facts:
    """The facts about steps with one bucket layout.

    Args:
        views: tables of the ranks of one model, with these steps.
        layout: the layout; without a description there are no names and no buckets.
        steps: some of its steps.
        kind: of the model.
        found: the collectives of its parameter groups in these steps, by rank: `ModelKind.collectives`.
        newer: how many complete steps there are after these, with another layout.
        minimum_ms: smaller delays of a rank count as noise.
        minimum_share: fraction of the steps in which a rank must be late at one place.
    """
    described = layout.description or {"parameters": (), "buckets": (), "group_ranks": ()}
    parameters, buckets = described["parameters"], described["buckets"]
    made = Facts(
        kind=kind,
        steps=SideBySide(views, steps).steps(len(buckets) if layout.description else None),
        names=[one["name"] for one in parameters],
        sizes=[one["bytes"] for one in parameters],
        keys=[(one.get("dtype", "?"), one.get("device", "?")) for one in parameters],
        sparse=any(one.get("sparse") for one in parameters),
        buckets=[one["parameters"] for one in buckets],
        options=described.get("options", {}),
        missing_ranks=len(set(described["group_ranks"]) - {one.rank for one in views}),
        newer=newer,
        typical=typical_step(step_columns(views)),
    )
    return kind.with_late(made, found, buckets, minimum_ms=minimum_ms, minimum_share=minimum_share)


def step_to_draw(found: Facts, held: _Numbers) -> tuple[int, str] | None:
    """Which step a picture shows that stands for all: one in which the first straggler is late, if there is one, else
    one that is as long as most; not simply the last, which may be unlike all others.

    Args:
        found: the facts about the analysed steps.
        held: the steps whose events are still known.

    Returns:
        Its number, and what it is in words; None if none is held.
    """
    steps, whole = found.steps, found.steps.step_ns()
    chosen, words = np.ones(len(steps), bool), f"a typical one of {step_range(steps.step.tolist())}"
    if found.typical is not None:
        chosen = np.isin(steps.step, found.typical.usual)
    if found.late:
        chosen = found.late[0].late
        words = f"one of {step_range(steps.step.tolist())} in which rank {steps.ranks[found.late[0].rank]} is late"
    rows = np.flatnonzero(chosen & np.isin(steps.step, held))
    if not len(rows):
        return None
    known = np.where(np.isfinite(whole), whole, (steps.end - steps.begin).astype(np.float64)).mean(axis=0)
    exposed = (steps.end - steps.finalize).mean(axis=0)
    unlike = sum(np.abs(times - np.median(times[chosen]))[rows] for times in (known, exposed))
    return int(steps.step[rows[len(rows) - 1 - int(np.argmin(unlike[::-1]))]]), words


def mesh_dimensions(found: Facts, groups: Sequence[GroupInfo], columns: Callable[[], Columns]) -> list[MeshDimension]:
    """The dimensions of a `DeviceMesh` that communicate in the steps of these facts.

    Args:
        found: the facts, with `Facts.processes`.
        groups: all process groups.
        columns: makes the columns of `Timeline.collectives`.

    Returns:
        Empty unless some have groups with ranks on several hosts, and others do not.
    """
    hosts = {rank: str(about["host"]) for rank, about in found.processes.items()}
    named = {one.group: one for one in groups if one.mesh_dimension and len(one.ranks) > 1}
    crosses = {number: len({hosts[rank] for rank in one.ranks if rank in hosts}) > 1 for number, one in named.items()}
    if len(set(crosses.values())) < 2 or not len(found.steps):
        return []
    rows, steps = columns(), found.steps
    begin = int(np.where(steps.forward_begin > 0, steps.forward_begin, steps.begin).min())
    within = (rows["entered_ns"] >= begin) & (rows["entered_ns"] <= int(steps.end.max()))
    within &= np.isfinite(rows["transfer_ms"]) & np.isin(rows["group"], list(named))
    by_name: dict[str, list[int]] = {}
    for group in np.unique(rows["group"][within]).tolist():  # an older mesh may have dimensions of the same names
        by_name.setdefault(named[group].mesh_dimension, []).append(group)
    made = []
    for name, numbers in by_name.items():
        of = within & np.isin(rows["group"], numbers)
        times = len(steps) * len(np.unique(rows["rank"][of]))
        transfer, rate = rows["transfer_ms"][of], rows["bus_gb_s"][of]
        made.append(
            MeshDimension(
                name,
                any(crosses[number] for number in numbers),
                bytes=float((rate * transfer).sum()) * 1e6 / times,
                ns=float(transfer.sum()) * 1e6 / times,
                waited_ns=float(rows["waited_ms"][of].sum()) * 1e6 / times,
            )
        )
    return made


def unchanged_buffers(
    found: Facts, described: Mapping[int, Mapping[str, Any]], columns: Callable[[], Columns]
) -> UnchangedBuffers | None:
    """The buffers that all ranks have seen unchanged, if their broadcast lies in the forwards of these steps.

    Args:
        found: the facts.
        described: rank -> its newest description of type ``"unchanged_buffers"``.
        columns: makes the columns of `Timeline.collectives`.
    """
    ranks = found.steps.ranks
    if not len(found.steps) or not all(described.get(rank, {}).get("buffers") for rank in ranks):
        return None
    of_rank = [described[rank] for rank in ranks]
    sizes = {one["name"]: int(one["bytes"]) for one in of_rank[0]["buffers"]}
    names = [name for name in sizes if all(any(name == one["name"] for one in told["buffers"]) for told in of_rank)]
    ns = _in_forwards(found.steps, columns())
    of_bytes = max(int(one["bytes"]) for one in of_rank)
    if not names or not ns > 0:
        return None
    looks, step = min(int(one["looks"]) for one in of_rank), min(int(one["step"]) for one in of_rank)
    total = sum(sizes[name] for name in names)
    return UnchangedBuffers(names, total, max(of_bytes, total), looks, step, ns)


def _in_forwards(steps: Steps, rows: Columns) -> float:
    """The time from all ranks' entering to the end of broadcasts of buffers in a forward: of the slowest rank, the
    median over the steps; 0 if it is not known."""
    broadcasts = (rows["use"] == "buffers") & np.isfinite(rows["transfer_ms"])
    took = np.zeros((len(steps.ranks), len(steps)))
    for number, rank in enumerate(steps.ranks):
        own = broadcasts & (rows["rank"] == rank)
        entered, within = rows["entered_ns"][own], np.maximum.accumulate(steps.forward_begin[number])
        row = np.searchsorted(within, entered, side="right") - 1
        inside = (row >= 0) & (entered <= steps.forward_end[number][row])
        np.add.at(took[number], row[inside], 1e6 * rows["transfer_ms"][own][inside])
    slowest = took.max(axis=0)
    return float(np.median(slowest[slowest > 0])) if (slowest > 0).any() else 0.0


def accumulation(found: Facts, described: Mapping[int, Mapping[str, Any]]) -> Accumulation | None:
    """The optimizer steps before which all ranks have seen several backwards that reduced their gradients.

    Args:
        found: the facts.
        described: rank -> its newest description of type ``"accumulation"``.
    """
    told = [described.get(rank, {}) for rank in found.steps.ranks]
    if not told or not all(one.get("optimizer_steps") for one in told):
        return None
    least = min(told, key=lambda one: int(one["optimizer_steps"]))
    return Accumulation(
        optimizer_steps=int(least["optimizer_steps"]),
        backwards=int(least["backwards"]),
        fewest=min(int(one["fewest"]) for one in told),
        most=max(int(one["most"]) for one in told),
    )
