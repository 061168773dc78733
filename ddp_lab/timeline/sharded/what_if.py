"""What-if questions about sharded parameters: the facade of `ddp_lab.simulation.sharding`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...simulation.parameter_groups import Sharding, groups_by_name, numbered_modules
from ...simulation.sharding import (
    ShardedStep,
    ShardedWorkload,
    ShardingCosts,
    simulate_sharded,
    simulate_zero_1,
)
from ...simulation.step_times import StepTimes
from .. import what_if as replicated
from ..workloads import recorded_step, workload
from .workload import RecordedSharding, of_ddp, of_groups

if TYPE_CHECKING:
    from ..model import TimelineModel

__all__ = ["ShardedWhatIf", "is_asked", "what_if"]

_DDP, _FULLY_SHARD, _REPLICATE, _ZERO_1 = "DistributedDataParallel", "fully_shard", "replicate", "zero-1"
_OPTIONS = {
    _FULLY_SHARD: ("groups", "prefetch", "reshard_after_forward", "world_size"),
    _REPLICATE: ("groups", "world_size"),
    _ZERO_1: ("world_size",),
}
_FROM = {_DDP: (_FULLY_SHARD, _ZERO_1), _FULLY_SHARD: (_FULLY_SHARD,), _REPLICATE: (_REPLICATE,)}


@dataclass(frozen=True)
class ShardedWhatIf:
    """A predicted step of a sharded model.

    Attributes:
        prediction: the step's times, with what happens when (`spans`).
        workload: what a rank computes.
        costs: what sharding adds.
        recorded_ms: the recorded step.
    """

    prediction: ShardedStep
    workload: ShardedWorkload
    costs: ShardingCosts
    recorded_ms: float

    @property
    def step_ms(self) -> float:
        """The step time in milliseconds."""
        return self.prediction.step_ns / 1e6

    @property
    def breakdown(self) -> dict[str, float]:
        """Milliseconds by part; all but ``hidden`` add up to `step_ms`."""
        return self.prediction.parts_ms

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.breakdown.items())
        return f"<predicted step of {self.step_ms:.2f} ms (recorded: {self.recorded_ms:.2f}): {parts}>"


def is_asked(timeline: TimelineModel, reducer: int | None, what: Mapping[str, Any]) -> bool:
    """Whether a question is about sharding: the model has parameter groups, or one of these options is given."""
    info = timeline.model(reducer)
    own = {"sharding", *_OPTIONS[_FULLY_SHARD]} - {"world_size"}  # that is an option of a replicated step, too
    return bool(own & set(what)) or (info is not None and _kind(timeline, info.reducer) != _DDP)


def _kind(timeline: TimelineModel, reducer: int) -> str:
    return str(timeline.assignment(reducer).get("kind", _DDP))


def what_if(
    timeline: TimelineModel,
    costs: object = None,
    *,
    reducer: int | None = None,
    sharding: str | None = None,
    **changes: Any,
) -> ShardedWhatIf:
    """See `Timeline.simulate`."""
    info = timeline.model(reducer)
    if info is None:
        raise ValueError("no step has been recorded: train some steps first")
    kind = _kind(timeline, info.reducer)
    asked = sharding or (_FULLY_SHARD if kind == _DDP else kind)
    if sharding is not None and sharding not in _OPTIONS:
        raise ValueError(f"sharding={sharding!r} is not valid; choose one of {', '.join(_OPTIONS)}")
    if asked not in _FROM[kind]:
        raise ValueError(
            f"{info.module} was recorded with {kind}, from which no step with {asked} can be predicted; record it with "
            f"{_DDP}, or choose another model (model=)"
        )
    given = {name: value for name, value in changes.items() if value is not None}
    if wrong := sorted(given.keys() - _OPTIONS[asked]):
        raise ValueError(
            f"{', '.join(wrong)}: not an option of a step with {asked}; those are {', '.join(_OPTIONS[asked])}"
        )
    if costs is not None and not isinstance(costs, ShardingCosts):
        raise ValueError(f"link: a step with {asked} needs ShardingCosts (Cluster.measure_sharding), got {costs!r}")
    if kind != _DDP:
        return _grouped(of_groups(timeline, info.reducer, costs), given)
    found = of_ddp(timeline, info.reducer, costs or _guessed(timeline, info.reducer))
    if asked != _ZERO_1:
        return _grouped(found, given)
    ranks = given.get("world_size")
    step = simulate_zero_1(found.workload, _ddp_step(timeline, info.reducer, ranks), found.costs, ranks)
    return ShardedWhatIf(step, found.workload, found.costs, found.step_ns / 1e6)


def _grouped(found: RecordedSharding, given: Mapping[str, Any]) -> ShardedWhatIf:
    """A step with parameter groups, which are sharded or replicated."""
    waits = "host" if found.on_host else "streams"
    known, costs, plan = found.workload, found.costs, dict(given)
    ranks = plan.pop("world_size", known.ranks)
    replicas = ranks if found.replicas == known.ranks > 1 else found.replicas  # those of `replicate` are all ranks
    if found.sharding is None:
        plan.setdefault("groups", numbered_modules(known.names))
    else:  # what is recorded is predicted as it was, see [Note: the anchor]
        replayed = simulate_sharded(known, found.sharding, costs, replicas=found.replicas, waits=waits)
        factor = (found.step_ns - replayed.other_ns) / max(replayed.step_ns - replayed.other_ns, 1.0)
        known, costs = known.scaled(factor), costs.scaled(factor)
    if "groups" in plan:
        plan["groups"] = groups_by_name(known.names, plan["groups"])
    how = replace(found.sharding or Sharding(), **plan)
    step = simulate_sharded(known, how, costs, ranks=ranks, replicas=replicas, waits=waits)
    return ShardedWhatIf(step, known, costs, found.step_ns / 1e6)


def _guessed(timeline: TimelineModel, reducer: int) -> ShardingCosts:
    recorded = workload(timeline, reducer)
    return ShardingCosts.of_all_reduce(
        replicated.fit_link(timeline, reducer), recorded.world_size, recorded.write_back_ns[1]
    )


def _ddp_step(timeline: TimelineModel, reducer: int, ranks: int | None) -> StepTimes:
    """The step with plain DDP: as recorded, or as predicted on another number of ranks."""
    recorded = workload(timeline, reducer)
    if ranks is None or ranks == recorded.world_size:
        return recorded_step(timeline, recorded, reducer)
    return replicated.what_if(timeline, None, reducer=reducer, world_size=ranks).prediction
