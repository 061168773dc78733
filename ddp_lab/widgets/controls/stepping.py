"""Stepping through a backward from the dashboard: what the browser asks for, and what it shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...control.records import StepState
from ...formatting import enumeration
from .standings import Standing, standings

if TYPE_CHECKING:
    from ...control.training import TrainingControl

__all__ = ["StepControl", "machine"]

_POINTS = {
    "gradient_ready": "gradient ready",
    "bucket_ready": "bucket ready",
    "launched": "launched",
    "reduced": "reduced",
}
_NAMED = 6  # missing parameters that are named


class StepControl:
    """Sets breakpoints, lets ranks go on, and looks where they stand. One thread at a time."""

    def __init__(self, training: TrainingControl) -> None:
        self._training = training
        self._chosen: int | None = None
        self._since: dict[int, tuple[int, float]] = {}  # rank -> a pause's begin: host time, time of day
        self.shown: dict[str, Any] = {"ranks": [], "said": "", "error": ""}
        """What the browser shows: `machine`, ``said`` and ``error`` in words."""
        self.last: dict[str, Any] | None = None
        """The newest of them in which a rank paused."""

    @property
    def active(self) -> bool:
        """Whether there are breakpoints or pauses."""
        return bool(self.shown.get("armed") or self.shown.get("paused"))

    def obey(self, command: dict[str, Any]) -> None:
        """Carries out ``{"do": "pause" | "go" | "continue", ...}``.

        Raises:
            ClusterError, ValueError: the ranks refuse it, or do not answer.
        """
        do, reducer = command["do"], command.get("reducer")
        self._chosen = reducer
        if do == "pause":
            self._say(self._pause(command, reducer))
        elif do == "continue":
            self._training.resume()
            self._say("No breakpoints: the ranks train at full speed.")
        else:
            chosen = command.get("ranks")
            states = self._training.step_state(reducer)
            paused = [rank for rank, one in states.items() if one.paused and (chosen is None or rank in chosen)]
            go = {"event": self._training.next_event, "bucket": self._training.next_bucket}.get(
                command["until"], self._training.next_breakpoint
            )
            if paused:
                go(paused, 0.0, reducer)
            self._say("" if paused else "Nothing pauses here: press Pause, and let a cell train.")
        self.look(reducer)

    def _pause(self, command: dict[str, Any], reducer: int | None) -> str:
        points = [point for point in _POINTS if point in command["points"]]
        if not points:
            raise ValueError("choose at least one point at which to pause")
        if not all(isinstance(bucket, int) for bucket in command.get("buckets") or ()):
            raise ValueError("buckets are numbers, for example: 0, 2")
        known = sorted(self._training.step_state(reducer))
        ranks = known if command.get("ranks") is None else [rank for rank in known if rank in command["ranks"]]
        if not ranks:
            raise ValueError("choose at least one rank that pauses")
        others = [rank for rank in known if rank not in ranks]
        where = {"parameters": command.get("parameters") or (), "buckets": command.get("buckets") or ()}
        if others:
            self._training.breakpoints(ranks=others, reducer=reducer)
        self._training.breakpoints(*points, ranks=ranks, reducer=reducer, **where)
        on = f"rank{'s' if len(ranks) > 1 else ''} {enumeration([*map(str, ranks)])}" if others else "all ranks"
        return f"Set: {enumeration([_POINTS[point] for point in points])}, on {on}."

    def look(self, reducer: int | None) -> None:
        """Asks the ranks where they stand, in the model that was chosen last as long as that has breakpoints.

        Raises:
            ClusterError, ValueError: there is no such model, or a rank does not answer.
        """
        states = self._training.step_state(self._chosen if self.active and self._chosen is not None else reducer)
        found = machine(states, standings(states), self._begun)
        ended = found["ended"] and not self.shown.get("ended")
        kept = {"said": "" if ended else self.shown["said"], "error": self.shown["error"]}
        self.shown = {**found, **kept}
        if found["paused"]:
            self.last = self.shown

    def fail(self, error: str) -> None:
        """Shows what went wrong, until the next request."""
        self.shown = {**self.shown, "error": error}

    def forget(self) -> None:
        """Nobody can be asked: no rank stands anywhere."""
        self.shown = {"ranks": [], "said": "", "error": self.shown["error"]}

    def _say(self, text: str) -> None:
        self.shown = {**self.shown, "said": text, "error": ""}

    def _begun(self, state: StepState) -> float:
        """The time of day at which a rank's pause began; the same number each time."""
        held = self._since.get(state.rank)
        if held is None or held[0] != state.since_ns:
            shift = time.time() - time.monotonic_ns() / 1e9
            held = self._since[state.rank] = (state.since_ns, round(state.since_ns / 1e9 + shift, 2))
        return held[1]


def machine(
    states: dict[int, StepState], found: dict[int, Standing], begun: Callable[[StepState], float]
) -> dict[str, Any]:
    """What the browser draws.

    Args:
        states: of the model's ranks.
        found: where they stand.
        begun: gives the time of day at which a state's pause began.

    Returns:
        ``armed``, ``paused``: ranks; ``ended``: why breakpoints were taken away, else empty; ``ranks``: for each
        ``rank``, ``step``, ``generation``, ``kind``, ``text``, ``bucket``, ``for``, ``point``, ``parameter``,
        ``since``, ``inFlight`` and ``buckets``: [state, arrived, of, names of missing parameters, how many more].
    """
    return {
        "armed": [rank for rank, state in sorted(states.items()) if state.armed],
        "paused": [rank for rank, state in sorted(states.items()) if state.paused],
        "ended": next((state.ended for state in states.values() if state.ended), ""),
        "ranks": [_row(state, found[rank], begun) for rank, state in sorted(states.items())],
    }


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
