"""What the ranks of this machine recorded last, also those that have died: see [Note: what a dead rank leaves].

Each rank records into a file in memory of its own. The client opens that when the rank has joined, through /proc, and
so keeps it when the rank's process ends. After a cell whose ranks were killed, or lost each other, it compares what
each rank entered last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..diagnostics.calls import Diagnosis
from ..errors import RankFailure
from ..protocol import black_box
from ..timeline.recorded.ends import cause_of
from .cells.failures import LOST, is_communication

__all__ = ["BlackBoxes"]

_FINISHED, _ENDED, _RUNNING = (
    ("finished", "finished the cell"),
    ("ended", "ended with the cell"),
    ("running", "runs the cell"),
)


class BlackBoxes:
    """Opened files: rank -> process id, descriptor. Ranks on other hosts, and those that allow no files in memory, have
    none."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}

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
