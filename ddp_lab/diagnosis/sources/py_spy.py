"""Processes of this host, seen by py-spy: which of them wait in a collective, at which line, and what the others do.

[Note: a rank that does not run]
A rank that trains is often seen in the same line, because it waits there in each step. One that hangs does not run at
all between two looks: the system counts how often a thread has waited for something and then continued, and the count
of its main thread stays the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ... import machine
from ...documentation import with_help
from ...errors import DdpLabError
from ..snapshot import Place, RankSnapshot
from ..stacks import place, snapshot_of_stack

__all__ = ["SpiedProcesses"]

_SPY_S = 30.0
_HOW_TO_GET = "`pip install py-spy` in the environment of ddp-lab installs it"
_PERMIT = "run the command as the processes' user, or with `sudo -E`"


class SpiedProcesses:
    """The ranks of a job on this host.

    Args:
        pids: of ranks, or of what started them (torchrun): then its children that are ranks.
        seconds: between two looks at each rank; one that has run meanwhile does not wait.

    Raises:
        DdpLabError: py-spy is missing, a process does not exist or is no rank.
    """

    def __init__(self, pids: Sequence[int], seconds: float) -> None:
        self._spy = _py_spy()
        self._ranks, self._seconds = _ranks_of(pids), seconds

    def snapshots(self) -> list[RankSnapshot]:
        """Looks at each rank twice.

        Raises:
            DdpLabError: py-spy may not, or can't, read a process.
        """
        first = {rank: self._stack(pid) for rank, pid in self._ranks.items()}
        before = {rank: _switches(pid) for rank, pid in self._ranks.items()}
        time.sleep(self._seconds)
        after = {rank: _switches(pid) for rank, pid in self._ranks.items()}
        found = []
        for rank, pid in sorted(self._ranks.items()):
            if not psutil.pid_exists(pid):
                found.append(RankSnapshot(rank, "lost", why="its process exited meanwhile", runs="script"))
            elif machine.stopped(pid):
                found.append(RankSnapshot(rank, "stopped", why=f"kill -CONT {pid}", runs="script"))
            else:
                stack, native = self._stack(pid)
                same = [one.line for one in stack] == [one.line for one in first[rank][0]]
                blocked = same and before[rank] == after[rank]
                found.append(snapshot_of_stack(rank, stack, (), native, blocked))
        return found

    def _stack(self, pid: int) -> tuple[list[Place], list[str] | None]:
        """The main thread's Python frames, innermost first, and the C++ functions below them; None if unknown."""
        try:
            threads, native = self._dump(pid, "--native"), True
        except DdpLabError:  # for example on a processor that py-spy can't unwind
            threads, native = self._dump(pid), False
        main = next((one for one in threads if one.get("os_thread_id") == pid), threads[0] if threads else None)
        frames = main["frames"] if main is not None else []
        python = [place(one["filename"], int(one["line"]), one["name"]) for one in frames if _is_python(one)]
        below: list[str] = []
        for one in frames:
            if _is_python(one):
                break
            below.append(f"{one['name']} {one.get('module') or ''}")
        return python, below if native else None

    def _dump(self, pid: int, *options: str) -> list[dict[str, Any]]:
        command = [self._spy, "dump", "--json", *options, "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DdpLabError(f"py-spy can't read process {pid}: {error}") from error
        if done.returncode == 0:
            threads: list[dict[str, Any]] = json.loads(done.stdout)
            return threads
        why = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}").removeprefix("Error: ")
        if "ermission" in done.stderr or "ptrace" in done.stderr.lower():
            raise DdpLabError(with_help(f"py-spy may not read process {pid} ({why}): {_PERMIT}", "py-spy-permission"))
        raise DdpLabError(f"py-spy can't read process {pid}: {why}")


def _is_python(frame: dict[str, Any]) -> bool:
    return str(frame["filename"]).endswith(".py") or str(frame["filename"]).startswith("<")


def _py_spy() -> str:
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise DdpLabError(f"py-spy, which reads the stacks of other processes, is not installed: {_HOW_TO_GET}")
    return found


def _switches(pid: int) -> str:
    """How often the main thread has waited and continued; "" if it has ended."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except OSError:
        return ""
    return next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


def _ranks_of(pids: Sequence[int]) -> dict[int, int]:
    """Rank -> process."""
    found: dict[int, int] = {}
    for number, pid in enumerate(pids):
        try:
            process = psutil.Process(pid)
            ranks = _below(process)
        except psutil.NoSuchProcess as error:
            raise DdpLabError(f"there is no process {error.pid}") from error
        except psutil.AccessDenied as error:
            raise DdpLabError(f"the environment of process {error.pid} can't be read: {_PERMIT}") from error
        if not ranks and process.children():
            raise DdpLabError(f"process {pid} and its children are not ranks: none has the variable RANK")
        for rank, one in ranks or [(number, pid)]:
            found[rank] = one
    return found


def _below(process: psutil.Process) -> list[tuple[int, int]]:
    """Rank and process of a rank, or of the ranks that it started; their own children have the same variables."""
    rank = process.environ().get("RANK", "")
    if rank.isdigit():
        return [(int(rank), process.pid)]
    return [each for child in process.children() for each in _below(child)]
