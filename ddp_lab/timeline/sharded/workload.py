"""The input of the simulator of sharded steps from a timeline: of a DistributedDataParallel, or of parameter groups.

[Note: a sharded step from a step of DDP]
What a DDP run records holds what each part of a model computes: gradients come one after the other, and the time
between two of them is that of the later one's layer. The forward is divided in the same proportion. Taken out is what
is DDP's own: what collectives beside the backward slowed it down by, and the copies into buckets, which take as long as
the copies back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...analysis.parameter_groups import (
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_UNSHARD,
    FORWARD,
    FORWARD_UNSHARD,
    REDUCE_SCATTER,
    ModelCollectives,
    done_between,
)
from ...analysis.steps import fit_line
from ...simulation.parameter_groups import ParameterGroup, Sharding
from ...simulation.sharding import Cost, GroupPoint, ShardedWorkload, ShardingCosts
from ..judged_steps import SideBySide
from ..tables.span_columns import step_columns
from ..workloads import chosen_steps, gradients_of, workload

if TYPE_CHECKING:
    from ..model import TimelineModel

__all__ = ["RecordedSharding", "of_ddp", "of_groups"]

_Floats = npt.NDArray[np.float64]
_DISTURBED = 1.2  # times the median step


@dataclass(frozen=True)
class RecordedSharding:
    """What a timeline says about a model.

    Attributes:
        workload: what a rank computes.
        costs: of sharding, as far as the recording tells.
        sharding: how it is sharded; None: it is replicated.
        step_ns: typical time of the recorded steps.
        on_host: whether it ran on the CPU.
        replicas: how often all parameters exist, see `simulate_sharded`.
    """

    workload: ShardedWorkload
    costs: ShardingCosts
    sharding: Sharding | None
    step_ns: float
    on_host: bool
    replicas: int = 1


def of_ddp(timeline: TimelineModel, reducer: int | None, costs: ShardingCosts) -> RecordedSharding:
    """Of a DistributedDataParallel: [Note: a sharded step from a step of DDP]."""
    _, steps = chosen_steps(timeline, reducer)
    recorded = workload(timeline, reducer)
    alone = recorded.alone(costs.contention)
    order = np.argsort(alone.ready_ns.mean(axis=0), kind="stable")
    typical = _between(alone.ready_ns, alone.computed_ns, order).mean(axis=0)
    typical = np.maximum(typical - recorded.write_back_ns[1] * recorded.sizes, 0.0)
    begin, known = steps.field("backward_begin"), gradients_of(steps, len(recorded.names))
    ready = np.where(known > 0, known - begin[:, :, None], alone.ready_ns[:, None, :])
    backward = _between(ready, steps.field("finalize") - begin, order)
    backward = np.maximum(backward, 0.0)
    backward *= typical / np.maximum(backward.mean(axis=(0, 1)), 1.0)
    optimizer = _optimizer_ns(steps)
    made = ShardedWorkload(
        names=recorded.names,
        sizes=recorded.sizes,
        order=tuple(order[::-1].tolist()),
        forward_ns=backward * (float(recorded.forward_ns.mean()) / max(float(typical.sum()), 1.0)),
        backward_ns=backward,
        optimizer_ns=optimizer,
        other_ns=max(float(recorded.other_ns.mean()) - optimizer, 0.0),
        ranks=recorded.world_size,
    )
    on_host = all(device == "cpu" for _, device in recorded.keys)
    return RecordedSharding(made, costs, None, float(recorded.step_ns or 0.0), on_host)


def _between(ready: npt.NDArray[Any], computed: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> _Floats:
    """ns from each gradient's predecessor to it, ``[..., parameters]``; what follows the last one belongs to it."""
    made = np.zeros(ready.shape)
    made[..., order] = np.diff(ready[..., order], prepend=0)
    made[..., order[-1]] += computed - ready[..., order[-1]]
    return made


def _optimizer_ns(steps: SideBySide) -> float:
    return float(np.median(step_columns(steps.views)["optimizer_ms"])) * 1e6


def of_groups(timeline: TimelineModel, reducer: int | None, costs: ShardingCosts | None) -> RecordedSharding:
    """Of a model with `fully_shard` or `replicate`.

    Args:
        timeline: the recording.
        reducer: which model.
        costs: measured ones; None: those that the recording shows.
    """
    description, steps = chosen_steps(timeline, reducer)
    layout = description["buckets"]
    parts = timeline.collectives_in(steps.views)
    collectives = [one for _, one in parts]
    step_ns, before_ns = _host_steps(steps) if not collectives[0].on_device else _device_steps(collectives)
    rows = _usual(collectives, step_ns)
    replicas, ranks = _mesh(description)
    shown = _costs(layout, steps, collectives, rows, (replicas, ranks))
    if costs is not None:
        here = costs.over(ranks, replicas)
        scaled: dict[str, Any] = {name: _scaled(getattr(here, name), points) for name, points in shown.items()}
        found = replace(here, optimizer_ns=0.0, **scaled)  # the recorded rest of the step has it
    else:
        gathers, scatters, reduces, around = (_line(points) for points in shown.values())
        found = ShardingCosts(gathers, scatters, around, around, all_reduce=reduces, ranks=ranks, replicas=replicas)
    own = _computed(layout, collectives, rows)
    if ranks == 1:
        if collectives[0].on_device:
            raise ValueError(
                f"{description['module']} has replicate and runs on a device, which records nothing of its forward: "
                "record it with DistributedDataParallel or fully_shard to predict its step"
            )
        _add_what_no_collective_precedes(own, description, steps, collectives, rows)
    again = set(collectives[0].group[collectives[0].kind == BACKWARD_UNSHARD].tolist())
    for number, one in enumerate(layout):
        size, tensors = float(one["unsharded_bytes"]), len(one["parameters"])
        copies = found.gathering.ns(size, tensors) * (1.0 if ranks > 1 else 0.5)
        own[0, :, :, number] -= copies
        own[1, :, :, number] -= found.reducing.ns(size, tensors) + copies * (number in again)
    before = float(before_ns[rows].mean())
    made = replace(_workload(description, collectives[0], np.maximum(own, 0.0)), other_ns=before)
    how, on_host = _sharding(description, collectives[0]), not collectives[0].on_device
    return RecordedSharding(made, found, how, float(np.median(step_ns[step_ns > 0])), on_host, replicas)


def _mesh(description: Mapping[str, Any]) -> tuple[int, int]:
    """How often all parameters exist, and over how many ranks each is sharded."""
    ranks = len(description["group_ranks"])
    if description["kind"] == "replicate":
        return ranks, 1
    mesh = [int(one["size"]) for one in description["buckets"][0].get("mesh", ())]
    replicas = mesh[0] if len(mesh) > 1 else 1
    return replicas, ranks // replicas


def _host_steps(steps: SideBySide) -> tuple[_Floats, _Floats]:
    """ns of each step, and of what comes before its forward; means over the ranks."""
    whole, before = steps.field("backward_end") - steps.before, steps.field("forward_begin") - steps.before
    return whole.mean(axis=0), before.mean(axis=0)


def _device_steps(by_rank: Sequence[ModelCollectives]) -> tuple[_Floats, _Floats]:
    """The same as the streams of devices come to them; 0 where it is not known."""
    begin, end, first = (np.zeros((len(by_rank), len(by_rank[0].begin))) for _ in range(3))
    for rank, one in enumerate(by_rank):
        begin[rank], end[rank], first[rank] = one.begin, one.end, np.iinfo(np.int64).max
        np.minimum.at(first[rank], one.row, one.met)
    known = ((begin > 0) & (end > 0)).all(axis=0)
    return np.where(known, (end - begin).mean(axis=0), 0.0), (first - begin).mean(axis=0)


def _usual(by_rank: Sequence[ModelCollectives], step_ns: _Floats) -> list[int]:
    """Rows of the steps in which all ranks had their usual collectives, without those that were disturbed.

    Raises:
        ValueError: there is none.
    """
    kinds = [
        [tuple(zip(one.kind[one.row == row], one.group[one.row == row], strict=True)) for row in range(len(step_ns))]
        for one in by_rank
    ]
    counted = Counter(order for of_rank in kinds for order in of_rank if order)
    usual = counted.most_common(1)[0][0] if counted else ()
    known = np.flatnonzero(step_ns > 0).tolist()
    rows = [row for row in known if usual and all(of_rank[row] == usual for of_rank in kinds)]
    if not rows:
        raise ValueError("the collectives of these steps are no longer kept: train a few more steps")
    most = _DISTURBED * float(np.median(step_ns[rows]))
    return [row for row in rows if step_ns[row] <= most]


def _workload(description: Mapping[str, Any], found: ModelCollectives, own: _Floats) -> ShardedWorkload:
    """The computation of each group, divided among its parameters by bytes."""
    layout, parameters = description["buckets"], description["parameters"]
    sizes = np.array([one["bytes"] for one in parameters], np.int64)
    by_parameter = np.zeros((*own.shape[:3], len(parameters)))
    for number, one in enumerate(layout):
        of = list(one["parameters"])
        by_parameter[..., of] = own[..., number, None] * (sizes[of] / max(int(sizes[of].sum()), 1))
    first = found.group[found.kind == FORWARD_UNSHARD].tolist()
    first = first or found.group[found.kind == ALL_REDUCE][::-1].tolist()  # of the last step, the last group first
    groups = list(dict.fromkeys([*first, *range(len(layout))]))
    return ShardedWorkload(
        names=tuple(str(one["name"]) for one in parameters),
        sizes=sizes,
        order=tuple(index for number in groups if 0 <= number < len(layout) for index in layout[number]["parameters"]),
        forward_ns=by_parameter[0],
        backward_ns=by_parameter[1],
        optimizer_ns=0.0,
        other_ns=0.0,
        ranks=len(description["group_ranks"]),
    )


def _sharding(description: Mapping[str, Any], found: ModelCollectives) -> Sharding:
    """How the recorded model is sharded: the group that holds the root's own parameters is none of `groups`."""
    layout = description["buckets"]
    root = next((number for number, one in enumerate(layout) if one["name"] == description["module"]), -1)
    groups = tuple(
        ParameterGroup((one["name"],), tuple(one["parameters"])) for number, one in enumerate(layout) if number != root
    )
    reshard = any(one.get("reshard_after_forward", True) for number, one in enumerate(layout) if number != root)
    reshard = reshard and description["kind"] != "replicate"
    ahead = found.goes_on & found.ahead & (found.kind == FORWARD_UNSHARD)
    return Sharding(groups, reshard, 1 if ahead.any() else None)


def _computed(layout: Sequence[Mapping[str, Any]], by_rank: Sequence[ModelCollectives], rows: Sequence[int]) -> _Floats:
    """ns between collectives in the forward and in the backward of each group: ``[2, ranks, steps, groups]``."""
    made = np.zeros((2, len(by_rank), len(rows), len(layout)))
    for rank, one in enumerate(by_rank):
        for place, row in enumerate(rows):
            for phase, group, begin, end in done_between(one, np.flatnonzero(one.row == row), layout):
                if phase in (FORWARD, BACKWARD) and group >= 0:
                    made[int(phase == BACKWARD), rank, place, group] += max(end - begin, 0)
    return made


def _add_what_no_collective_precedes(
    own: _Floats,
    description: Mapping[str, Any],
    steps: SideBySide,
    by_rank: Sequence[ModelCollectives],
    rows: Sequence[int],
) -> None:
    """The forward, and the backward of the group that is reduced first, of a model that gathers nothing.

    Args:
        own: shape ``[2, ranks, steps, groups]``: what is done between collectives, in ns; is written to.
    """
    forward = (steps.field("forward_end") - steps.field("forward_begin"))[:, rows]
    begin = steps.field("backward_begin")[:, rows]
    for rank, one in enumerate(by_rank):
        for place, row in enumerate(rows):
            first = np.flatnonzero(one.row == row)[0]
            own[1, rank, place, one.group[first]] += max(int(one.met[first]) - int(begin[rank, place]), 0)
    backward = own[1].sum(axis=-1, keepdims=True)
    own[0] = forward[..., None] * own[1] / np.maximum(backward, 1.0)  # in the same proportion


_OF_KIND = {
    "all_gather": (FORWARD_UNSHARD, BACKWARD_UNSHARD),
    "reduce_scatter": (REDUCE_SCATTER,),
    "all_reduce": (ALL_REDUCE,),
}


def _costs(
    layout: Sequence[Mapping[str, Any]],
    steps: SideBySide,
    by_rank: Sequence[ModelCollectives],
    rows: Sequence[int],
    mesh: tuple[int, int],
) -> dict[str, list[GroupPoint]]:
    """Bytes, tensors and ns of each group's collectives, and of what is around its reduction.

    A collective takes as long as on the rank that enters it last: the others in its process group wait for that one.
    Where ranks were not recorded, all others count as one group.

    Args:
        mesh: numbers of replicas, and of ranks in each.
    """
    found: dict[str, list[GroupPoint]] = {**{name: [] for name in _OF_KIND}, "reducing": []}
    ready, reduced = (steps.bucket(name, len(layout))[:, rows] for name in ("ready", "reduced"))
    whole = np.where(ready > 0, reduced - ready, 0)
    shape = mesh if len(by_rank) == math.prod(mesh) else (1, len(by_rank))
    for number, one in enumerate(layout):
        size, tensors = float(one["unsharded_bytes"]), len(one["parameters"])
        around = whole[:, :, number].astype(np.float64)
        for name, kinds in _OF_KIND.items():
            took = np.stack([_took(of_rank, number, kinds, rows) for of_rank in by_rank])
            if took.size:
                between_replicas = name == "all_reduce"
                met = took.reshape(*shape, -1).min(axis=0 if between_replicas and shape == mesh else 1)
                found[name].append((size / mesh[1] if between_replicas else size, tensors, float(met.mean())))
            if name != "all_gather" and took.shape[1] == len(rows):
                around -= took
        if not by_rank[0].on_device and (ready[:, :, number] > 0).all():
            found["reducing"].append((size, tensors, max(float(around.mean()), 0.0)))
    return found


def _took(one: ModelCollectives, group: int, kinds: Sequence[int], rows: Sequence[int]) -> npt.NDArray[np.int64]:
    chosen = (one.group == group) & np.isin(one.kind, kinds) & (one.ended > 0) & np.isin(one.row, rows)
    chosen &= one.on_device | ~one.goes_on
    return np.asarray((one.ended - one.entered)[chosen])


def _line(points: Sequence[GroupPoint]) -> Cost:
    line = fit_line([size for size, _, _ in points], [ns for _, _, ns in points])
    return Cost(line.start_ns, 0.0, line.ns_per_byte)


def _scaled(cost: Cost, points: Sequence[GroupPoint]) -> Cost:
    """A measured cost, so that it takes as long as recorded: the machine differs from minute to minute."""
    whole = sum(cost.ns(size, tensors) for size, tensors, _ in points)
    factor = sum(ns for _, _, ns in points) / whole if whole else 1.0
    return cost.scaled(factor)
