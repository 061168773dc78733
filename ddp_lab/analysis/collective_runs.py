"""A collective that was run step by step: who sent what, and who held what after each step."""

from __future__ import annotations

from dataclasses import dataclass

from .collective_schedules import Transfer

__all__ = ["CollectiveRun", "CollectiveStep", "Holds"]

Holds = tuple[tuple[tuple[int, ...], ...], ...]
"""By rank and part: the ranks whose contributions are in it."""


@dataclass(frozen=True)
class CollectiveStep:
    """One step of an algorithm, as it happened.

    Attributes:
        transfers: what was sent, all at once.
        bytes: of each transfer.
        holds: after the step.
        ms: how long it took on the slowest rank; of several runs the median.
    """

    transfers: tuple[Transfer, ...]
    bytes: tuple[int, ...]
    holds: Holds
    ms: float

    @property
    def adds(self) -> bool:
        """Whether what arrives is added to what is there; else it replaces it."""
        return any(one.reduces for one in self.transfers)

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent."""
        return sum(count for one, count in zip(self.transfers, self.bytes, strict=True) if one.source == rank)


@dataclass(frozen=True)
class CollectiveRun:
    """A collective, step by step; the same on all ranks.

    Attributes:
        collective: e.g. ``"all_reduce"``.
        algorithm: e.g. ``"ring"``.
        ranks: how many.
        bytes: of each rank's buffer; it has as many parts as there are ranks.
        begin: before the first step.
        steps: one after the other.
    """

    collective: str
    algorithm: str
    ranks: int
    bytes: int
    begin: Holds
    steps: tuple[CollectiveStep, ...]

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent in all steps."""
        return sum(step.sent(rank) for step in self.steps)

    @property
    def busiest_bytes(self) -> int:
        """What the steps' busiest ranks sent, in all: the bytes that the time depends on (β)."""
        return sum(max((step.sent(rank) for rank in range(self.ranks)), default=0) for step in self.steps)

    @property
    def ms(self) -> float:
        """All steps."""
        return sum(step.ms for step in self.steps)
