"""What is known of one cell on each of its ranks: replies, failures, outputs, values."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import RankFailure
from ...output.logs import CellOutputs
from . import failures as reports
from .results import RemoteValue

__all__ = ["RankState", "RankStates"]

_TRAILING_S = 2.0  # how long the last outputs of a rank may come after its reply


@dataclass
class RankState:
    """The cell on one rank.

    Attributes:
        report: what `ddp_lab.engine.cells.cell.run` returned.
        failure: why there will be no report.
        idle: whether all its outputs have come.
        begun_s: when it began, in seconds on the monotonic clock; None if it has not.
        ended_s: when it ended, in seconds on the monotonic clock.
        shown: what it showed of the last expression's value.
    """

    report: Mapping[str, Any] | None = None
    failure: RankFailure | None = None
    idle: bool = False
    begun_s: float | None = None
    ended_s: float = 0.0
    shown: str = ""

    @property
    def ended(self) -> bool:
        """Whether the rank has said how the cell ended, or can't any more."""
        return self.report is not None or self.failure is not None

    @property
    def word(self) -> str:
        """ "queued", "running", "done", "failed" or "interrupted"."""
        if not self.ended:
            return "queued" if self.begun_s is None else "running"
        if self.report is None:
            return "failed"
        if self.report["ok"]:
            return "done"
        return "interrupted" if self.report["name"] == reports.INTERRUPTED else "failed"


class RankStates:
    """The states of all ranks of one cell.

    Args:
        ranks: the ranks.
        outputs: where their outputs go.
        on_axis: given a rank and a time of its host, that time on one clock for all; None: all have one.
    """

    def __init__(
        self, ranks: Sequence[int], outputs: CellOutputs, on_axis: Callable[[int, int], int] | None = None
    ) -> None:
        self.outputs = outputs
        self._on_axis = on_axis
        self._states = {rank: RankState() for rank in ranks}

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def open(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._states.items() if not state.ended)

    def begin(self, time_s: float) -> None:
        """Takes it that no rank is kept from beginning."""
        for state in self._states.values():
            state.begun_s = time_s

    def begun(self) -> float | None:
        """When the first rank began, in seconds on the monotonic clock; None if none has."""
        return min((state.begun_s for state in self._states.values() if state.begun_s is not None), default=None)

    def finished(self) -> bool:
        """Whether every rank has ended and its last outputs have come, or had their time to."""
        now = time.monotonic()
        return all(state.ended and (state.idle or now - state.ended_s > _TRAILING_S) for state in self._states.values())

    def cut_short(self) -> tuple[int, ...]:
        """The ranks that have answered, and whose last outputs have not come."""
        return tuple(rank for rank, state in self._states.items() if state.ended and not state.idle)

    def take_output(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Keeps an output message."""
        if kind == "execute_result":
            self._states[rank].shown = str(content["data"].get("text/plain", ""))
        self.outputs.add(rank, {"output_type": kind, **content})

    def give_up(self, failure: RankFailure) -> None:
        """Ends a rank that will not answer."""
        state = self._states[failure.rank]
        state.failure = failure
        state.ended_s = time.monotonic()
        state.idle = True

    def failures(self) -> dict[int, RankFailure]:
        """Failures by rank, causes first (see `failures.in_order`)."""
        found = []
        for rank, state in self._states.items():
            if state.failure is not None:
                found.append(state.failure)
            elif state.report is not None and not state.report["ok"]:
                made = reports.failure_of(rank, state.report)
                found.append(
                    made if self._on_axis is None else replace(made, time_ns=self._on_axis(rank, made.time_ns))
                )
        return reports.in_order(found)

    def failed_before(self, time_s: float) -> RankFailure | None:
        """The first failure, if it came before `time_s` on the monotonic clock."""
        if any(state.word in ("failed", "interrupted") and state.ended_s <= time_s for state in self._states.values()):
            return next(iter(self.failures().values()))
        return None

    def words(self) -> dict[int, str]:
        """rank -> "queued", "running", "done", "failed" or "interrupted"."""
        return {rank: state.word for rank, state in self._states.items()}

    def values(self) -> dict[int, Any]:
        """rank -> value, of the ranks that have reported."""
        return {rank: _value_of(rank, state) for rank, state in self._states.items() if state.report is not None}


def _value_of(rank: int, state: RankState) -> Any:
    report = state.report or {}
    if report.get("blob") is not None:
        return pickle.loads(report["blob"])
    if not report.get("ok"):
        return None
    return RemoteValue(rank, str(report["kind"]), state.shown, str(report.get("unsent", "")))
