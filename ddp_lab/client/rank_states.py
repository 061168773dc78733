"""What is known of one cell on each of its ranks: replies, failures, outputs, values."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RankFailure
from . import failures as reports
from .results import RemoteValue

__all__ = ["RankState", "RankStates"]

_TRAILING_S = 2.0  # how long the last outputs of a rank may come after its reply


@dataclass
class RankState:
    """The cell on one rank.

    Attributes:
        report: what `ddp_lab.engine.cell.run` returned.
        failure: why there will be no report.
        idle: whether all its outputs have come.
        begun_s: when it said that it begins, in seconds on the monotonic clock; 0 before.
        ended_s: when it ended, in seconds on the monotonic clock.
        outputs: notebook output dicts in order.
    """

    report: Mapping[str, Any] | None = None
    failure: RankFailure | None = None
    idle: bool = False
    begun_s: float = 0.0
    ended_s: float = 0.0
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the rank has said how the cell ended, or can't any more."""
        return self.report is not None or self.failure is not None

    @property
    def word(self) -> str:
        """ "running", "done" or "failed"."""
        if not self.ended:
            return "running"
        return "done" if self.report is not None and self.report["ok"] else "failed"


class RankStates:
    """The states of all ranks of one cell.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._states = {rank: RankState() for rank in ranks}

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def open(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._states.items() if not state.ended)

    def finished(self) -> bool:
        """Whether every rank has ended and its last outputs have come, or had their time to."""
        now = time.monotonic()
        return all(state.ended and (state.idle or now - state.ended_s > _TRAILING_S) for state in self._states.values())

    def give_up(self, failure: RankFailure) -> None:
        """Ends a rank that will not answer."""
        state = self._states[failure.rank]
        state.failure = failure
        state.ended_s = time.monotonic()
        state.idle = True

    def take_error(self, rank: int, error: Any, lost: Mapping[int, str]) -> None:
        """Ends a rank whose request itself failed: its engine is gone, or was hit outside the cell."""
        name = getattr(error, "ename", type(error).__name__)
        if name == "EngineError":
            self.give_up(reports.lost(rank, lost.get(rank) or "its process ended while the cell ran"))
            return
        trace = getattr(error, "traceback", None) or ""
        trace = trace if isinstance(trace, str) else "\n".join(trace)
        self.give_up(
            RankFailure(rank, name, getattr(error, "evalue", str(error)), trace, time.monotonic_ns(), consequence=False)
        )

    def failures(self) -> dict[int, RankFailure]:
        """Failures by rank, causes first (see `failures.in_order`)."""
        found = []
        for rank, state in self._states.items():
            if state.failure is not None:
                found.append(state.failure)
            elif state.report is not None and not state.report["ok"]:
                found.append(reports.failure_of(rank, state.report))
        return reports.in_order(found)

    def failed_before(self, time_s: float) -> RankFailure | None:
        """The first failure, if it came before `time_s` on the monotonic clock."""
        if any(state.word == "failed" and state.ended_s <= time_s for state in self._states.values()):
            return next(iter(self.failures().values()))
        return None

    def words(self) -> dict[int, str]:
        """rank -> "running", "done" or "failed"."""
        return {rank: state.word for rank, state in self._states.items()}

    def outputs(self) -> dict[int, list[dict[str, Any]]]:
        """rank -> its outputs so far."""
        return {rank: state.outputs for rank, state in self._states.items()}

    def values(self) -> dict[int, Any]:
        """rank -> value, of the ranks that have reported."""
        return {rank: _value_of(rank, state) for rank, state in self._states.items() if state.report is not None}


def _value_of(rank: int, state: RankState) -> Any:
    report = state.report or {}
    if report.get("blob") is not None:
        return pickle.loads(report["blob"])
    if not report.get("ok"):
        return None
    shown = [each for each in state.outputs if each["output_type"] == "execute_result"]
    text = str(shown[-1]["data"].get("text/plain", "")) if shown else ""
    return RemoteValue(rank, str(report["kind"]), text, str(report.get("unsent", "")))
