"""What the ranks of this host answer when they are examined, in a form that other nodes can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import machine
from ..control.wire import Wire
from ..protocol.messages import Examination, Examine, FindCallSite, plain
from .nodes import Job

__all__ = ["LocalRanks"]

_ANSWER_S = 1.0
_PLACES_S = 5.0  # torch looks the source lines of all recorded stacks up


@dataclass
class _Process:
    """A rank's process that has answered.

    Attributes:
        rank: its rank.
        pid: its process id.
        job: in which it is that rank.
        why: how it failed, as it has said itself.
    """

    rank: int
    pid: int
    job: Job
    why: str = ""


class LocalRanks:
    """Asks the ranks of this host over a wire of its own.

    As soon as the script has started ranks, these are the ranks: the script itself, which the agent has started, only
    waits for them.

    Args:
        wire: the ranks connect to it.
        count: how many the agent has started.
    """

    def __init__(self, wire: Wire, count: int) -> None:
        self._wire, self._count = wire, count
        self._processes: dict[int, _Process] = {}  # by their names on the wire, in the order of their first answers
        self.job: Job | None = None  # known from the first answer on

    @property
    def are_of_script(self) -> bool:
        """Whether the script has started them: then torch's agent does not end the run when one of them has ended."""
        return self.job is not None and self.job.of_script

    def look(self, *, whole: bool) -> list[dict[str, Any]]:
        """What each rank does: ``rank``, ``state``, ``why`` and ``answer``, JSON-able; empty while not all have begun,
        or if one can't be examined (its own log says why), or if the script runs several jobs at the same time.

        Args:
            whole: with the collectives that torch has recorded, which takes milliseconds of the ranks' time.
        """
        connected = self._wire.connected()
        answers = self._wire.request(connected, Examine(whole=whole), _ANSWER_S)
        if answers.errors:
            return []
        for name, answer in answers.items():
            self._note(name, answer, connected)
        names = self._names()
        if len(names) < (self.job.world_size if self.job is not None and self.job.of_script else self._count):
            return []
        return [self._state(names[rank], names[rank] in connected, answers.get(names[rank])) for rank in sorted(names)]

    def places(self, ranks: Sequence[int], group: str, number: int) -> dict[int, Any]:
        """Rank -> ``file`` and ``line`` where it entered a collective, of those that know it."""
        names = self._names()
        own = {names[rank]: rank for rank in ranks if rank in names}
        found = self._wire.request(own, FindCallSite(group, number), _PLACES_S)
        return {own[name]: plain(site) for name, site in found.items() if site.file}

    def _note(self, name: int, answer: Examination, connected: set[int]) -> None:
        """Notes who answers; forgets the ranks of an earlier attempt: torch's agent has started the script again, or
        the script its ranks."""
        job, rank = Job(**answer.job), answer.rank or 0
        if not job.of_script and any(one.job != job for one in self._processes.values() if not one.job.of_script):
            self._processes = {}
        known = self._processes.get(name)
        if known is None or (known.pid, known.job) != (answer.pid, job):
            if job.of_script and any(one.rank == rank and one.job == job for one in self._processes.values()):
                self._processes = {
                    other: one for other, one in self._processes.items() if self._lives(other, connected)
                }
            self._processes[name] = _Process(rank, answer.pid, job)
        self._processes[name].why = answer.why
        jobs = [one.job for one in self._processes.values()]
        self.job = next((one for one in jobs if one.of_script), jobs[0])

    def _lives(self, name: int, connected: set[int]) -> bool:
        return name in connected and not machine.ended(self._processes[name].pid)

    def _names(self) -> dict[int, int]:
        """Rank -> its name on the wire; empty if two processes of several jobs have the same number."""
        own = [(name, one.rank) for name, one in self._processes.items() if one.job == self.job]
        names = {rank: name for name, rank in own}
        return names if len(names) == len(own) else {}

    def _state(self, name: int, connected: bool, answer: Examination | None) -> dict[str, Any]:
        one = self._processes[name]
        state, why, seen = "silent", "", None
        if answer is not None:
            state, why, seen = answer.state, answer.why, {**answer.snapshot, "state": answer.state}
        elif not connected:
            state = "idle"
        elif machine.ended(one.pid):
            state, why = "lost", one.why or "its process has ended"
        elif machine.stopped(one.pid):
            state, why = "stopped", f"kill -CONT {one.pid}"
        return {"rank": one.rank, "state": state, "why": why, "answer": seen}
