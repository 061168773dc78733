"""A running cluster: its processes, the wire to its ranks and their state.

One thread opens, closes and detaches: the one that starts and stops the cluster, or the keeper's reader when another
client takes the cluster over. The parts guard their own state meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .. import machine
from ..control.wire import Wire
from ..errors import ClusterError
from ..formatting import label_of
from ..protocol.events import Batch
from ..protocol.messages import DescribeRank, GetLastCell, LastCell, RankDescription
from ..timeline.clocks import HostClocks
from .cells.front_end import CommRelay
from .membership import Membership
from .processes.host_processes import HostProcesses
from .processes.startup import Processes, Progress, ignore

if TYPE_CHECKING:
    from ..timeline.timeline import Timeline
    from .config import ClusterConfig
    from .processes.keeper import Keeper


_Part = TypeVar("_Part")
_LAST_LINES = 10
_HELLO_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_PARTING_SECONDS = 2.0  # for the last messages to be sent


@dataclass(frozen=True)
class MissedCell:
    """A cell that ran while no client was attached.

    Attributes:
        label: its name.
        ranks: those that were sent it.
        running: those on which it is still running.
        errors: rank -> its error.
        seconds: time since it began; for one that has ended, its duration.
        text: rank -> the end of its printed text, at most 8,192 characters.
    """

    label: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    errors: dict[int, str]
    seconds: float
    text: dict[int, str]

    def __str__(self) -> str:
        if self.running:
            head = f"{self.label} is still running on {label_of(self.running)}, for {self.seconds:.0f} s"
        else:
            head = f"{self.label} ended on {label_of(self.ranks)} after {self.seconds:.1f} s"
        lines = [head, *(f"  rank {rank}: {error}" for rank, error in self.errors.items())]
        for rank, text in self.text.items():
            lines += [f"[rank {rank}] {line}" for line in text.splitlines()[-_LAST_LINES:]]
        return "\n".join(lines)


class Session:
    """A cluster's life from its start, or from attaching to it, until it is stopped or detached from.

    Args:
        config: the cluster's configuration.
        keeper: of a detached cluster.
        timeline: receives events, descriptions and statuses of ranks.
        on_lost: called when a rank's process has ended: rank -> how.
        notes: data for a later client besides the session's own.

    Attributes:
        owner: the process that owns it; a child forked from it does not.
        processes: controller, fork server and engines.
        clocks: of ranks on several hosts; None: all share one clock.
        missed: rank -> its answer, when this client attached, on the cell that it ran while no client was attached.
    """

    def __init__(
        self,
        config: ClusterConfig,
        keeper: Keeper | None,
        timeline: Timeline,
        on_lost: Callable[[Mapping[int, str]], None],
        notes: Mapping[str, Any],
    ) -> None:
        self.owner = os.getpid()
        hosts = config.hosts
        self.processes = Processes(config.placement, keeper) if hosts is None else HostProcesses(hosts)
        self.clocks: HostClocks | None = None
        self.missed: dict[int, RankDescription] = {}
        self._config, self._timeline, self._on_lost, self._notes = config, timeline, on_lost, notes
        self._wire: Wire | None = None
        self._members: Membership | None = None

    @property
    def starting(self) -> bool:
        """Whether its ranks have not joined yet."""
        return self._members is None

    @property
    def wire(self) -> Wire:
        """The channel for cells, events and control.

        Raises:
            ClusterError: the cluster is still starting.
        """
        return _started(self._wire)

    @property
    def members(self) -> Membership:
        """Its ranks.

        Raises:
            ClusterError: the cluster is still starting.
        """
        return _started(self._members)

    def open(self, progress: Progress) -> None:
        """Starts the processes and joins the ranks.

        Raises:
            ClusterError: a rank failed to start; the message holds the end of its log.
        """
        self._listen(progress)
        self.processes.open(progress)
        self._create_membership().join(progress)

    def reattach(self, keeper: Keeper) -> None:
        """Connects to a running cluster and asks its ranks for their state."""
        self._listen(ignore)
        members = self._create_membership()
        joined = keeper.notes["joined"]
        self.processes.reattach({int(rank): (found["engine"], found["uuid"]) for rank, found in joined.items()})
        servers = self.processes.fork_server
        living = [rank for rank in servers.pids if rank not in servers.exits and not members.is_stopped(rank)]
        self.wire.wait_connected(living, _HELLO_SECONDS)
        answers = self.wire.request(living, DescribeRank(), _ANSWER_SECONDS)
        last = {rank: answer.cell for rank, answer in answers.items() if answer.cell is not None}
        running = {rank: cell.id for rank, cell in last.items() if cell.ended is None}
        members.adopt({int(rank): found for rank, found in joined.items()}, running)
        news = [rank for rank, cell in last.items() if cell.ended is None or cell.ended >= keeper.alone_since]
        self.missed = {rank: answers[rank] for rank in news}

    def refresh_missed_cells(self) -> tuple[MissedCell, ...]:
        """The cells that ran while no client was attached, as they are now, by each rank's answer on its last one."""
        if self.missed:
            for rank, answer in self.wire.request(self.missed, GetLastCell(), _ANSWER_SECONDS).items():
                before = self.missed[rank].cell
                if answer.cell is not None and before is not None and answer.cell.id == before.id:
                    self.missed[rank] = answer
        return _missed_cells(self.missed)

    def replace_ranks(self, progress: Progress) -> None:
        """Gives every rank a new process, and all of them new groups."""
        self.processes.fork_server.on_exit = None
        self.processes.end_engines()
        self.processes.fork_engines(progress)
        self.members.join(progress)

    def close(self) -> None:
        """Ends every process and waits for them."""
        self.processes.fork_server.on_exit = None
        try:
            if self.clocks is not None:
                self.clocks.stop()
            self.processes.close()
        finally:
            if self._wire is not None:
                self._wire.close()
            if self._members is not None:
                self._members.black_boxes.close()

    def detach(self, why: str) -> None:
        """Leaves a detached cluster to its keeper; calls that wait for a cell here end with `why`."""
        if self._members is not None:
            self._members.give_up(why)
            self._members.black_boxes.close()
        if self._wire is not None:
            # Before disconnecting from the keeper, after which the next client may listen; also after an interrupt.
            self._wire.close(_PARTING_SECONDS)
        self.processes.fork_server.on_exit = None
        self.processes.leave()

    def _listen(self, progress: Progress) -> None:
        wire = self._wire = self._new_wire(self.processes.reach(progress))
        if self._config.hosts is not None:
            self.clocks = HostClocks(wire, self.processes.clocks, machine.host_clock(), self._timeline.set_status)
        self.processes.wire = wire
        CommRelay(wire)
        wire.on_batch(self._take_batch)
        wire.on_description(self._timeline.describe)
        wire.on_status(self._timeline.set_status)

    def _new_wire(self, address: str) -> Wire:
        """A wire at this address; a later client can reopen it if the cluster may outlive this one."""
        keeper = self.processes.keeper
        if keeper is None:
            return Wire(address)
        wire = Wire(address, keeper.notes.get("wire"))
        if "wire" not in keeper.notes:
            keeper.note(wire=wire.keys())
        return wire

    def _create_membership(self) -> Membership:
        made = self._members = Membership(self.processes, self.wire, self._config.backend, self.clocks)
        made.on_joined, made.on_lost = self._remember, self._on_lost
        return made

    def _remember(self) -> None:
        """Stores what a later client must know; called whenever ranks have joined."""
        keeper = self.processes.keeper
        if keeper is not None:
            keeper.note(**self._config.notes(), **self._notes, joined=self.members.joined)

    def _take_batch(self, batch: Batch) -> None:
        """On the wire's thread: events of all hosts are stored on one time axis."""
        self._timeline.extend(batch if self.clocks is None else self.clocks.placed(batch))


def _started(part: _Part | None) -> _Part:
    if part is None:
        raise ClusterError("the cluster is still starting")
    return part


def _missed_cells(described: Mapping[int, RankDescription]) -> tuple[MissedCell, ...]:
    cells: dict[str, dict[int, LastCell]] = {}
    for rank, answer in sorted(described.items()):
        if answer.cell is not None:
            cells.setdefault(answer.cell.id, {})[rank] = answer.cell
    made = []
    for last in cells.values():
        ends = [cell.ended or described[rank].now for rank, cell in last.items()]
        made.append(
            MissedCell(
                label=next(iter(last.values())).label,
                ranks=tuple(last),
                running=tuple(rank for rank, cell in last.items() if cell.ended is None),
                errors={rank: cell.error for rank, cell in last.items() if cell.error},
                seconds=max(ends) - min(cell.began for cell in last.values()),
                text={rank: described[rank].text for rank in last if described[rank].text},
            )
        )
    return tuple(made)
