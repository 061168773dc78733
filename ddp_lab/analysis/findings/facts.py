"""The facts that findings are based on, and the finding itself.

[Note: gains]
A gain is the estimated saving of one change: the time that a replay of the recorded steps saves with it
([Note: the replay]). Each is estimated alone. Two gains don't add up where both save the same waiting time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ...formatting import step_range
from ..parameter_groups import NO_GROUPS, GroupedSteps
from ..step_metrics import TypicalStep
from ..step_parts import StepParts
from ..steps import Replay, Steps
from ..stragglers import LastRanks, Late, LatePlace, last_ranks

__all__ = ["Accumulation", "Facts", "Finding", "Kind", "MeshDimension", "UnchangedBuffers"]


@dataclass(frozen=True)
class Finding:
    """One thing to change.

    Attributes:
        kind: a stable identifier: ``"bucket-too-big"``, ``"bucket-too-small"``, ``"first-bucket-late"``,
            ``"parameter-last"``, ``"order-changed"``, ``"unused-parameters"``, ``"find-unused-for-nothing"``,
            ``"static-graph-possible"``, ``"straggler"``, ``"ranks-disturbed"``, ``"communication-bound"``,
            ``"copy-cost"``, ``"small-tensors"``, ``"shared-cores"``, ``"data-loading"``, ``"other-collectives"``,
            ``"evaluation-cost"``, ``"logging-cost"``, ``"checkpoint-cost"``, ``"program-line"``, ``"value-read"``,
            ``"blocking-copies"``, ``"context-on-other-gpu"``, ``"unchanged-buffers"`` or
            ``"reduced-in-each-backward"``; of models with `fully_shard` or `replicate`:
            ``"late-parameter-group"``, ``"exposed-unshard"``, ``"exposed-backward-unshard"``,
            ``"parameter-groups-too-small"`` or ``"parameter-group-too-large"``; of a `DeviceMesh`:
            ``"mesh-dimension-between-hosts"``.
        title: what is wrong, in one sentence.
        evidence: the numbers that support it.
        remedy: the suggested fix.
        gain_percent: the estimated saving, in percent of the step. Each is estimated alone: two do not add
            up where both save the same waiting time.
        rank: the rank that it is about, None if all.
        bucket: the bucket or the parameter group, None if all.
        parameter: the qualified name of the parameter, None if it is about none or several.
        steps: the first and the last step that were analysed, None if that is not known.
    """

    kind: str
    title: str
    evidence: str
    remedy: str
    gain_percent: float
    rank: int | None = None
    bucket: int | None = None
    parameter: str | None = None
    steps: tuple[int, int] | None = None

    def __str__(self) -> str:
        which = f"; {step_range(range(self.steps[0], self.steps[1] + 1))}" if self.steps else ""
        return f"{self.title} {self.evidence} {self.remedy} (about {self.gain_percent:.1f} % of the step{which})"


@dataclass(frozen=True)
class MeshDimension:
    """What the groups of one dimension of a `DeviceMesh` communicate in a step, per rank.

    Attributes:
        name: of the dimension.
        between_hosts: whether its groups have ranks on several hosts.
        bytes: over each link of a ring.
        ns: from the last rank's entering to the end, in all collectives together.
        waited_ns: how long a rank waits for them.
    """

    name: str
    between_hosts: bool
    bytes: float
    ns: float
    waited_ns: float


@dataclass(frozen=True)
class UnchangedBuffers:
    """Buffers that each forward broadcasts although they had the same values in each look at them, on all ranks.

    Attributes:
        names: theirs.
        bytes: of them.
        of_bytes: of all buffers that are broadcast.
        looks: how often each rank has compared them.
        step: of the last look.
        ns: how long the broadcast of all buffers takes in a forward, once all ranks have entered it.
    """

    names: Sequence[str]
    bytes: int
    of_bytes: int
    looks: int
    step: int
    ns: float


@dataclass(frozen=True)
class Accumulation:
    """Optimizer steps before which several backwards added up gradients, and each of them reduced them.

    Attributes:
        optimizer_steps: how many of them there were, one after the other.
        backwards: in all of them.
        fewest, most: backwards of one of them.
    """

    optimizer_steps: int
    backwards: int
    fewest: int
    most: int


class Kind(Protocol):
    """What a kind of model has to say of the facts about one; it is a `ModelKind` of `ddp_lab.timeline.model_kinds`."""

    def late_places(self, facts: Facts) -> list[LatePlace]:
        """The straggler locations, the most expensive first."""

    def findings(self, facts: Facts) -> list[Finding]:
        """What to change, in any order."""

    def findings_of_few(self, facts: Facts) -> list[Finding]:
        """The same for steps that are too few to say something of their speed."""

    def analysed(self, facts: Facts) -> str:
        """What `findings` are about, besides the program around the model."""


@dataclass(frozen=True)
class Facts:
    """What findings are based on: one model with one bucket layout.

    Attributes:
        kind: of the model.
        steps: the times of its steps, without the warm-up.
        names: qualified name of each parameter.
        sizes: bytes of each parameter's gradient.
        keys: (dtype, device) of each parameter.
        buckets: parameters by bucket.
        options: what the model was built with (see tutorials/site/descriptions.md); empty if that is not known.
        late: where ranks fall behind; their places are positions in `Steps.places`.
        missing_ranks: how many ranks of the group sent no events; if any, the ranks cannot be compared.
        newer: how many complete steps are newer than `steps`, have another bucket layout and are too few to analyse.
        parts: where the time of a step goes; None if that is not known.
        groups: what the parameter groups of a model with `fully_shard` or `replicate` communicated.
        processes: rank -> facts about its process: ``host``, ``cores``, ``threads``, and for GPUs ``contexts``.
        dimensions: of the `DeviceMesh`, whose groups communicate in these steps; empty if they all lie in one host.
        sparse: whether some gradients are sparse, which hooks that compress do not take.
        unchanged: buffers that are broadcast although they never change; None if there are none.
        accumulation: of gradients that each backward reduces; None if there is none.
        failed: whether the run ended early: then its speed is not what to look at.
        typical: one of the steps as they usually are: the numbers of overview, summary and report.
    """

    kind: Kind
    steps: Steps
    names: Sequence[str]
    sizes: Sequence[int]
    keys: Sequence[tuple[str, str]]
    buckets: Sequence[Sequence[int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    late: Sequence[Late] = ()
    missing_ranks: int = 0
    newer: int = 0
    parts: StepParts | None = None
    groups: GroupedSteps = NO_GROUPS
    processes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    dimensions: Sequence[MeshDimension] = ()
    sparse: bool = False
    unchanged: UnchangedBuffers | None = None
    accumulation: Accumulation | None = None
    failed: bool = False
    typical: TypicalStep | None = None

    @property
    def together(self) -> bool:
        """Whether ranks can be compared: several of them, all known, and every parameter in one bucket."""
        held = sorted(index for bucket in self.buckets for index in bucket)
        return len(self.steps.ranks) > 1 and not self.missing_ranks and held == list(range(len(self.sizes)))

    @cached_property
    def replay(self) -> Replay:
        """The collectives of the steps, to be replayed with changes."""
        return Replay(self.steps, self.buckets, self.sizes)

    @cached_property
    def last(self) -> LastRanks:
        """How often each rank was last: what findings, the summary, the dashboard and the report say of it."""
        return last_ranks(self.replay.waited)

    @cached_property
    def step_ns(self) -> float:
        """Typical time of a step."""
        return self.groups.device_step_ns or self.steps.typical_ns()  # the host may be ahead of a device

    @cached_property
    def used(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which parameters got a gradient: shape ``[ranks, steps, parameters]``."""
        made = np.zeros((*self.steps.begin.shape, len(self.sizes)), bool)
        known = self.steps.gradients[:, :, : len(self.sizes)]
        made[:, :, : known.shape[2]] = known > 0
        return made

    @cached_property
    def by_readiness(self) -> list[int]:
        """Parameters in their usual order of readiness; those that are never ready keep their place at the end."""
        usual = np.median(self.replay.gradients, axis=(0, 1))
        usual[~self.used.any(axis=(0, 1))] = np.inf
        held = [index for bucket in self.buckets for index in bucket]
        place = {index: position for position, index in enumerate(held)}
        return sorted(held, key=lambda index: (usual[index], place[index]))

    def percent(self, saved_ns: float) -> float:
        """A saving in percent of the step."""
        return 100 * saved_ns / self.step_ns if self.step_ns > 0 else 0.0

    def percent_of_mean(self, saved_ns: float) -> float:
        """A mean over the steps in percent of the mean step: long steps count in both."""
        whole = self.steps.step_ns()
        known = float(np.nanmean(whole)) if np.isfinite(whole).any() else self.step_ns
        return 100 * saved_ns / known if known > 0 else 0.0

    def percent_of_parts(self, seconds: float) -> float:
        """Seconds out of `parts` in percent of what they are parts of: the mean of more steps."""
        whole = sum(self.parts.mean.values()) if self.parts is not None else 0.0
        return 100 * seconds / whole if whole > 0 else 0.0

    def place_of(self, late: Late) -> tuple[int | None, str | None]:
        """The bucket and the parameter at which a rank falls behind; None for what is unknown, or without a place."""
        if late.place < 0:
            return None, None
        bucket, parameter = self.steps.place(late.place, self.buckets)
        return bucket, self.names[parameter] if self.names and parameter is not None else None
