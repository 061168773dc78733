"""Frozen records that `Timeline` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["DriftRecord", "Inspection", "Kept", "LatePlace", "RankStatus", "ReducerInfo"]


@dataclass(frozen=True)
class DriftRecord:
    """What one comparison of the ranks' replicas found.

    Attributes:
        reducer: which model.
        step: the model's synchronised backwards before it.
        ok: no parameter or buffer differs.
        first: qualified name of the first that differs; None.
        groups: for `first`, the ranks that hold equal values, together.
        differing: how many differ.
        tensors: how many were compared.
        bytes: how many each rank read.
        cost_ms: how long it took.
        error: why they could not be compared; "" if they were.
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
    """What is known of one rank.

    Attributes:
        rank: the rank.
        session: identifies the life of its process; None before its first message.
        pid: its process, None if it has not said.
        state: ``"idle"``, ``"running"``, ``"freed"``, ``"leaving"``, or ``"unknown"`` before its first status.
        cell: id of the cell that it runs, None if none.
        step: the latest step of which it sent an event, -1 if none.
        last_event_ns: time of its latest event on its host's monotonic clock, 0 if none.
        events: events received from this life of its process.
        dropped: events of it that were recorded and never arrived.
        status: everything its last status said.
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
        generations: numbers of its bucket assignments.
        buckets: number of buckets of the newest assignment.
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
        steps: how many.
        first: the oldest, 0 if none.
        last: the newest, -1 if none.
        whole_from: from this one on there are all of them.
        thinned: how many there are before that one.
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
            f"Old steps are thinned: {self.thinned:,} of steps {self.first:,}–{self.whole_from - 1:,} are kept, "
            f"and all since {self.whole_from:,}."
        )


@dataclass(frozen=True)
class LatePlace:
    """One place where a rank's own computation falls behind the other ranks'.

    Attributes:
        rank: the rank.
        bucket: the bucket whose gradients come late; None: see `where`.
        parameter: qualified name of the parameter at whose gradient it falls behind, None if unknown.
        delay_ms: by how much, median over the steps in which it does.
        share: fraction of the steps in which it does, 0 to 1.
        where: ``"place"``: at that bucket and parameter; ``"arrival"``: it comes late to its backward (input data,
            forward, what happens between the steps); ``"everywhere"``: its whole backward is slower; ``"varying"``: the
            others wait for it in most steps, and where it falls behind varies too much to name a place.
        pattern: ``"persistent"``: in most steps; ``"data-dependent"``: in the steps in which its forward takes
            longer, too; ``"random"``: in some steps.
        cost_percent: what the steps would have saved without it, in percent of the step.
    """

    rank: int
    bucket: int | None
    parameter: str | None
    delay_ms: float
    share: float
    where: str = "place"
    pattern: str = "persistent"
    cost_percent: float = 0.0


@dataclass(frozen=True)
class Inspection:
    """Averaged gradients of one step, compared between ranks.

    Attributes:
        reducer: which model.
        step: after which step.
        checksums: bucket -> rank -> hexadecimal checksum of the gradients' bytes.
        norms: bucket -> rank -> Euclidean norm.
        missing: ranks that have not answered (yet).
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
