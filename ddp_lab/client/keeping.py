"""What Cluster does to outlive its notebook: find, detach, and what happened meanwhile.

The processes are `ddp_lab.client.detached`'s matter, see [Note: who keeps a cluster] there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..registry import is_name
from .detached import DetachedCluster, Keeper, detached_clusters, free_name
from .devices import Placement
from .membership import Membership
from .rank_sets import label_of
from .startup import Processes
from .wire import Wire

if TYPE_CHECKING:
    from .cluster import Cluster
    from .runs import Runs

__all__ = ["Keeping", "LeftCell"]

_HELLO_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_LAST_LINES = 10


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


class Keeping:
    """The part of Cluster that lets its processes outlive this one."""

    name: str | None
    lease_seconds: float
    _told: dict[int, dict[str, Any]]  # what ranks said of the cells that an earlier client left
    _detach: bool
    _backend: str
    _owner: int
    _placement: Placement
    _processes: Processes | None
    _wire: Wire | None
    _members: Membership | None
    watch_seconds: float | None
    results: Runs

    @classmethod
    def find(cls, name: str | None = None, *, take_over: bool = False) -> Cluster:
        """Attaches to a detached cluster of this user on this machine; the ranks, their variables and cells are as
        they were.

        `left` then says what has run meanwhile. A cell that still runs can be interrupted; the next cell has to wait
        for its end.

        Args:
            name: which; None for the only one.
            take_over: send a client away that is attached: its cells go on, but it hears nothing of them any more.

        Raises:
            ClusterError: there is no such cluster, a client is attached, or this process runs another one of its name.

        Example:
            lab = ddp_lab.Cluster.find("train")
            lab.pull("loss")
        """
        keeper = Keeper.find(name, take_over)
        try:
            cluster = cls._of(keeper.notes)
            cluster.name, cluster.lease_seconds = keeper.name, keeper.lease_seconds
            cluster._check_only_one(detached=True)
        except BaseException:
            keeper.leave()
            raise
        cluster._open_again(keeper)
        return cluster

    @classmethod
    def _of(cls, notes: Mapping[str, Any]) -> Cluster:
        """A cluster that was placed as the notes say."""
        from .. import __version__

        if notes.get("version") != __version__:
            raise ClusterError(
                f"the cluster was started by ddp_lab {notes.get('version')}, this is {__version__}: find it with that "
                "version, or let its lease run out"
            )
        placed = notes["placement"]
        environments = {int(rank): variables for rank, variables in placed["rank_environments"].items()}
        make: Any = cls
        cluster: Cluster = make(1, backend="gloo", watch_seconds=notes["watch_seconds"], detach=True)
        cluster._backend = notes["backend"]
        cluster._placement = Placement(
            placed["world_size"], tuple(placed["devices"]), placed["environment"], environments
        )
        return cluster

    @property
    def left(self) -> tuple[LeftCell, ...]:
        """The cells that ran on while nobody was attached, as they are now; empty but for a cluster that was found."""
        if self._told and self._wire is not None:
            for rank, answer in self._wire.request(self._told, "last_cell", _ANSWER_SECONDS).items():
                if answer["cell"]["id"] == self._told[rank]["cell"]["id"]:
                    self._told[rank] = answer
        return _left(self._told)

    @staticmethod
    def detached() -> list[DetachedCluster]:
        """This user's detached clusters on this machine: name, ranks, who is attached, how long they live."""
        return detached_clusters()

    def detach(self) -> None:
        """Lets go of a cluster that was started with ``detach=True``: its ranks and their cells go on without us.

        Cells that are waited for here end with an error; on the ranks they run on.

        Raises:
            ClusterError: it does not run, or was not started so.
        """
        if self._processes is None:
            raise ClusterError("the cluster does not run")
        if self._processes.keeper is None:
            raise ClusterError(
                "only a cluster started with detach=True (`%cluster start --detach`) outlives this process"
            )
        if self._owner == os.getpid():
            self._let_go(f"went on without this process (`%cluster attach {self.name}` finds the cluster again)")

    def _keeper(self) -> Keeper | None:
        """For a new cluster."""
        if not self._detach:
            return None
        self.name = self.name or free_name()
        return Keeper.start(self.name, self.lease_seconds, self._placement.environment)

    def _new_wire(self, address: str) -> Wire:
        """A wire at this address; one that a later client can have again where the cluster may outlive this one."""
        keeper = self._processes.keeper if self._processes is not None else None
        if keeper is None:
            return Wire(address)
        wire = Wire(address, keeper.notes.get("wire"))
        if "wire" not in keeper.notes:
            keeper.note(wire=wire.keys())
        return wire

    def _remember(self) -> None:
        """Leaves for a later client what it has to know; called whenever ranks have joined."""
        from .. import __version__

        processes, members = self._processes, self._members
        if processes is None or members is None or processes.keeper is None:
            return
        processes.keeper.on_taken = self._taken
        processes.keeper.note(
            version=__version__,
            world_size=self._placement.world_size,
            placement=asdict(self._placement),
            backend=self._backend,
            watch_seconds=self.watch_seconds,
            engine_of_rank=processes.engine_of_rank,
            joined=members.joined,
        )

    def _open_again(self, keeper: Keeper) -> None:
        """Connects to a cluster that runs, and asks its ranks what they do."""
        self._owner = os.getpid()
        processes = self._processes = Processes(self._placement, keeper)
        try:
            self._listen()
            assert self._wire is not None
            self._members = Membership(processes, self._wire, self._backend)
            processes.open_again({int(rank): engine for rank, engine in keeper.notes["engine_of_rank"].items()})
            living = [
                rank
                for rank in processes.fork_server.pids
                if rank not in processes.fork_server.exits and not self._members.is_stopped(rank)
            ]
            self._wire.wait_connected(living, _HELLO_SECONDS)
            answers = self._wire.request(living, "introduce", _ANSWER_SECONDS)
            told = {rank: answer for rank, answer in answers.items() if answer.get("cell")}
            running = {rank: answer["cell"]["id"] for rank, answer in told.items() if answer["cell"]["ended"] is None}
            self._members.adopt({int(rank): found for rank, found in keeper.notes["joined"].items()}, running)
            self._members.on_joined, self._members.on_lost = self._remember, self.results.give_up
            keeper.on_taken = self._taken
            self._told = {rank: answer for rank, answer in told.items() if _is_news(answer, keeper.alone_since)}
        except BaseException:
            self._let_go("could not be attached to")
            raise
        self._is_up()

    def _taken(self, by: int) -> None:
        """On the keeper's reader thread: another client has the cluster now."""
        self._let_go(f"passed to process {by}, which took the cluster over")

    def _let_go(self, why: str) -> None:
        processes, wire, members = self._processes, self._wire, self._members
        self._processes = self._wire = self._members = None
        if members is not None:
            members.give_up(why)
        if wire is not None:
            wire.close()  # before the keeper is left: then the next client may listen in its place
        if processes is not None:
            processes.fork_server.on_exit = None
            processes.leave()
        self._is_down()

    def _listen(self) -> None:
        raise NotImplementedError

    def _is_up(self) -> None:
        raise NotImplementedError

    def _is_down(self) -> None:
        raise NotImplementedError


def check_name(name: str | None, lease_seconds: float) -> None:
    """Raises `ValueError` where these make no sense."""
    if name is not None and not is_name(name):
        raise ValueError(f"name={name!r}: letters, digits, '.', '_' and '-', at most 64")
    if not 0 < lease_seconds < float("inf"):
        raise ValueError(f"lease_seconds={lease_seconds}: give a time in seconds")


def _is_news(answer: Mapping[str, Any], alone_since: float) -> bool:
    """Whether a rank's last cell runs, or has ended since the last client left."""
    return answer["cell"]["ended"] is None or bool(answer["cell"]["ended"] >= alone_since)


def _left(told: Mapping[int, Mapping[str, Any]]) -> tuple[LeftCell, ...]:
    """The cells by what each rank says of its last one."""
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
