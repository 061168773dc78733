"""The ranks of a cluster as members of its process groups: joining, looking after them, rejoining.

See [Note: suspect]. After a cell that failed, was interrupted or lost a rank, groups may be broken: a rank shut its
sockets down, or entered a collective that its peers did not. Before the next cell the ranks are asked; if all groups
are whole and all members equally far, nothing was lost, else the ranks rejoin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ClusterError
from .launchers import in_words
from .startup import Processes, Progress, ignore
from .wire import Wire

__all__ = ["Membership", "RankRecord"]

_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class RankRecord:
    """One rank as it is now.

    Attributes:
        rank: its rank.
        engine: id of its ipyparallel engine; not the rank.
        pid: its process id.
        host: the machine.
        device: the device it is pinned to.
        backend: the default group's backends.
        state: ``"idle"``, ``"running"`` a cell, ``"freed"`` (its groups were shut down; the next cell rejoins),
            ``"silent"`` (it does not answer) or ``"dead"``.
        cell: id of the cell it runs, None between cells.
        exit_code: of a dead rank; minus the signal's number if a signal ended it.
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


class Membership:
    """Joins the ranks and knows whether their groups are whole.

    Args:
        processes: the cluster's processes, all engines registered.
        wire: the channel to the ranks.
        backend: the default group's backend, ``"auto"`` for what fits the devices.
    """

    def __init__(self, processes: Processes, wire: Wire, backend: str) -> None:
        self._processes = processes
        self._wire = wire
        self._backend = backend
        self._world_size = processes.placement.world_size
        self._lock = threading.Lock()
        self._told: set[str] = set()  # cells whose ranks have been told that one was freed
        self._open: dict[str, set[int]] = {}  # cell -> ranks whose code has not ended
        self._failed: set[str] = set()  # cells that failed on a rank
        self._joined: dict[int, dict[str, Any]] = {}
        self.suspect = False
        wire.on_status(self._on_status)

    def join(self, progress: Progress) -> None:
        """Makes every engine a rank; returns after their first collective."""
        self._processes.fork_server.on_exit = self._on_exit
        self._call("join", progress)

    def rejoin(self) -> None:
        """Gives all ranks new groups.

        Raises:
            ClusterError: a rank is dead, or still runs a cell.
        """
        self.check_alive()
        self._check_idle()
        self._ask("settle")  # no thread of an earlier cell may shut the new groups down
        self._processes.prepare("rejoining")
        self._call("rejoin", ignore)

    def ensure_whole(self) -> None:
        """Rejoins if an earlier cell left groups broken. See [Note: suspect].

        Raises:
            ClusterError: a rank is dead, or still runs a cell.
        """
        self.check_alive()
        if self.suspect:
            self._check_idle()
            self.settle()
        if self.suspect:
            self.rejoin()

    def begin(self, cell: str, ranks: Iterable[int]) -> None:
        """Notes that a cell is about to run on these ranks."""
        with self._lock:
            self._open[cell] = set(ranks)

    def settle(self) -> None:
        """Tells the ranks that a cell is over everywhere, and asks whether its groups are whole and equally far."""
        answers = self._ask("settle")
        whole = len(answers) == self._world_size and all(answer.get("whole") for answer in answers.values())
        if whole and _equally_far(answers.values()):
            self.suspect = False

    def lost(self) -> dict[int, str]:
        """rank -> how its process ended, for those that have."""
        return {rank: in_words(code) for rank, code in list(self._processes.fork_server.exits.items())}

    def check_alive(self) -> None:
        """Raises `ClusterError` naming the first rank whose process has ended."""
        for rank, why in sorted(self.lost().items()):
            raise ClusterError(f"rank {rank} {why}: `%cluster restart` (or .restart()) gives new ranks")

    def records(self) -> tuple[RankRecord, ...]:
        """Every rank as it is now."""
        exits = dict(self._processes.fork_server.exits)
        answers = self._ask("ping")
        records = []
        for rank in range(self._world_size):
            answer, known = answers.get(rank, {}), self._joined.get(rank, {})
            records.append(
                RankRecord(
                    rank=rank,
                    engine=self._processes.engine_of_rank.get(rank),
                    pid=self._processes.fork_server.pids[rank],
                    host=known.get("host", ""),
                    device=known.get("device", ""),
                    backend=known.get("backend", ""),
                    state="dead" if rank in exits else answer.get("state", "silent"),
                    cell=answer.get("cell"),
                    exit_code=exits.get(rank),
                )
            )
        return tuple(records)

    def _check_idle(self) -> None:
        """Raises `ClusterError` if a rank still runs a cell; one that is being freed gets a moment to end."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            busy = [rank for rank, answer in self._ask("ping").items() if answer.get("cell") is not None]
            if not busy:
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"rank {busy[0]} still runs a cell: wait for it, or interrupt it (`%cluster interrupt`)"
                )
            time.sleep(0.01)

    def _ask(self, op: str) -> dict[int, dict[str, Any]]:
        lost = self.lost()
        living = [rank for rank in range(self._world_size) if rank not in lost]
        return self._wire.request(living, op, _ANSWER_SECONDS)

    def _call(self, function: str, progress: Progress) -> None:
        """Calls `bootstrap.join` or `rejoin` on all ranks with what `prepare` said."""
        processes, answers = self._processes, self._processes.prepared
        devices = processes.placement.devices
        found = {group["name"]: group for rank in sorted(answers) for group in answers[rank]["groups"]}
        common = {
            "world_size": self._world_size,
            "local_world_size": self._world_size,
            "backend": _c10d_backend(self._backend, devices[0]),
            "port": answers[0]["port"],
            "endpoint": self._wire.endpoint(),
            "groups": sorted(found.values(), key=_in_order_of_creation),
            "group_count": max(answer["group_count"] for answer in answers.values()),
        }
        specs = {
            engine: ({**common, "rank": rank, "local_rank": rank, "device": devices[rank]},)
            for rank, engine in processes.engine_of_rank.items()
        }
        joined = processes.call(function, specs, "joining, first collective", progress)
        for rank, engine in processes.engine_of_rank.items():
            self._joined[rank] = {**self._joined.get(rank, {}), **answers[rank], **joined[engine]}
        self.suspect = False
        with self._lock:
            self._told.clear()

    def _on_status(self, rank: int, status: Mapping[str, Any]) -> None:
        """On the wire's thread: a freed rank's peers are freed too, whichever group they wait on."""
        if not status.get("whole", True):
            self.suspect = True
        if status.get("ended"):
            self._note_end(rank, *status["ended"])
        cell = status.get("freed")
        if cell is None:
            return
        with self._lock:
            new = cell not in self._told
            self._told.add(cell)
        if new:
            self._free_others(rank, cell)

    def _note_end(self, rank: int, cell: str, failed: bool) -> None:
        """Once a cell has failed and its code has ended on all its ranks, nobody waits: no group has to be freed."""
        with self._lock:
            missing = self._open.get(cell)
            if missing is None:
                return
            missing.discard(rank)
            if failed:
                self._failed.add(cell)
                self.suspect = True
            if missing:
                return
            del self._open[cell]
            if cell not in self._failed:
                return
            self._failed.discard(cell)
        self._wire.send(None, {"op": "settle", "cell": cell})

    def _on_exit(self, rank: int) -> None:
        """On the fork server's reader thread: a rank's process has ended."""
        self.suspect = True
        self._free_others(rank, None)
        engine = self._processes.engine_of_rank.get(rank)
        if engine is not None:
            self._processes.unregister(engine)

    def _free_others(self, rank: int, cell: str | None) -> None:
        others = [other for other in range(self._world_size) if other != rank]
        self._wire.send(others, {"op": "free", "by": rank, "cell": cell})


def _c10d_backend(backend: str, device: str) -> str:
    if backend != "auto":
        return backend
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"


def _equally_far(answers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every group's members have entered as many collectives."""
    counts: dict[str, set[int]] = {}
    for answer in answers:
        for name, count in answer["sequences"].items():
            counts.setdefault(name, set()).add(count)
    return all(len(found) == 1 for found in counts.values())


def _in_order_of_creation(group: Mapping[str, Any]) -> tuple[int, str]:
    name = group["name"]
    return (int(name), "") if name.isdigit() else (1 << 62, name)
