"""Records of ranks, and of a model's state while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..protocol.messages import BucketStage, GpuUse, Health, Stage

__all__ = ["BucketStage", "RankHealth", "RankRecord", "Reconfigured", "StepState"]


@dataclass(frozen=True)
class RankRecord:
    """One rank as it is now.

    Attributes:
        rank: its rank.
        engine: id of its ipyparallel engine; not the rank.
        pid: its process id; 0 while it is being started.
        host: the machine.
        device: the device it is pinned to.
        backend: the default group's backends.
        state: ``"idle"``, ``"running"`` a cell, ``"unblocked"`` (its groups were destroyed, so that
            pending collectives returned; the next cell rejoins), ``"silent"`` (unresponsive) or ``"lost"`` (failed: its
            process exited).
        cell: id of the cell it runs, None between cells.
        exit_code: of a failed rank; minus the signal's number if a signal ended it.
        clock: how accurately its clock is aligned with those of other hosts; empty if all share one clock.
        in_flight: its collectives in flight, in words, e.g. ``"2, oldest all_reduce #18
            of 4 MiB for 3.2 s"``; "" if there is none.
        broken_by: why its groups were destroyed: it ``"failed"``, was ``"interrupted"``, or ``"rank 1"`` failed; "" if
            they were not.
    """

    rank: int
    engine: int | None
    pid: int
    host: str
    device: str
    backend: str
    state: str
    cell: str | None
    exit_code: int | None
    clock: str = ""
    in_flight: str = ""
    broken_by: str = ""

    @property
    def word(self) -> str:
        """Its state for display; a rank whose own cell was the cause is "failed", not "unblocked"."""
        own = self.state == "unblocked" and self.broken_by in ("failed", "interrupted")
        return self.broken_by if own else self.state


@dataclass(frozen=True)
class RankHealth:
    """The condition of one rank.

    Attributes:
        record: its place and state.
        label: name of the cell that it runs; None between cells, or if it does not respond.
        cell_seconds: how long it has run that cell.
        silent_seconds: since it last sent anything; None if it never did.
        in_flight: its collectives in flight, in words; "" if there are none.
        gpu_used: bytes that all processes use of its GPU; None without GPU, or if the driver does not report it.
        gpu_total: bytes that its GPU has.
        gpu_percent: share of about the last second in which its GPU was busy.
    """

    record: RankRecord
    label: str | None = None
    cell_seconds: float | None = None
    silent_seconds: float | None = None
    in_flight: str = ""
    gpu_used: int | None = None
    gpu_total: int | None = None
    gpu_percent: int | None = None

    @classmethod
    def of(cls, record: RankRecord, answer: Health | None, silent_seconds: float | None) -> RankHealth:
        """From the rank's answer; None if it did not answer."""
        if answer is None:
            return cls(record, silent_seconds=silent_seconds, in_flight=record.in_flight)
        gpu = answer.gpu or GpuUse(None, None, None)
        more = (record.in_flight, gpu.used, gpu.total, gpu.percent)
        return cls(record, answer.label, answer.seconds, silent_seconds, *more)


@dataclass(frozen=True)
class Reconfigured:
    """A change that all ranks of a model have made.

    Attributes:
        reducer: the model's number on the timeline.
        step: index of the first step with it, the same on all ranks.
        generation: version of the bucket layout from that step on.
        change: the requested change.
    """

    reducer: int
    step: int
    generation: int
    change: dict[str, Any]


@dataclass(frozen=True)
class StepState:
    """The state of one rank's backward.

    Attributes:
        rank: the rank.
        step: index of the running, or next, synchronised backward.
        generation: version of the bucket layout.
        point: where it is paused: ``"gradient_ready"`` (not yet in its bucket), ``"bucket_ready"`` (not yet launched),
            ``"launched"`` or ``"reduced"`` (not yet written back); None: not paused.
        parameter: whose gradient, at ``"gradient_ready"``.
        bucket: which bucket, at the other points.
        since_ns: when the pause began, on the host's monotonic clock; 0 if it is not paused.
        in_flight: whether a backward is in progress; if not, the buckets are as the last one left them.
        finalizing: whether all buckets are launched and the backward waits for them.
        armed: whether it has breakpoints.
        ended: why they were removed, if not on request (the cell was interrupted or failed); else empty.
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
        """Whether it is paused at a breakpoint."""
        return self.point is not None

    @classmethod
    def of(cls, rank: int, stage: Stage) -> StepState:
        """From the rank's answer."""
        paused = stage.paused
        return cls(
            rank=rank,
            step=stage.step,
            generation=stage.generation,
            point=paused.point if paused is not None else None,
            parameter=paused.parameter if paused is not None else None,
            bucket=paused.bucket if paused is not None else None,
            since_ns=paused.since_ns if paused is not None else 0,
            in_flight=stage.in_flight,
            finalizing=stage.finalizing,
            armed=stage.armed,
            ended=stage.ended,
            buckets=stage.buckets,
        )
