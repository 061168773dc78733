"""The ranks of a script on this host, and what they answer in a form that other nodes can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ... import machine
from ...protocol.messages import Examination, Examine
from ..mismatch import with_places
from ..snapshot import RankSnapshot
from . import ANSWER_S, Channel, call_sites

__all__ = ["Job", "ScriptRanks"]


@dataclass(frozen=True)
class Job:
    """What torch's agents tell a rank of the job.

    Attributes:
        host: where the store is.
        port: of the store.
        node: number of this node.
        nodes: how many there are.
        world_size: number of ranks.
        attempt: the run's id and how often it was restarted.
        of_script: the script has started the ranks, not the agents.
    """

    host: str
    port: int
    node: int
    nodes: int
    world_size: int
    attempt: str
    of_script: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Job:
        """What torch's agent has said of the job in these variables."""
        return cls(
            host=given.get("MASTER_ADDR", ""),
            port=int(given.get("MASTER_PORT", 0)),
            node=int(given.get("GROUP_RANK", 0)),
            nodes=int(given.get("GROUP_WORLD_SIZE", 1)),
            world_size=int(given.get("WORLD_SIZE", 1)),
            attempt=f"{given.get('TORCHELASTIC_RUN_ID', '')}/{given.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )


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


class ScriptRanks:
    """Asks the ranks of this host over a channel of its own.

    As soon as the script has started ranks, these are the ranks: the script itself, which the agent has started, only
    waits for them.

    Args:
        channel: the ranks connect to it.
        count: how many the agent has started.
    """

    def __init__(self, channel: Channel, count: int) -> None:
        self._channel, self._count = channel, count
        self._processes: dict[int, _Process] = {}  # by their names on the channel, in the order of their first answers
        self.job: Job | None = None  # known from the first answer on

    @property
    def are_of_script(self) -> bool:
        """Whether the script has started them: then torch's agent does not end the run when one of them has ended."""
        return self.job is not None and self.job.of_script

    def look(self, *, whole: bool) -> list[dict[str, Any]]:
        """What each rank does: ``rank``, ``state``, ``why`` and its answer, JSON-able; empty while not all have begun,
        or if one can't be examined (its own log says why), or if the script runs several jobs at the same time.

        Args:
            whole: with the collectives that torch has recorded, which takes milliseconds of the ranks' time.
        """
        connected = self._channel.connected()
        answers = self._channel.request(connected, Examine(whole=whole), ANSWER_S)
        if answers.errors:
            return []
        for name, answer in answers.items():
            self._note(name, answer, connected)
        names = self._names()
        if len(names) < (self.job.world_size if self.job is not None and self.job.of_script else self._count):
            return []
        return [self._state(names[rank], names[rank] in connected, answers.get(names[rank])) for rank in sorted(names)]

    def snapshots(self) -> list[RankSnapshot]:
        """What each rank does now; empty if `look` is."""
        return with_places([RankSnapshot.of_script(one) for one in self.look(whole=True)], self.places)

    def places(self, ranks: Iterable[int], group: str, number: int) -> dict[int, Any]:
        """Rank -> ``file`` and ``line`` where it entered a collective, of those that know it."""
        names = self._names()
        own = {names[rank]: rank for rank in ranks if rank in names}
        return {own[name]: site for name, site in call_sites(self._channel, own, group, number).items()}

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
        state, why = "silent", ""
        seen: Mapping[str, Any] = {}
        if answer is not None:
            state, why, seen = answer.state, answer.why, answer.snapshot
        elif not connected:
            state = "idle"
        elif machine.ended(one.pid):
            state, why = "lost", one.why or "its process has ended"
        elif machine.stopped(one.pid):
            state, why = "stopped", f"kill -CONT {one.pid}"
        return {**seen, "rank": one.rank, "state": state, "why": why}
