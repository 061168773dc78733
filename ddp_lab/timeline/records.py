"""Frozen records that `Timeline` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["DriftRecord", "Inspection", "Kept", "RankStatus", "ReducerInfo"]


@dataclass(frozen=True)
class DriftRecord:
    """The result of one comparison of the ranks' replicas.

    Attributes:
        reducer: which model.
        step: the number of the model's synchronised backwards before it.
        ok: whether no parameter or buffer differs.
        first: qualified name of the first one that differs; None if equal.
        groups: for `first`, groups of ranks with equal values.
        differing: how many differ.
        tensors: how many tensors were compared.
        bytes: how many bytes each rank read.
        cost_ms: how long it took.
        error: why the comparison failed; "" if it did not.
    """

    reducer: int
    step: int
    ok: bool
    first: str | None
    groups: tuple[tuple[int, ...], ...]
    differing: int
    tensors: int
    bytes: int
    cost_ms: float
    error: str = ""


@dataclass(frozen=True)
class RankStatus:
    """What is known about one rank.

    Attributes:
        rank: the rank.
        session: identifies its process; None before its first message.
        pid: its process id, None if not reported.
        state: ``"idle"``, ``"running"``, ``"unblocked"``, ``"leaving"``, or ``"unknown"`` before its first status.
        cell: id of the running cell, None if none.
        step: the last step seen, -1 if none.
        last_event_ns: time of its latest event on its host's monotonic clock, 0 if none.
        events: events received from its current process.
        dropped: events that were recorded but never arrived.
        status: the contents of its last status.
    """

    rank: int
    session: int | None = None
    pid: int | None = None
    state: str = "unknown"
    cell: str | None = None
    step: int = -1
    last_event_ns: int = 0
    events: int = 0
    dropped: int = 0
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReducerInfo:
    """One model whose gradients are synchronised.

    Attributes:
        reducer: its number on this timeline.
        module: class name of the model, ``"?"`` if it was not described.
        ranks: the ranks that synchronise it.
        generations: version numbers of its bucket layouts.
        buckets: number of buckets in the newest layout.
        last_step: its latest step, -1 if none.
        last_event_ns: time of its latest event.
    """

    reducer: int
    module: str
    ranks: tuple[int, ...]
    generations: tuple[int, ...]
    buckets: int
    last_step: int
    last_event_ns: int


@dataclass(frozen=True)
class Kept:
    """Which steps of a model a timeline holds.

    Attributes:
        steps: their number.
        first: the oldest, 0 if none.
        last: the newest, -1 if none.
        whole_from: all steps are kept from this one on.
        thinned: how many older steps are kept.
    """

    steps: int
    first: int
    last: int
    whole_from: int
    thinned: int

    def __str__(self) -> str:
        """A sentence; empty if all steps are kept."""
        if not self.thinned:
            return ""
        return (
            f"Old steps were down-sampled: {self.thinned:,} of steps {self.first:,}–{self.whole_from - 1:,} are kept, "
            f"and all since {self.whole_from:,}."
        )


@dataclass(frozen=True)
class Inspection:
    """Averaged gradients of one step, compared between ranks.

    Attributes:
        reducer: which model.
        step: after which step.
        checksums: bucket -> rank -> hexadecimal checksum of the gradients' bytes.
        norms: bucket -> rank -> L2 norm.
        missing: ranks that have not answered yet.
    """

    reducer: int
    step: int
    checksums: dict[int, dict[int, str]]
    norms: dict[int, dict[int, float]]
    missing: tuple[int, ...]

    @property
    def equal(self) -> dict[int, bool]:
        """bucket -> whether all ranks that answered hold the same bytes."""
        return {bucket: len(set(by_rank.values())) == 1 for bucket, by_rank in self.checksums.items()}
