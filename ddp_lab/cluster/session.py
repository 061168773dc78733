"""A cluster that runs: its processes, the wire to its ranks and what is known of them.

One thread opens, closes and lets go: the one that starts and stops the cluster, or the keeper's reader when another
client takes the cluster over. What the parts do meanwhile is guarded by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import machine
from ..control.wire import Wire
from ..errors import ClusterError
from ..formatting import label_of
from ..protocol.events import Batch
from ..timeline.clocks import HostClocks
from .membership import Membership
from .processes.host_processes import HostProcesses
from .processes.startup import Processes, Progress, ignore

if TYPE_CHECKING:
    from ..timeline.timeline import Timeline
    from .config import ClusterConfig
    from .processes.keeper import Keeper


_LAST_LINES = 10
_HELLO_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_PARTING_SECONDS = 2.0  # that what was said last may take to leave


@dataclass(frozen=True)
class LeftCell:
    """A cell that ran on while no client was attached.

    Attributes:
        label: its name.
        ranks: those that were given it.
        running: those on which it still runs.
        errors: rank -> what it failed with.
        seconds: since it began; of one that has ended, that it took.
        text: rank -> the end of what it has printed, at most 8,192 characters.
    """

    label: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    errors: dict[int, str]
    seconds: float
    text: dict[int, str]

    def __str__(self) -> str:
        if self.running:
            head = f"{self.label} still runs on {label_of(self.running)}, for {self.seconds:.0f} s"
        else:
            head = f"{self.label} ended on {label_of(self.ranks)} after {self.seconds:.1f} s"
        lines = [head, *(f"  rank {rank}: {error}" for rank, error in self.errors.items())]
        for rank, text in self.text.items():
            lines += [f"[rank {rank}] {line}" for line in text.splitlines()[-_LAST_LINES:]]
        return "\n".join(lines)


class Session:
    """From the start of a cluster, or from attaching to it, until it is stopped or let go.

    Args:
        config: what was asked for.
        keeper: of a detached cluster.
        timeline: takes events, descriptions and what ranks say of themselves.
        on_lost: called before ranks get new processes: rank -> how the former ones ended.
        notes: what a later client has to know besides the session's own.

    Attributes:
        owner: the process that has it; a child that was forked from it has not.
        processes: controller, fork server and engines.
        clocks: of ranks on several hosts; None: one clock serves all.
        left: rank -> what it said, when this client attached, of the cell that it ran while nobody was attached.
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
        self.left: dict[int, dict[str, Any]] = {}
        self._config, self._timeline, self._on_lost, self._notes = config, timeline, on_lost, notes
        self._wire: Wire | None = None
        self._members: Membership | None = None

    @property
    def starting(self) -> bool:
        """Whether its ranks have not joined yet."""
        return self._members is None

    @property
    def wire(self) -> Wire:
        """The channel for events and control.

        Raises:
            ClusterError: the cluster is still starting.
        """
        if self._wire is None:
            raise ClusterError("the cluster is still starting")
        return self._wire

    @property
    def members(self) -> Membership:
        """Its ranks.

        Raises:
            ClusterError: the cluster is still starting.
        """
        if self._members is None:
            raise ClusterError("the cluster is still starting")
        return self._members

    def open(self, progress: Progress) -> None:
        """Starts the processes and joins the ranks.

        Raises:
            ClusterError: a rank failed to start; the message holds the end of its log.
        """
        self._listen(progress)
        self.processes.open(progress)
        self._meet().join(progress)

    def open_again(self, keeper: Keeper) -> None:
        """Connects to a cluster that runs, and asks its ranks what they do."""
        self._listen(ignore)
        members = self._meet()
        self.processes.open_again({int(rank): engine for rank, engine in keeper.notes["engine_of_rank"].items()})
        servers = self.processes.fork_server
        living = [rank for rank in servers.pids if rank not in servers.exits and not members.is_stopped(rank)]
        self.wire.wait_connected(living, _HELLO_SECONDS)
        answers = self.wire.request(living, "introduce", _ANSWER_SECONDS)
        told = {rank: answer for rank, answer in answers.items() if answer.get("cell")}
        running = {rank: answer["cell"]["id"] for rank, answer in told.items() if answer["cell"]["ended"] is None}
        members.adopt({int(rank): found for rank, found in keeper.notes["joined"].items()}, running)
        self.left = {rank: answer for rank, answer in told.items() if _is_news(answer, keeper.alone_since)}

    def ask_left(self) -> tuple[LeftCell, ...]:
        """The cells that ran while nobody was attached, as they are now, by what each rank says of its last one."""
        if self.left:
            for rank, answer in self.wire.request(self.left, "last_cell", _ANSWER_SECONDS).items():
                if answer["cell"]["id"] == self.left[rank]["cell"]["id"]:
                    self.left[rank] = answer
        return _left_cells(self.left)

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

    def let_go(self, why: str) -> None:
        """Leaves a detached cluster to its keeper; cells that are waited for here end with `why`."""
        if self._members is not None:
            self._members.give_up(why)
        if self._wire is not None:
            # Before the keeper is left: then the next client may listen in its place. An interrupt still leaves.
            self._wire.close(_PARTING_SECONDS)
        self.processes.fork_server.on_exit = None
        self.processes.leave()

    def _listen(self, progress: Progress) -> None:
        wire = self._wire = self._new_wire(self.processes.reach(progress))
        if self._config.hosts is not None:
            self.clocks = HostClocks(wire, self.processes.clocks, machine.host_clock(), self._timeline.set_status)
        wire.on_batch(self._take_batch)
        wire.on_description(self._timeline.describe)
        wire.on_status(self._timeline.set_status)

    def _new_wire(self, address: str) -> Wire:
        """A wire at this address; one that a later client can have again where the cluster may outlive this one."""
        keeper = self.processes.keeper
        if keeper is None:
            return Wire(address)
        wire = Wire(address, keeper.notes.get("wire"))
        if "wire" not in keeper.notes:
            keeper.note(wire=wire.keys())
        return wire

    def _meet(self) -> Membership:
        made = self._members = Membership(self.processes, self.wire, self._config.backend, self.clocks)
        made.on_joined, made.on_lost = self._remember, self._on_lost
        return made

    def _remember(self) -> None:
        """Leaves for a later client what it has to know; called whenever ranks have joined."""
        keeper = self.processes.keeper
        if keeper is not None:
            own = {"engine_of_rank": self.processes.engine_of_rank, "joined": self.members.joined}
            keeper.note(**self._config.notes(), **self._notes, **own)

    def _take_batch(self, batch: Batch) -> None:
        """On the wire's thread: events of all hosts are stored on one time axis."""
        self._timeline.extend(batch if self.clocks is None else self.clocks.placed(batch))


def _is_news(answer: Mapping[str, Any], alone_since: float) -> bool:
    """Whether a rank's last cell runs, or has ended since the last client left."""
    return answer["cell"]["ended"] is None or bool(answer["cell"]["ended"] >= alone_since)


def _left_cells(told: Mapping[int, Mapping[str, Any]]) -> tuple[LeftCell, ...]:
    cells: dict[str, list[int]] = {}
    for rank, answer in sorted(told.items()):
        cells.setdefault(answer["cell"]["id"], []).append(rank)
    made = []
    for ranks in cells.values():
        found = {rank: told[rank]["cell"] for rank in ranks}
        ends = [cell["ended"] or told[rank]["now"] for rank, cell in found.items()]
        made.append(
            LeftCell(
                label=found[ranks[0]]["label"],
                ranks=tuple(ranks),
                running=tuple(rank for rank, cell in found.items() if cell["ended"] is None),
                errors={rank: cell["error"] for rank, cell in found.items() if cell["error"]},
                seconds=max(ends) - min(cell["began"] for cell in found.values()),
                text={rank: text for rank in ranks if (text := told[rank]["text"])},
            )
        )
    return tuple(made)
