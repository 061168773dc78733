"""The steps that are analysed: those that all ranks have completed with one bucket layout, and the facts about them.

[Note: the layout that is judged] is in `model_registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.findings import Accumulation, Facts, MeshDimension, UnchangedBuffers, findings, has_speed
from ..analysis.parameter_groups import ModelCollectives
from ..analysis.step_parts import StepParts
from ..analysis.steps import DeviceSteps, Steps
from ..formatting import step_range
from . import summary as words
from .clocks import clocks_of
from .event_tables import TimelineModel
from .model_kinds import ModelKind
from .model_registry import NOTICED, Layout, newest
from .tables.collectives import GroupInfo
from .tables.span_columns import (
    Columns,
    TableView,
    device_rows,
    span_columns,
    step_columns,
    sync_columns,
    typical_step,
)
from .tables.step_table import BUCKET_FIELDS, STEP_FIELDS

__all__ = [
    "ANALYSED_STEPS",
    "PARTED_STEPS",
    "WARM_UP",
    "SideBySide",
    "analysis_input",
    "parts",
    "step_to_draw",
    "summary",
]

_Numbers = npt.NDArray[np.int64]

ANALYSED_STEPS = 100
"""How many complete steps the numbers of views, summary, findings and reports are from, unless they say otherwise."""
PARTED_STEPS = 500  # complete steps that their parts are taken from: samples are few
WARM_UP = 3
"""How many first steps of a bucket layout are ignored, if as many others remain."""


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


def _facts(
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
    return kind.with_late(made, found, buckets, minimum_ms, minimum_share)


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


def _mesh_dimensions(found: Facts, groups: Sequence[GroupInfo], columns: Callable[[], Columns]) -> list[MeshDimension]:
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


def _unchanged_buffers(
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


def _accumulation(found: Facts, described: Mapping[int, Mapping[str, Any]]) -> Accumulation | None:
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


def analysis_input(
    timeline: TimelineModel,
    model: int | None = None,
    last_steps: int = ANALYSED_STEPS,
    *,
    between: tuple[int, int] | None = None,
    **options: float,
) -> Facts | None:
    """The facts behind findings, stragglers and the summary: times of the analysed steps, straggler locations.

    Args:
        timeline: whose steps; this function is its method `analysis_input`.
        model: which model; None for the most recently active.
        last_steps: how many complete steps to analyse, see [Note: the layout that is judged].
        between: the first and the last step to analyse; None: up to the newest.
        options: ``minimum_ms`` and ``minimum_share`` of `Timeline.stragglers`.

    Returns:
        None if no step is complete on all ranks.
    """
    chosen = timeline.model_to_analyse(model)
    known = timeline.layouts(chosen.reducer) if chosen is not None else []
    if between is not None:
        within = (one.only((one.step >= between[0]) & (one.step <= between[1])) for one in known)
        known = [one for one in within if len(one.step)]
    layout = newest(known)
    if chosen is None or layout is None:
        return None
    steps = layout.warm(WARM_UP, last_steps)
    newer = sum(int((one.step > steps[-1]).sum()) for one in known)
    group = set((layout.description or {}).get("group_ranks", ()))  # a file may have ranks of another group
    views = [one for one in timeline.views_of(chosen.reducer, steps) if not group or one.rank in group]
    collectives = [one for _, one in timeline.collectives_in(views)]
    found = _facts(views, layout, steps, kind=timeline.kind(chosen.reducer), found=collectives, newer=newer, **options)
    found = replace(found, parts=parts(timeline, chosen.reducer), processes=timeline.processes())
    found = replace(found, failed=timeline.failure is not None and bool(timeline.failure.ends))
    found = replace(found, dimensions=_mesh_dimensions(found, timeline.groups(), timeline.collective_columns))
    buffers, accumulated = (timeline.noticed(kind, chosen.reducer) for kind in NOTICED)
    return replace(
        found,
        unchanged=_unchanged_buffers(found, buffers, timeline.collective_columns),
        accumulation=_accumulation(found, accumulated),
    )


def parts(timeline: TimelineModel, model: int | None = None, last_steps: int = PARTED_STEPS) -> StepParts:
    """See `Timeline.parts`."""
    chosen = timeline.model_to_analyse(model)
    layout = timeline.analysis_layout(chosen.reducer) if chosen is not None else None
    if chosen is None or layout is None:
        return StepParts(0, {}, {}, {})
    return timeline.parts_of(chosen.reducer, layout.warm(WARM_UP, last_steps))


def summary(timeline: TimelineModel, model: int | None, last_steps: int) -> str:
    """What is said of a model, see `Timeline.summary`; "" if there is none."""
    chosen = timeline.model_to_analyse(model)
    if chosen is None:
        return ""
    ranks = timeline.ranks()
    dropped = sum(one.dropped for one in ranks)
    layout, found = timeline.analysis_layout(chosen.reducer), analysis_input(timeline, chosen.reducer, last_steps)
    if layout is None or found is None:
        return words.incomplete(chosen, dropped)
    views = timeline.views_of(chosen.reducer, found.steps.step)
    spans = span_columns(views, {})
    said = words.Facts(
        kind=timeline.kind(chosen.reducer),
        info=chosen,
        steps=step_columns(views),
        spans=spans,
        sync=sync_columns(spans, {chosen.reducer: len(chosen.ranks)}),
        late=found.kind.late_places(found) if has_speed(found) else [],
        assignment=layout.description,
        dropped=dropped,
        findings=findings(found),
        kept=timeline.kept(chosen.reducer),
        clocks=clocks_of({one.rank: one.status for one in ranks}),
        parts=found.parts,
        judged=found,
    )
    return words.summary(said)
