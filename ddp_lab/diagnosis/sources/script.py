"""The ranks of a script on this host, and what they answer in a form that other nodes can read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ... import machine
from ...formatting import enumeration, names
from ...protocol.messages import Examination, Examine
from ..mismatch import with_places
from ..snapshot import RankSnapshot
from . import ANSWER_S, Channel, call_sites

__all__ = ["Job", "JobRanks", "ScriptRanks"]

# In the commands of a process that imports the script before it begins, and of the one whose children do.
_IMPORTS_FIRST, _FORK_SERVER = "--multiprocessing-fork", "multiprocessing.forkserver"


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
        meeting: where the script's ranks look for each other, e.g. ``"port 29500"``.
    """

    host: str
    port: int
    node: int
    nodes: int
    world_size: int
    attempt: str
    of_script: bool = False
    meeting: str = ""

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
    """A process that has answered.

    Attributes:
        rank: its rank; None of one that the script has started and that is none.
        pid: its process id.
        job: in which it is that rank.
        seen: what it did when it last answered while it ran.
        seen_at: when that was, on the monotonic clock.
        why: how it failed, as it has said itself.
    """

    rank: int | None
    pid: int
    job: Job
    seen: Mapping[str, Any]
    seen_at: float
    why: str = ""

    @property
    def last_seen(self) -> RankSnapshot:
        """What it did then."""
        return RankSnapshot.of_script({**self.seen, "rank": self.rank or 0, "state": "running"})

    @property
    def unseen_s(self) -> float:
        """For how many seconds it has not answered."""
        return time.monotonic() - self.seen_at


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

    def look(self, *, whole: bool, of: Job | None = None) -> dict[Job, list[dict[str, Any]]]:
        """Job -> what each of its ranks does: ``rank``, ``state``, ``why`` and its answer, JSON-able. A job is
        left out while ranks of it start, or if some are on other hosts; all are, if a process can't be examined (its
        own log says why).

        Args:
            whole: with the collectives that torch has recorded, which takes milliseconds of the ranks' time.
            of: only this job; None: all that have a living rank.
        """
        connected = self._channel.connected()
        of_others = [name for name, one in self._processes.items() if one.rank is not None and one.job != of]
        answers = self._channel.request(connected.difference(of_others if of else ()), Examine(whole=whole), ANSWER_S)
        if answers.errors:
            return {}
        for name, answer in answers.items():
            self._note(name, answer, connected)
        found = {}
        for job in self._jobs(connected) if of is None else [of]:
            own = self._names(job)
            ranks = [self._state(name, name in connected, answers.get(name)) for name in own.values()]
            missing = set(range(job.world_size)) - own.keys() if job.of_script and job.nodes == 1 else set()
            have_groups = any(one.get("sequences") for one in ranks)  # then all have joined, elsewhere
            if missing and not have_groups and not self._some_start():
                why = self._who_could_come(job, connected, answers)
                does = self._preparation(answers)
                ranks += [{**does, "rank": rank, "state": "missing", "why": why} for rank in missing]
            if len(ranks) >= (job.world_size if job.of_script else self._count):
                found[job] = sorted(ranks, key=lambda one: int(one["rank"]))
        return found

    def places(self, ranks: Iterable[int], job: Job, group: str, number: int) -> dict[int, Any]:
        """Rank -> ``file`` and ``line`` where it entered a collective, of those that know it."""
        known = self._names(job)
        own = {known[rank]: rank for rank in ranks if rank in known}
        return {own[name]: site for name, site in call_sites(self._channel, own, group, number).items()}

    def processes(self, job: Job) -> list[int]:
        """The ids of its ranks' processes, by rank."""
        return [self._processes[name].pid for _, name in sorted(self._names(job).items())]

    def last_seen(self, pid: int) -> tuple[float, RankSnapshot] | None:
        """For how many seconds a process has not answered, and what it did then; None if it is not known."""
        return next(((one.unseen_s, one.last_seen) for one in self._processes.values() if one.pid == pid), None)

    def _note(self, name: int, answer: Examination, connected: set[int]) -> None:
        """Notes who answers; forgets the ranks of an earlier attempt: torch's agent has started the script again, or
        the script its ranks."""
        job = Job(**answer.job)
        if not job.of_script and any(one.job != job for one in self._processes.values() if not one.job.of_script):
            self._processes = {}
        known = self._processes.get(name)
        is_new = known is None or (known.pid, known.job) != (answer.pid, job)
        again = answer.rank is not None and answer.rank in self._names(job)
        if is_new and again:
            self._processes = {other: one for other, one in self._processes.items() if self._lives(other, connected)}
        why = answer.why or ("" if known is None or known.pid != answer.pid else known.why)
        self._processes[name] = _Process(answer.rank, answer.pid, job, answer.snapshot, time.monotonic(), why)

    def _lives(self, name: int, connected: set[int]) -> bool:
        return name in connected and not machine.ended(self._processes[name].pid)

    def _jobs(self, connected: set[int]) -> list[Job]:
        """Those of the script that have a living rank; else the agent's."""
        of_script = {
            one.job: None
            for name, one in self._processes.items()
            if one.job.of_script and one.rank is not None and self._lives(name, connected)
        }
        return list(of_script) or list({one.job: None for one in self._processes.values() if not one.job.of_script})

    def _names(self, job: Job) -> dict[int, int]:
        """Rank -> its name on the wire."""
        return {one.rank: name for name, one in self._processes.items() if one.job == job and one.rank is not None}

    def _some_start(self) -> bool:
        """Whether a process that the script has started imports the script still, as far as can be seen from here."""
        known = {one.pid for one in self._processes.values()}
        for script in [one.pid for one in self._processes.values() if not one.job.of_script]:
            with contextlib.suppress(psutil.Error):  # one has ended meanwhile
                for child in psutil.Process(script).children():
                    command = " ".join(child.cmdline())
                    started = [child] if _IMPORTS_FIRST in command else []
                    started += child.children() if _FORK_SERVER in command else []
                    if any(one.pid not in known for one in started):
                        return True
        return False

    def _preparation(self, answers: Mapping[int, Examination]) -> Mapping[str, Any]:
        """What a process of the script does that is no rank yet, and imports or compiles; empty if none does."""
        for name, one in self._processes.items():
            if one.rank is None and name in answers and one.last_seen.prepares:
                return one.seen
        return {}

    def _who_could_come(self, job: Job, connected: set[int], answers: Mapping[int, Examination]) -> str:
        """What the script's processes do that are no ranks yet, and which are the same rank, in words."""
        said, ended, ranks = list[str](), list[str](), dict[int, list[str]]()
        for name, one in self._processes.items():
            if one.rank is None:
                told = RankSnapshot.of_script({**self._state(name, name in connected, answers.get(name)), "rank": 0})
                is_over = told.state == "idle"
                (ended if is_over else said).append(f"process {one.pid} {'has ended' if is_over else told}")
            elif one.job == job:
                ranks.setdefault(one.rank, []).append(str(one.pid))
        twice = [f"processes {enumeration(who)} are both rank {rank}" for rank, who in ranks.items() if len(who) > 1]
        return names([*twice, *(said or ended)])

    def _state(self, name: int, connected: bool, answer: Examination | None) -> dict[str, Any]:
        one = self._processes[name]
        state, why = "silent", ""
        seen: Mapping[str, Any] = {}
        if answer is not None:
            state, why, seen = answer.state, answer.why, answer.snapshot
        elif not connected:
            state = "idle"
        elif machine.ended(one.pid):
            one.why = one.why or f"its process has ended; last seen {one.unseen_s:.1f} s before: it {one.last_seen}"
            state, why = "lost", one.why
        elif machine.stopped(one.pid):
            state, why = "stopped", f"kill -CONT {one.pid}"
        return {**seen, "rank": one.rank, "state": state, "why": why}


@dataclass(frozen=True)
class JobRanks:
    """The ranks of one job on this host.

    Attributes:
        ranks: of all jobs.
        job: which.
    """

    ranks: ScriptRanks
    job: Job

    def look(self) -> list[dict[str, Any]]:
        """As `ScriptRanks.look`, with the collectives; empty if it lacks the job."""
        return self.ranks.look(whole=True, of=self.job).get(self.job, [])

    def snapshots(self) -> list[RankSnapshot]:
        """What each rank does now; empty if `look` is."""
        return with_places([RankSnapshot.of_script(one) for one in self.look()], self.places)

    def places(self, ranks: Iterable[int], group: str, number: int) -> dict[int, Any]:
        """As `ScriptRanks.places`."""
        return self.ranks.places(ranks, self.job, group, number)
