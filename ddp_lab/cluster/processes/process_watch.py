"""What happens to a cluster's processes while a cell is waited for.

A message to or from a rank is lost if its connection breaks on the way. So a rank that has connected again is asked
about the cell. If it repeatedly runs no cell, and has not run this one, it is sent it again (it would refuse to run a
cell twice, see `ddp_lab.engine.cells.cell.run`). One that has run it and has not answered never will: how the cell
ended there is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ...control.wire import Wire
from ...errors import ClusterError
from ...protocol.messages import Activity
from .startup import Processes

_HINDERED_SECONDS = 1.0  # between two checks whether a process can continue
_LOOK_SECONDS = 1.0  # between two pings to the ranks
_AGAIN, _LOOKS = 3, 15  # without a cell, after which a request is sent again, and an answer counts as lost


@dataclass(frozen=True)
class News:
    """What has happened to the processes.

    Attributes:
        lines: messages for all ranks.
        again: ranks to which the cell must be sent again.
        lost: ranks of which the outcome of the cell is lost.
    """

    lines: Sequence[str] = ()
    again: Collection[int] = ()
    lost: Collection[int] = ()


class ProcessWatch:
    """Monitors the processes while one cell is waited for; made before it is sent, used by one thread.

    Args:
        processes: of the cluster.
        wire: to the ranks.
        ask: returns the ranks' immediate answers to a ping, by rank.
    """

    def __init__(
        self,
        processes: Processes,
        wire: Wire,
        ask: Callable[[Collection[int]], Mapping[int, Activity]],
    ) -> None:
        self._processes, self._wire, self._ask = processes, wire, ask
        self._connections = wire.connections()
        self._ends = processes.controller_ends
        self._told: set[str] = set()
        self._next = self._next_question = 0.0
        self._without: dict[int, int] = {}  # rank -> how often it ran no cell

    def look(self, cell: str, ranks: Collection[int]) -> News:
        """What has happened since the last check.

        Args:
            cell: id of the cell.
            ranks: those that have not answered yet, and that wait for no other cell.
        """
        now = time.monotonic()
        new = self._new_controllers()
        if now >= self._next:
            self._next = now + _HINDERED_SECONDS
            new += self._once(self._processes.hindered())
        connections = self._wire.connections()
        again = [rank for rank in ranks if connections.get(rank, 0) > self._connections.get(rank, 1)]
        if not again or now < self._next_question:
            return News(new)
        self._next_question = now + _LOOK_SECONDS
        return News(new, *self._missed(cell, again))

    def _new_controllers(self) -> list[str]:
        """A line on each controller that has ended since the last check."""
        try:
            ends = self._processes.look_after()
        except ClusterError as error:
            return self._once([f"{error}. The ranks continue, but can't rejoin: `%cluster restart` starts new ones"])
        new, self._ends = ends[self._ends :], len(ends)
        return [f"{end}. The controller was restarted. The ranks continue" for end in new]

    def _once(self, lines: Sequence[str]) -> list[str]:
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def _missed(self, cell: str, ranks: Collection[int]) -> tuple[Collection[int], Collection[int]]:
        """The ranks that did not receive the cell, and those whose answer is lost."""
        again, lost = [], []
        for rank, answer in self._ask(ranks).items():
            if answer.cell is not None:
                self._without[rank] = 0
                continue
            self._without[rank] = looks = self._without.get(rank, 0) + 1
            if looks == _AGAIN and answer.last != cell:
                again.append(rank)
            elif looks == _LOOKS:
                lost.append(rank)
        return again, lost
