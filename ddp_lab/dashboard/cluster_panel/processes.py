"""CPU and memory of the ranks' processes, as the operating system reports them."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from ...control.records import RankRecord

__all__ = ["ProcessUse", "ProcessWatch"]


@dataclass(frozen=True)
class ProcessUse:
    """CPU and memory of a rank's process.

    Attributes:
        cpu_percent: CPU time since the last reading, in percent of one core; above 100 if threads used several cores.
            None at the first reading.
        memory: resident bytes, including shared pages.
        stopped: whether a signal (SIGSTOP) has suspended it.
    """

    cpu_percent: float | None
    memory: int
    stopped: bool


class ProcessWatch:
    """Reads CPU and memory of processes on this machine repeatedly."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._known: dict[int, psutil.Process] = {}

    def look(self, records: Iterable[RankRecord]) -> dict[int, ProcessUse]:
        """rank -> its process, for the ranks on this machine whose process exists."""
        here = {record.rank: record.pid for record in records if record.pid and record.host == self._host}
        self._known = {pid: process for pid, process in self._known.items() if pid in here.values()}
        found = {}
        for rank, pid in here.items():
            try:
                found[rank] = self._use(pid)
            except psutil.Error:  # it has exited
                self._known.pop(pid, None)
        return found

    def _use(self, pid: int) -> ProcessUse:
        first = pid not in self._known
        process = self._known.setdefault(pid, psutil.Process(pid)) if first else self._known[pid]
        with process.oneshot():
            percent, status = process.cpu_percent(), process.status()
            if status == psutil.STATUS_ZOMBIE:
                raise psutil.ZombieProcess(pid)
            memory = process.memory_info().rss
        return ProcessUse(None if first else percent, memory, status == psutil.STATUS_STOPPED)
