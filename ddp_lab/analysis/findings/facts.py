"""What findings are made from, and what one is.

[Note: gains]
A gain is what the recorded steps would have saved, by [Note: the replay], if one thing had been different. Gains are
estimates, each for a change of its own: two of them don't add up where both save the same waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...formatting import step_range
from ..steps import Replay, Steps
from ..stragglers import Late

__all__ = ["Facts", "Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing to change.

    Attributes:
        kind: a stable identifier: ``"bucket-too-big"``, ``"bucket-too-small"``, ``"first-bucket-late"``,
            ``"parameter-last"``, ``"order-changed"``, ``"unused-parameters"``, ``"find-unused-for-nothing"``,
            ``"static-graph-possible"``, ``"straggler"``, ``"ranks-disturbed"``, ``"communication-bound"``,
            ``"copy-cost"`` or ``"small-tensors"``.
        title: what is wrong, in one sentence.
        evidence: the numbers that say so.
        remedy: what to do.
        gain_percent: what it would save, in percent of the step; see [Note: gains].
        rank: which rank it is about, None if all.
        bucket: which bucket, None if all.
        parameter: qualified name of the parameter, None if it is about none or several.
        steps: the first and the last step that were looked at, None if that is not known.
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
class Facts:
    """What findings are made from: one model under one assignment of buckets.

    Attributes:
        steps: the times of its steps, warmed up.
        names: qualified name of each parameter.
        sizes: bytes of each parameter's gradient.
        keys: (dtype, device) of each parameter.
        buckets: parameters by bucket.
        options: what the model was built with (see tutorials/site/descriptions.md); empty if that is not known.
        late: where ranks fall behind; their places are positions in `Steps.places`.
        missing_ranks: how many ranks of the group sent no events: what lies between the ranks is then not known.
        newer: how many complete steps are newer than `steps`, with other buckets, and too few to say anything.
    """

    steps: Steps
    names: Sequence[str]
    sizes: Sequence[int]
    keys: Sequence[tuple[str, str]]
    buckets: Sequence[Sequence[int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    late: Sequence[Late] = ()
    missing_ranks: int = 0
    newer: int = 0

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
    def step_ns(self) -> float:
        """Typical time of a step."""
        return self.steps.typical_ns()

    @cached_property
    def used(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which parameters got a gradient: shape ``[ranks, steps, parameters]``."""
        made = np.zeros((*self.steps.begin.shape, len(self.sizes)), bool)
        known = self.steps.gradients[:, :, : len(self.sizes)]
        made[:, :, : known.shape[2]] = known > 0
        return made

    @cached_property
    def by_readiness(self) -> list[int]:
        """Parameters in their usual order of readiness; those that never are ready keep their place at the end."""
        usual = np.median(self.replay.gradients, axis=(0, 1))
        usual[~self.used.any(axis=(0, 1))] = np.inf
        held = [index for bucket in self.buckets for index in bucket]
        place = {index: position for position, index in enumerate(held)}
        return sorted(held, key=lambda index: (usual[index], place[index]))

    def percent(self, saved_ns: float) -> float:
        """A saving in percent of the step."""
        return 100 * saved_ns / self.step_ns if self.step_ns > 0 else 0.0

    def place_of(self, late: Late) -> tuple[int | None, str | None]:
        """The bucket and the parameter at which a rank falls behind; None for what is unknown, or if it is no place."""
        if late.place < 0:
            return None, None
        if self.steps.on_device:
            return late.place, None
        bucket = next((number for number, members in enumerate(self.buckets) if late.place in members), None)
        return bucket, self.names[late.place] if self.names else None
