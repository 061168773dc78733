"""The state of the processes between a waiting cell and its ranks: the controller and the keeper.

See [Note: a controller that was killed] in `ddp_lab.cluster.processes.startup`. Its successor forwards what client and
engines send from then on; messages inside the killed process are lost. So the ranks are asked after that. A rank that
repeatedly runs no cell, and has not run this one, is sent it again (it would refuse to run a cell twice, see
`ddp_lab.engine.cells.cell.run`). One that has run it and has not answered never will: how the cell ended there is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ClusterError
from .startup import Processes, Succession

_HINDERED_SECONDS = 1.0  # between two checks whether a process can continue
_LOOK_SECONDS = 1.0  # between two pings to the ranks
_AGAIN, _LOOKS = 3, 15  # without a cell, after which a request is sent again, and an answer counts as lost


@dataclass(frozen=True)
class News:
    """What has happened to the processes.

    Attributes:
        lines: messages for all ranks.
        again: ranks to which the cell must be sent again.
        lost: rank -> why the outcome of its cell is lost.
    """

    lines: Sequence[str] = ()
    again: Collection[int] = ()
    lost: Mapping[int, str] = field(default_factory=dict)


class ProcessWatch:
    """Monitors the processes while one cell is waited for; made when it is sent, used by one thread.

    Args:
        processes: of the cluster.
        ask: returns the ranks' immediate answers to a ping, by rank.
    """

    def __init__(
        self,
        processes: Processes,
        ask: Callable[[Collection[int]], Mapping[int, Mapping[str, Any]]],
    ) -> None:
        self._processes, self._ask = processes, ask
        self._ends = self._before = processes.controller_ends
        self._told: set[str] = set()
        self._next = self._next_question = 0.0
        self._without: dict[int, int] = {}  # rank -> how often it ran no cell

    def look(self, cell: str, ranks: Collection[int]) -> News:
        """What has happened since the last check.

        Args:
            cell: id of the cell.
            ranks: those that have not answered yet, and that wait for no other cell.
        """
        lines = []
        try:
            succession = self._processes.look_after()
        except ClusterError as error:
            return News(lost=dict.fromkeys(ranks, f"can't be reached: {error}; use `%cluster restart`"))
        if len(succession.ends) > self._ends:
            self._ends = len(succession.ends)
            self._without.clear()
            lines.append(
                f"{succession.ends[-1]}. The controller was restarted. The ranks continue; output printed "
                "in the meantime may be missing"
            )
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _HINDERED_SECONDS
            new = [line for line in self._processes.hindered() if line not in self._told]
            self._told.update(new)
            lines += new
        if self._ends == self._before or not succession.answers or now < self._next_question:
            return News(lines)
        self._next_question = now + _LOOK_SECONDS
        return News(lines, *self._missed(cell, ranks, succession))

    def _missed(
        self, cell: str, ranks: Collection[int], succession: Succession
    ) -> tuple[Collection[int], Mapping[int, str]]:
        """The ranks that did not receive the cell, and those whose answer is lost."""
        again, lost = [], {}
        for rank, answer in self._ask(ranks).items():
            if answer.get("cell") is not None:
                self._without[rank] = 0
                continue
            self._without[rank] = looks = self._without.get(rank, 0) + 1
            if looks == _AGAIN and answer.get("last") != cell:
                again.append(rank)
            elif looks == _LOOKS:
                lost[rank] = f"finished the cell, but its result was lost: {succession.ends[-1]}"
        return again, lost
