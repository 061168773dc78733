"""The ranks of a cluster as members of its process groups: joining, monitoring them, rejoining.

See [Note: uncertain groups]. After a cell that failed, was interrupted or lost a rank, groups may be broken: a rank
shut its sockets down, or entered a collective that its peers did not. Before the next cell the ranks are asked. If all
groups are intact, all members are in step and no collective is in flight (a mismatched one never ends), nothing was
lost; else the ranks rejoin.

See [Note: replaced ranks]. A failed rank gets a new process when the ranks rejoin. The others keep their processes,
variables and models. The new rank has none, so the next output names the ranks that are new.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

from .. import machine
from ..control.interrupts import interrupts_deferred
from ..control.records import RankHealth, RankRecord
from ..control.wire import Wire
from ..diagnosis.collectives_in_flight import in_flight_words
from ..diagnosis.rules import Diagnosis
from ..diagnosis.sources.cells import CellRanks
from ..errors import ClusterError, FallbackWarning, RankFailure
from ..formatting import exit_words, label_of
from ..protocol import black_box
from ..protocol.messages import (
    Activity,
    GetHealth,
    Health,
    Interrupt,
    PeerFailed,
    Ping,
    Replies,
    Request,
    Settle,
    Settled,
    Status,
    Unblock,
    read,
)
from ..timeline.clocks import HostClocks
from ..timeline.recorded.ends import cause_of
from .cells.failures import LOST, is_communication
from .processes.launchers import last_words
from .processes.startup import Processes, Progress, ignore

_ANSWER_SECONDS = 1.0
_MOMENT_SECONDS = 0.2
_SILENCE_SECONDS = 5.0  # of a rank on a busy machine: one that has not answered then may be ended
_END_SECONDS = 30.0
_SILENT = "was unresponsive (a C call held the GIL, or the process was suspended) and was terminated"
_SILENT_RANK = Health("silent", None)  # in the place of the answer of one that does not answer
_R = TypeVar("_R")
_FINISHED, _ENDED, _RUNNING = (
    ("finished", "finished the cell"),
    ("ended", "ended with the cell"),
    ("running", "runs the cell"),
)


class Membership:
    """Joins the ranks and knows whether their groups are intact.

    Args:
        processes: the cluster's processes.
        wire: the channel to the ranks.
        backend: the default group's backend; ``"auto"`` chooses it by the devices.
        clocks: of several hosts; None: all share one clock.
    """

    def __init__(self, processes: Processes, wire: Wire, backend: str, clocks: HostClocks | None = None) -> None:
        self._processes = processes
        self._clocks = clocks
        self._wire = wire
        self._backend = backend
        self._world_size = processes.placement.world_size
        self._lock = threading.Lock()
        self._told: set[str] = set()  # cells whose ranks have been told that one was unblocked
        self._open: dict[str, set[int]] = {}  # cell -> ranks whose code has not ended
        self.source = CellRanks(wire, self._world_size, self.lost, self.given, self._stopped)
        self._given: dict[str, set[int]] = {}  # cell that has not ended -> all ranks that run, or ran, it
        self._failed: dict[str, int] = {}  # cell that failed -> the rank on which it did first
        self._joined: dict[int, dict[str, Any]] = {}
        self._ended: dict[int, str] = {}  # ranks that this process terminated, and why
        self.groups_uncertain = False
        self.black_boxes = BlackBoxes()
        self.on_joined: Callable[[], None] | None = None  # called when ranks have joined or rejoined
        self.on_lost: Callable[[Mapping[int, str]], None] | None = None  # called when a rank's process has ended
        wire.on_status(self._on_status)

    def join(self, progress: Progress) -> None:
        """Makes every engine a rank; returns after their first collective."""
        self._processes.fork_server.on_exit = self._on_exit
        with self._lock:
            self._open.clear()
            self._given.clear()  # cells of processes that were replaced
        self._call(range(self._world_size), progress)

    def adopt(self, joined: Mapping[int, Mapping[str, Any]], running: Mapping[int, str]) -> None:
        """Takes over ranks that joined under an earlier client.

        Args:
            joined: the value of `joined` then.
            running: rank -> the cell that it runs.
        """
        self._processes.fork_server.on_exit = self._on_exit
        self._joined = {rank: dict(found) for rank, found in joined.items()}
        self._hold_black_boxes()
        self.groups_uncertain = True  # how the last cell ended is unknown
        with self._lock:
            for rank, cell in running.items():
                self._open.setdefault(cell, set()).add(rank)
                self._given.setdefault(cell, set()).add(rank)

    @property
    def joined(self) -> dict[int, dict[str, Any]]:
        """rank -> what it reported when it joined; plain data."""
        return self._joined

    def give_up(self, why: str) -> None:
        """From now on every rank counts as lost: this process has detached from the cluster."""
        for rank in range(self._world_size):
            self._ended.setdefault(rank, why)
            self._processes.fork_server.exits.setdefault(rank, 0)

    def rejoin(self, progress: Progress = ignore, replace: Iterable[int] = ()) -> dict[int, str]:
        """Gives all ranks new groups, and failed ranks new processes. See [Note: replaced ranks].

        Args:
            progress: called with the progress.
            replace: ranks whose processes are terminated and restarted, whatever they do.

        Returns:
            rank -> how its former process ended, for those that have a new one.

        Raises:
            ClusterError: a rank is still running a cell, or could not be started.
        """
        if self._processes.fork_server.failed:
            why = next((f": rank {rank} {how}" for rank, how in self.lost().items()), "")
            raise ClusterError(f"no rank is left{why} (`%cluster restart` starts new ones)")
        self._processes.look_after()
        self._end(replace, "was terminated to be replaced")
        lost = self.lost()
        self._check_idle()
        self._ask(Settle())  # no thread of an earlier cell may shut the new groups down
        self.groups_uncertain = True  # until all have rejoined: an interrupt may come before
        try:
            if lost:
                self._processes.fork_engines(progress, sorted(lost))
            else:
                self._processes.prepare("rejoining")
            self._call(lost, progress)
        except BaseException:
            with interrupts_deferred():
                self._end(lost, "was terminated: the ranks could not rejoin")  # it may have joined only in part
            raise
        self._ended.clear()
        return lost

    def restore_groups(self) -> dict[int, str]:
        """Rejoins if an earlier cell left groups broken, or a rank has ended. See [Note: uncertain groups].

        Returns:
            As `rejoin`.

        Raises:
            ClusterError: as `rejoin`.
        """
        if self.groups_uncertain:
            self._check_idle()
            self.verify_groups()
        return self.rejoin() if self.groups_uncertain else {}

    def begin(self, cell: str, ranks: Iterable[int]) -> None:
        """Notes that a cell is about to run on these ranks."""
        with self._lock:
            self._open[cell] = set(ranks)
            self._given[cell] = set(self._open[cell])

    def note_end(self, rank: int, cell: str, failed: bool, entered: Mapping[str, int] | None = None) -> None:
        """Notes that a cell's code has ended on a rank, as its status or its reply says first.

        Once a cell has failed and has ended on all its ranks, no rank waits: no group needs to be unblocked.

        Args:
            rank: on which it has ended.
            cell: its id.
            failed: whether it failed there.
            entered: group -> how many collectives the rank had entered; None if it is unknown.
        """
        with self._lock:
            missing = self._open.get(cell)
            if missing is None:
                return
            first = rank in missing
            missing.discard(rank)
            if failed:
                self._failed.setdefault(cell, rank)
                self.groups_uncertain = True
            if missing:
                if first and failed and entered is not None:
                    self._wire.send(missing, PeerFailed(cell, rank, entered))
                return
            del self._open[cell], self._given[cell]
            if cell not in self._failed:
                return
            del self._failed[cell]
        self._wire.send(None, Settle(cell))

    def interrupt(self, ranks: Iterable[int] | None = None, cell: str | None = None) -> None:
        """Makes ranks (None: all) end a cell (None: each they were sent), or not begin it; returns at once."""
        self.groups_uncertain = True
        with self._lock:
            cells = list(self._given) if cell is None else [cell]
        self._wire.send(ranks, Interrupt(cells))

    def busy(self) -> set[int]:
        """Living ranks that were sent a cell whose code has not ended, whether or not they have begun it."""
        lost = self.lost()
        with self._lock:
            return {rank for ranks in self._open.values() for rank in ranks if rank not in lost}

    def running(self, cell: str) -> set[int]:
        """Ranks on which the code of a cell has not ended."""
        with self._lock:
            return set(self._open.get(cell, ()))

    def verify_groups(self) -> None:
        """Tells the ranks that a cell has ended everywhere, and asks whether its groups are intact and in step."""
        answers = self._ask(Settle())
        whole = len(answers) == self._world_size and all(
            answer.whole and answer.cell is None and not answer.in_flight for answer in answers.values()
        )
        if whole and _equally_far(answers.values()):
            self.groups_uncertain = False

    def lost(self) -> dict[int, str]:
        """rank -> how its process ended, for failed ranks."""
        server = self._processes.fork_server
        exits, reasons = list(server.exits.items()), dict(server.reasons)
        return {rank: self._ended.get(rank) or reasons.get(rank) or exit_words(code) for rank, code in exits}

    def last_words(self, rank: int) -> str:
        """The last lines that a rank's process wrote outside cells."""
        log = self._processes.fork_server.log_of(rank)
        return last_words(log) if log.exists() else ""  # the log of a lost host is there

    def records(self) -> tuple[RankRecord, ...]:
        """Every rank as it is now."""
        return self._records(self._ask(GetHealth()))

    def health(self, seconds: float) -> tuple[RankHealth, ...]:
        """The value of `Cluster.health`; waits `seconds` for answers at most."""
        answers = self._ask(GetHealth(), seconds)
        silence = self._wire.silence()
        return tuple(
            RankHealth.of(record, answers.get(record.rank), silence.get(record.rank))
            for record in self._records(answers)
        )

    def _records(self, answers: Mapping[int, Health]) -> tuple[RankRecord, ...]:
        exits, pids = dict(self._processes.fork_server.exits), dict(self._processes.fork_server.pids)
        told = self._clocks.clocks() if self._clocks is not None else ()
        clocks = {rank: f"±{each.uncertain_ns / 1e6:.2f} ms" for each in told for rank in each.ranks}
        records = []
        for rank in range(self._world_size):
            answer, known = answers.get(rank, _SILENT_RANK), self._joined.get(rank, {})
            records.append(
                RankRecord(
                    rank=rank,
                    engine=self._processes.engine_of_rank.get(rank),
                    pid=pids.get(rank, 0),
                    host=known.get("host", ""),
                    device=known.get("device", ""),
                    backend=known.get("backend", ""),
                    state="lost" if rank in exits else answer.state,
                    cell=answer.cell,
                    exit_code=exits.get(rank),
                    clock=clocks.get(rank, ""),
                    in_flight=in_flight_words(answer.in_flight),
                    broken_by=answer.broken_by,
                )
            )
        return tuple(records)

    def given(self) -> set[int]:
        """Ranks of the cells that have not ended."""
        with self._lock:
            return {rank for ranks in self._given.values() for rank in ranks}

    def _stopped(self, rank: int) -> int | None:
        """The process id of a rank that was stopped by a signal; None of another one."""
        return self._processes.fork_server.pids[rank] if self.is_stopped(rank) else None

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank of this machine was stopped by a signal."""
        pid = self._processes.fork_server.pids.get(rank)
        return pid is not None and rank not in self._processes.far_ranks and machine.stopped(pid)

    def ask(self, ranks: Iterable[int]) -> Mapping[int, Activity]:
        """The immediate answers of these ranks to a ping."""
        return self._wire.request(ranks, Ping(), _MOMENT_SECONDS)

    def end_silent(self, ranks: Iterable[int]) -> None:
        """Terminates those of these ranks that are unresponsive, which no interrupt reaches; not suspended ones."""
        living = [rank for rank in ranks if rank not in self.lost() and not self.is_stopped(rank)]
        answers = self._wire.request(living, Ping(), _SILENCE_SECONDS)
        silent = {rank for rank in living if rank not in answers}
        # The connection is silent, not the rank: it may still run, and ends with its host if that stays unreachable.
        self._end(silent - self._processes.fork_server.unreachable(silent, _ANSWER_SECONDS), _SILENT)

    def _end(self, ranks: Iterable[int], why: str) -> None:
        """Kills these ranks' processes and waits until they have exited."""
        living = [rank for rank in ranks if rank not in self.lost()]
        for rank in living:
            self._ended[rank] = why
            self._processes.fork_server.signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while not self.lost().keys() >= set(living):
            if time.monotonic() > deadline:
                raise ClusterError(f"{label_of(living)} can't be terminated: `%cluster stop` ends the whole cluster")
            time.sleep(0.005)

    def _check_idle(self) -> None:
        """Raises `ClusterError` if a rank is still running a cell, or does not respond.

        One that is being unblocked gets a moment to end. One whose own code has ended gets time to report: its first
        traceback takes seconds on a busy machine.
        """
        begin, seconds = time.monotonic(), _ANSWER_SECONDS
        while True:
            answers = self._ask(Ping(), seconds)
            busy = [rank for rank, answer in answers.items() if answer.cell is not None]
            silent = [rank for rank in range(self._world_size) if rank not in answers and rank not in self.lost()]
            if not busy and not silent:
                return
            stopped = [rank for rank in silent if self.is_stopped(rank)]
            if stopped:
                pids = " ".join(str(self._processes.fork_server.pids[rank]) for rank in stopped)
                raise ClusterError(
                    f"{label_of(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP): "
                    f"`kill -CONT {pids}` resumes {'it' if len(stopped) == 1 else 'them'}"
                )
            ending = not silent and all(answers[rank].state != "running" for rank in busy)
            if silent:
                is_over = seconds == _SILENCE_SECONDS  # one question got the whole time: a slow answer is one, too
            else:
                is_over = time.monotonic() - begin > (_END_SECONDS if ending else _ANSWER_SECONDS)
            if is_over:
                cut_off = self._processes.fork_server.unreachable(silent, _ANSWER_SECONDS)
                if cut_off:
                    raise ClusterError(
                        f"the host of {label_of(cut_off)} is unreachable: wait for it, or until it is declared lost"
                    )
                if silent:
                    raise ClusterError(
                        f"rank {silent[0]} does not respond: wait for it, or restart its process "
                        f"(`%cluster rejoin --replace {silent[0]}`; its variables are lost)"
                    )
                raise ClusterError(
                    f"rank {busy[0]} is still running a cell: wait for it, or interrupt it (`%cluster interrupt`); if "
                    f"that fails, restart its process (`%cluster rejoin --replace {busy[0]}`; its variables are lost)"
                )
            seconds = _SILENCE_SECONDS if silent else _ANSWER_SECONDS
            time.sleep(0.01)

    def _ask(self, request: Request[_R], seconds: float = _ANSWER_SECONDS) -> Replies[_R]:
        lost = self.lost()
        living = [rank for rank in range(self._world_size) if rank not in lost]
        return self._wire.request(living, request, seconds)

    def _call(self, new: Iterable[int], progress: Progress) -> None:
        """Calls `ddp_lab.engine.rank.join` on new ranks and `rejoin` on the others, with what `prepare` said."""
        processes, answers = self._processes, self._processes.prepared
        devices = processes.placement.devices
        found = {group["name"]: group for rank in sorted(answers) for group in answers[rank]["groups"]}
        common = {
            "world_size": self._world_size,
            "backend": _c10d_backend(self._backend, devices[0], {answer["host"] for answer in answers.values()}),
            "port": answers[0]["port"],
            "users_port": answers[0]["users_port"],
            "groups": sorted(found.values(), key=_in_order_of_creation),
            "group_count": max(answer["group_count"] for answer in answers.values()),
            "broken": sorted({reducer for answer in answers.values() for reducer in answer["broken"]}),
        }
        functions = {**dict.fromkeys(range(self._world_size), "rejoin"), **dict.fromkeys(new, "join")}
        calls = {
            rank: (function, {**common, **processes.place_of(rank), "rank": rank})
            for rank, function in functions.items()
        }
        joined = processes.call(calls, "joining, first collective", progress)
        for rank in joined:
            self._joined[rank] = {**self._joined.get(rank, {}), **answers[rank], **joined[rank]}
        self._hold_black_boxes()
        for said in dict.fromkeys(line for answer in joined.values() for line in answer["warnings"]):
            warnings.warn(said, FallbackWarning, stacklevel=2)
        self.groups_uncertain = False
        with self._lock:
            self._told.clear()
        if self._clocks is not None:
            self._clocks.begin()
        if self.on_joined is not None:
            self.on_joined()

    def _hold_black_boxes(self) -> None:
        for rank in self._joined.keys() - self._processes.far_ranks:
            self.black_boxes.hold(rank, self._joined[rank])

    def _on_status(self, rank: int, status: Mapping[str, Any]) -> None:
        """On the wire's thread: when one rank is unblocked, all are, whichever group they wait on."""
        said = read(Status, status, strict=False)
        if not said.whole:
            self.groups_uncertain = True
        cell = said.unblocked
        if cell is not None:
            with self._lock:
                new = cell not in self._told
                self._told.add(cell)
                culprit = self._failed.get(cell, rank)
            if new:
                self._unblock(range(self._world_size), culprit, cell)
        if said.ended is not None:  # after that: once all have ended, no group is shut down any more
            ended, failed = said.ended
            self.note_end(rank, ended, failed, said.entered)

    def _on_exit(self, rank: int) -> None:
        """On the fork server's reader thread: a rank's process has ended."""
        how = self.lost().get(rank) or self._ended.get(rank, "has ended")  # its successor may be on the way already
        self.groups_uncertain = True
        self._wire.forget([rank])
        self._unblock((other for other in range(self._world_size) if other != rank), rank, None)
        with self._lock:
            cells = list(self._open)
        for cell in cells:
            self.note_end(rank, cell, failed=True)
        if self.on_lost is not None:
            self.on_lost({rank: how})
        engine = self._processes.engine_of_rank.get(rank)
        if engine is not None:
            self._processes.unregister(engine)

    def _unblock(self, ranks: Iterable[int], by: int, cell: str | None) -> None:
        self._wire.send(ranks, Unblock(by, cell))


def _c10d_backend(backend: str, device: str, hosts: Set[str]) -> str:
    if backend != "auto":
        return backend
    if device != "cpu":
        return "cpu:gloo,cuda:nccl"
    return "shm" if len(hosts) == 1 else "gloo"


def _equally_far(answers: Iterable[Settled]) -> bool:
    """Whether all members of each group have entered the same number of collectives."""
    counts: dict[str, set[int]] = {}
    for answer in answers:
        for name, count in answer.sequences.items():
            counts.setdefault(name, set()).add(count)
    return all(len(found) == 1 for found in counts.values())


def _in_order_of_creation(group: Mapping[str, Any]) -> tuple[int, str]:
    name = group["name"]
    return (int(name), "") if name.isdigit() else (1 << 62, name)


class BlackBoxes:
    """What the ranks of this machine recorded last, also those that have died: see [Note: what a dead rank leaves].

    Each rank records into a file in memory of its own. The client opens that when the rank has joined, through /proc,
    and so keeps it when the rank's process ends. After a cell whose ranks were killed, or lost each other, it compares
    what each rank entered last. Ranks on other hosts, and those that allow no files in memory, have no file.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # rank -> process id, descriptor

    def hold(self, rank: int, joined: Mapping[str, Any]) -> None:
        """Opens the file of a rank of this machine that has joined, if it has a new process.

        Args:
            rank: which.
            joined: what it has reported, with ``pid`` and ``black_box``.
        """
        known, process = self._held.get(rank), int(joined["pid"])
        if joined.get("black_box") is None or (known is not None and known[0] == process):
            return
        self._let_go(rank)
        with contextlib.suppress(OSError):  # it has ended, or lives in another namespace
            file = os.open(f"/proc/{process}/fd/{joined['black_box']}", os.O_RDONLY | os.O_CLOEXEC)
            self._held[rank] = process, file

    def cause(self, failures: Mapping[int, RankFailure], ranks: Sequence[int], begin_ns: int) -> Diagnosis | None:
        """Why a cell failed, if what its ranks say does not tell.

        Args:
            failures: rank -> failure, the first cause first.
            ranks: those that ran the cell.
            begin_ns: when it was sent, on this host's monotonic clock.
        """
        first = next(iter(failures.values()), None)
        if first is None or not (first.name == LOST or is_communication(first)):
            return None
        ends = {rank: _end(failures[rank]) if rank in failures else _FINISHED for rank in ranks}
        return self._compare(ends, begin_ns)

    def cause_of_wait(self, waiting: Collection[int], ranks: Sequence[int], begin_ns: int) -> Diagnosis | None:
        """Why ranks wait for others that have finished the cell; None if that is not known.

        Args:
            waiting: those that run it.
            ranks: all that were sent it.
            begin_ns: when it was sent, on this host's monotonic clock.
        """
        return self._compare({rank: _RUNNING if rank in waiting else _FINISHED for rank in ranks}, begin_ns)

    def _compare(self, ends: Mapping[int, tuple[str, str]], begin_ns: int) -> Diagnosis | None:
        left = {}
        for rank in ends:
            if rank in self._held and (found := black_box.read(self._held[rank][1])) is not None:
                left[rank] = found
        return cause_of(left, {rank: ends[rank] for rank in left}, begin_ns) if left else None

    def close(self) -> None:
        """Releases all files."""
        for rank in list(self._held):
            self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        if rank in self._held:
            os.close(self._held.pop(rank)[1])


def _end(failure: RankFailure) -> tuple[str, str]:
    """How a rank ended, and that in words, as `RankAtEnd` has it."""
    if failure.name == LOST:
        how = failure.message.partition(" (signal ")[0]
        return ("killed", how.removeprefix("was ")) if how.startswith("was killed by") else ("failed", how)
    return _ENDED if failure.secondary else ("failed", f"{failure.name}: {failure.message}")
