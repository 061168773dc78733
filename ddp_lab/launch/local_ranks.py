"""What the ranks of this host answer when they are examined, in a form that other nodes can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from .. import machine
from ..control.wire import Wire
from .nodes import Job

__all__ = ["LocalRanks"]

_ANSWER_S = 1.0
_PLACES_S = 5.0  # torch looks the source lines of all recorded stacks up


class LocalRanks:
    """Asks the ranks of this host over a wire of its own.

    Args:
        wire: the ranks connect to it.
        count: how many there are.
    """

    def __init__(self, wire: Wire, count: int) -> None:
        self._wire, self._count = wire, count
        self._pids: dict[int, int] = {}  # of all ranks that have ever answered
        self.job: Job | None = None  # known from the first answer on

    def look(self, *, whole: bool) -> list[dict[str, Any]]:
        """What each rank does: ``rank``, ``state``, ``why`` and ``answer``, JSON-able; empty while not all have begun,
        or if one can't be examined (its own log says why).

        Args:
            whole: with the collectives that torch has recorded, which takes milliseconds of the ranks' time.
        """
        connected = self._wire.connected()
        answers = self._wire.request(connected, "examine", _ANSWER_S, whole=whole)
        if any("error" in one for one in answers.values()):
            return []
        self._note_job(answers)
        self._pids |= {rank: answer["pid"] for rank, answer in answers.items()}
        if len(self._pids) < self._count:
            return []
        return [self._state(rank, rank in connected, answers.get(rank)) for rank in sorted(self._pids)]

    def places(self, ranks: Sequence[int], group: str, number: int) -> dict[int, Any]:
        """Rank -> ``file`` and ``line`` where it entered a collective, of those that know it."""
        own = [rank for rank in ranks if rank in self._pids]
        return self._wire.request(own, "entered_at", _PLACES_S, group=group, number=number)

    def _note_job(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Forgets the ranks of an earlier attempt: torch's agent has started the script again."""
        job = next((Job(**one["job"]) for one in answers.values() if one.get("job")), self.job)
        if job != self.job:
            self.job, self._pids = job, {}

    def _state(self, rank: int, connected: bool, answer: Mapping[str, Any] | None) -> dict[str, Any]:
        pid, state, why = self._pids[rank], "silent", ""
        if answer is not None:
            state = answer["state"]
        elif not connected:
            state = "idle"
        elif not psutil.pid_exists(pid):
            state = "lost"
        elif machine.stopped(pid):
            state, why = "stopped", f"kill -CONT {pid}"
        return {"rank": rank, "state": state, "why": why, "answer": answer}
