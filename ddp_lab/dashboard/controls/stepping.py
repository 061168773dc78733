"""Stepping through a backward from the dashboard: the browser's requests, and what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...control.records import StepState
from ...formatting import counted, enumeration, label_of
from ..views import step_blocks
from .control import Control

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["Standing", "StepControl", "machine", "standings"]

_POINTS = {
    "gradient_ready": "gradient ready",
    "bucket_ready": "bucket ready",
    "launched": "launched",
    "reduced": "reduced",
}
_ON_ITS_WAY = ("launched", "reduced")
_NAMED = 6  # missing parameters that are named


class StepControl(Control):
    """Sets breakpoints, continues ranks, and queries their state; shows `machine`.

    Attributes:
        last: the newest state in which a rank paused.
    """

    nothing: ClassVar[Mapping[str, Any]] = {"ranks": []}

    def __init__(self, training: TrainingControl) -> None:
        super().__init__(training)
        self._chosen: int | None = None
        self._since: dict[int, tuple[int, float]] = {}  # rank -> start of its pause: host time, time of day
        self.last: dict[str, Any] | None = None

    @property
    def active(self) -> bool:
        """Whether there are breakpoints or pauses."""
        return bool(self.shown.get("armed") or self.shown.get("paused"))

    def obey(self, command: dict[str, Any]) -> None:
        """Runs ``{"do": "pause" | "go" | "continue", ...}``.

        Raises:
            ClusterError, ValueError: the ranks reject it, or do not respond.
        """
        do, reducer = command["do"], command.get("reducer")
        self._chosen = reducer
        if do == "pause":
            self._say(self._pause(command, reducer))
        elif do == "continue":
            self._training.resume()
            self._say("Breakpoints removed. Training continues.")
        else:
            chosen = command.get("ranks")
            states = self._training.step_state(reducer)
            paused = [rank for rank, one in states.items() if one.paused and (chosen is None or rank in chosen)]
            go = {"event": self._training.next_event, "bucket": self._training.next_bucket}.get(
                command["until"], self._training.next_breakpoint
            )
            if paused:
                go(paused, 0.0, reducer)
            self._say("" if paused else "No rank is paused. Press Pause, and run a cell that trains.")
        self.look(reducer)

    def _pause(self, command: dict[str, Any], reducer: int | None) -> str:
        points = [point for point in _POINTS if point in command["points"]]
        if not points:
            raise ValueError("choose at least one point at which to pause")
        if not all(isinstance(bucket, int) for bucket in command.get("buckets") or ()):
            raise ValueError("buckets must be numbers, for example: 0, 2")
        known = sorted(self._training.step_state(reducer))
        ranks = known if command.get("ranks") is None else [rank for rank in known if rank in command["ranks"]]
        if not ranks:
            raise ValueError("choose at least one rank to pause")
        others = [rank for rank in known if rank not in ranks]
        where = {"parameters": command.get("parameters") or (), "buckets": command.get("buckets") or ()}
        if others:
            self._training.breakpoints(ranks=others, model=reducer)
        self._training.breakpoints(*points, ranks=ranks, model=reducer, **where)
        on = f"rank{'s' if len(ranks) > 1 else ''} {enumeration([*map(str, ranks)])}" if others else "all ranks"
        return f"Breakpoints set: {enumeration([_POINTS[point] for point in points])}, on {on}."

    def look(self, reducer: int | None) -> None:
        """Queries the state of the ranks, for the model that was chosen last while it has breakpoints.

        Raises:
            ClusterError, ValueError: there is no such model, or a rank does not respond.
        """
        states = self._training.step_state(self._chosen if self.active and self._chosen is not None else reducer)
        found = machine(states, standings(states), self._begun)
        ended = found["ended"] and not self.shown.get("ended")
        kept = {"said": "" if ended else self.shown["said"], "error": self.shown["error"]}
        self.shown = {**found, **kept, "blocks": step_blocks(found)}
        if found["paused"]:
            self.last = self.shown

    def _begun(self, state: StepState) -> float:
        """The time of day at which a rank's pause began; the same number in each call."""
        held = self._since.get(state.rank)
        if held is None or held[0] != state.since_ns:
            shift = time.time() - time.monotonic_ns() / 1e9
            held = self._since[state.rank] = (state.since_ns, round(state.since_ns / 1e9 + shift, 2))
        return held[1]


def machine(
    states: dict[int, StepState], found: dict[int, Standing], begun: Callable[[StepState], float]
) -> dict[str, Any]:
    """Returns what the browser draws.

    Args:
        states: the states of the model's ranks.
        found: their descriptions.
        begun: returns the time of day at which a state's pause began.

    Returns:
        ``armed``, ``paused``: ranks; ``pauses``: see `_pauses`; ``ended``: why breakpoints were removed, else
        empty; ``ranks``: for each
        ``rank``, ``step``, ``generation``, ``kind``, ``text``, ``bucket``, ``for``, ``point``, ``parameter``,
        ``since``, ``inFlight`` and ``buckets``: [state, arrived, of, names of missing parameters, how many more].
    """
    rows = [_row(state, found[rank], begun) for rank, state in sorted(states.items())]
    return {
        "armed": [rank for rank, state in sorted(states.items()) if state.armed],
        "paused": [rank for rank, state in sorted(states.items()) if state.paused],
        "ended": next((state.ended for state in states.values() if state.ended), ""),
        "pauses": _pauses(rows),
        "ranks": rows,
    }


def _pauses(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Ranks that pause at the same point, in words, and when the first of their pauses began (time of day)."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "paused":
            groups.setdefault(row["text"], []).append(row)
    made = []
    for text, paused in groups.items():
        words = f"pause{text[6:]}" if len(paused) > 1 and text.startswith("pauses") else text
        made.append((f"{label_of(row['rank'] for row in paused)} {words}", min(row["since"] for row in paused)))
    return made


def _row(state: StepState, its: Standing, begun: Callable[[StepState], float]) -> dict[str, Any]:
    return {
        "rank": state.rank,
        "step": state.step,
        "generation": state.generation,
        "kind": its.kind,
        "text": its.text,
        "bucket": its.bucket,
        "for": list(its.waits_for),
        "point": state.point,
        "parameter": state.parameter,
        "since": begun(state) if state.paused else None,
        "inFlight": state.in_flight,
        "buckets": [
            [one.state, one.arrived, one.of, list(one.missing[:_NAMED]), max(len(one.missing) - _NAMED, 0)]
            for one in state.buckets
        ],
    }


# ---- the state of ranks, in words ----


@dataclass(frozen=True)
class Standing:
    """The state of one rank.

    Attributes:
        kind: ``"paused"``, ``"waiting"`` (for ranks that have not launched a bucket), ``"computing"``, ``"finishing"``
            or ``"between"`` (two backwards).
        text: in words, without the rank.
        bucket: the bucket that it waits in, or pauses at.
        waits_for: ranks, ascending.
    """

    kind: str
    text: str
    bucket: int | None = None
    waits_for: tuple[int, ...] = ()


def standings(states: Mapping[int, StepState]) -> dict[int, Standing]:
    """rank -> its state, compared with the other ranks."""
    return {rank: _standing(rank, states) for rank in sorted(states)}


def _standing(rank: int, states: Mapping[int, StepState]) -> Standing:
    """The state of one of the ranks."""
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
        return Standing("between", f"has finished step {state.step - 1}; the backward of step {state.step} is next")
    return Standing("between", f"is before the backward of step {state.step}")


def _pause_in_words(state: StepState) -> str:
    bucket = state.bucket
    if state.point == "gradient_ready":
        return f"pauses: the gradient of '{state.parameter}' is ready, not yet in its bucket"
    if state.point == "launched":
        ended = bucket is not None and bucket < len(state.buckets) and state.buckets[bucket].state == "reduced"
        return f"pauses: the collective of bucket {bucket} has been started{' and is now complete' if ended else ''}"
    if state.point == "reduced":
        return f"pauses: the average of bucket {bucket} is computed, not yet written back"
    before = [index for index, one in enumerate(state.buckets[: bucket or 0]) if one.state == "pending"]
    first = f" (bucket {before[0]} must be launched first)" if before else ""
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
    """Whether the other rank has launched the bucket in this rank's current step."""
    if other.step != state.step:
        return other.step > state.step
    known = bucket < len(other.buckets)
    return other.in_flight and known and other.buckets[bucket].state in _ON_ITS_WAY
