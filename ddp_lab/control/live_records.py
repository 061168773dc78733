"""Frozen records of what happens to a model while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..diagnostics.rank_state import BucketStage

__all__ = ["BucketStage", "Reconfigured", "StepState"]


@dataclass(frozen=True)
class Reconfigured:
    """A change that all ranks of a model have made.

    Attributes:
        reducer: the model's number on the timeline.
        step: index of the first step with it, the same on all ranks.
        generation: of the assignment of buckets from that step on.
        change: what was asked for.
    """

    reducer: int
    step: int
    generation: int
    change: dict[str, Any]


@dataclass(frozen=True)
class StepState:
    """Where the backward of one rank stands.

    Attributes:
        rank: the rank.
        step: index of the running, or next, synchronised backward.
        generation: of the assignment of buckets.
        point: where it pauses: ``"gradient_ready"`` (not yet in its bucket), ``"bucket_ready"`` (not yet launched),
            ``"launched"`` or ``"reduced"`` (not yet written back); None: it does not pause.
        parameter: whose gradient, at ``"gradient_ready"``.
        bucket: which bucket, at the other points.
        since_ns: when the pause began, on the host's monotonic clock; 0 if it does not pause.
        in_flight: a backward is under way: then the buckets are as they are, else as the last one left them.
        finalizing: all buckets are launched, and it waits for them.
        armed: it has breakpoints.
        ended: why they were taken away, if nobody asked for it (the cell was interrupted or failed); else empty.
        buckets: one record for each, in the order of launch.
    """

    rank: int
    step: int
    generation: int
    point: str | None
    parameter: str | None
    bucket: int | None
    since_ns: int
    in_flight: bool
    finalizing: bool
    armed: bool
    ended: str
    buckets: tuple[BucketStage, ...]

    @property
    def paused(self) -> bool:
        """Whether it pauses at a breakpoint."""
        return self.point is not None

    @classmethod
    def of(cls, rank: int, reply: dict[str, Any]) -> StepState:
        """From what the rank answered."""
        paused = reply["paused"] or {}
        return cls(
            rank=rank,
            step=reply["step"],
            generation=reply["generation"],
            point=paused.get("point"),
            parameter=paused.get("parameter"),
            bucket=paused.get("bucket"),
            since_ns=paused.get("since_ns", 0),
            in_flight=reply["in_flight"],
            finalizing=reply["finalizing"],
            armed=reply["armed"],
            ended=reply["ended"],
            buckets=tuple(BucketStage(**{**one, "missing": tuple(one["missing"])}) for one in reply["buckets"]),
        )
