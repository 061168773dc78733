"""Where each rank's backward stands, in words: at which point it pauses, and who waits for whom. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...control.records import StepState
from ...formatting import counted, enumeration

__all__ = ["Standing", "standing", "standings"]

_ON_ITS_WAY = ("launched", "reduced")


@dataclass(frozen=True)
class Standing:
    """One rank.

    Attributes:
        kind: ``"paused"``, ``"waiting"`` (for ranks that have not launched a bucket), ``"computing"``, ``"finishing"``
            or ``"between"`` (two backwards).
        text: in words, without the rank.
        bucket: that it waits in, or pauses at.
        waits_for: ranks, ascending.
    """

    kind: str
    text: str
    bucket: int | None = None
    waits_for: tuple[int, ...] = ()


def standings(states: Mapping[int, StepState]) -> dict[int, Standing]:
    """rank -> where it stands, seen beside the others."""
    return {rank: standing(rank, states) for rank in sorted(states)}


def standing(rank: int, states: Mapping[int, StepState]) -> Standing:
    """Where one of the ranks stands."""
    state = states[rank]
    if state.paused:
        return Standing("paused", _pause_in_words(state), state.bucket)
    if state.ended and state.in_flight:
        return Standing("between", f"was stopped in the backward of step {state.step}")
    if state.in_flight and state.finalizing:
        return _waits(rank, states)
    if state.in_flight:
        launched = sum(one.state in _ON_ITS_WAY for one in state.buckets)
        buckets, are = counted(len(state.buckets), "bucket"), "is" if len(state.buckets) == 1 else "are"
        return Standing("computing", f"computes gradients; {launched} of {buckets} {are} launched")
    paused = [other for other, its in states.items() if its.paused]
    if paused and state.step > min(states[other].step for other in paused):
        return Standing("between", f"is done with step {state.step - 1}, and before the backward of step {state.step}")
    return Standing("between", f"is before the backward of step {state.step}")


def _pause_in_words(state: StepState) -> str:
    bucket = state.bucket
    if state.point == "gradient_ready":
        return f"pauses: the gradient of '{state.parameter}' is ready, not yet in its bucket"
    if state.point == "launched":
        ended = bucket is not None and bucket < len(state.buckets) and state.buckets[bucket].state == "reduced"
        return f"pauses: the collective of bucket {bucket} has been started{', and has ended by now' if ended else ''}"
    if state.point == "reduced":
        return f"pauses: the average of bucket {bucket} is there, not yet written back"
    before = [index for index, one in enumerate(state.buckets[: bucket or 0]) if one.state == "pending"]
    first = f" (bucket {before[0]} has to be launched first)" if before else ""
    return f"pauses: bucket {bucket} is ready, not yet launched{first}"


def _waits(rank: int, states: Mapping[int, StepState]) -> Standing:
    """A rank that has launched everything and waits in bucket order."""
    state = states[rank]
    bucket = next((index for index, one in enumerate(state.buckets) if one.state != "reduced"), None)
    if bucket is None:
        return Standing("finishing", "writes the averages back")
    missing = tuple(other for other in sorted(states) if other != rank and not _launched(states[other], state, bucket))
    if not missing:
        return Standing(
            "finishing", f"waits for the collective of bucket {bucket}, which all ranks have started", bucket
        )
    names = ("rank " if len(missing) == 1 else "ranks ") + enumeration([str(one) for one in missing])
    verb = "has" if len(missing) == 1 else "have"
    return Standing("waiting", f"waits for {names}, which {verb} not launched bucket {bucket}", bucket, missing)


def _launched(other: StepState, state: StepState, bucket: int) -> bool:
    """Whether the other rank has launched the bucket in the step that this one is in."""
    if other.step != state.step:
        return other.step > state.step
    known = bucket < len(other.buckets)
    return other.in_flight and known and other.buckets[bucket].state in _ON_ITS_WAY
