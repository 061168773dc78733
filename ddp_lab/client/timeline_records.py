"""Frozen records that `Timeline` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Inspection", "LatePlace", "RankStatus", "ReducerInfo"]


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
class LatePlace:
    """One place where a rank's own computation falls behind the other ranks'.

    Attributes:
        rank: the rank.
        bucket: the bucket whose gradients come late; None: see `where`.
        parameter: qualified name of the parameter at whose gradient it falls behind, None if unknown.
        delay_ms: by how much, median over the steps in which it does.
        share: fraction of the steps in which it does, 0 to 1.
        where: ``"place"``: at that bucket and parameter; ``"arrival"``: it comes late to its backward (input data,
            forward, what happens between the steps); ``"everywhere"``: its whole backward is slower.
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
