"""What a test may leave behind: processes, threads, TCP sockets, shared memory, files of clusters."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

# Inherited by every process that a test starts, so that one is found even if its parent is gone.
MARK = "DDP_LAB_TEST_SESSION"


@dataclass(frozen=True)
class Belongings:
    """What is there at one moment; each entry names itself."""

    processes: frozenset[str]
    threads: frozenset[str]
    sockets: frozenset[str]
    shared_memory: frozenset[str]
    directories: frozenset[str]
    elsewhere: frozenset[str]  # of the shared memory, what somebody else seems to have

    def __sub__(self, other: Belongings) -> dict[str, list[str]]:
        """What is here now, was nowhere then, and is nobody else's."""
        found = {}
        for field in fields(self):
            more = getattr(self, field.name) - getattr(other, field.name) - self.elsewhere
            if more and field.name != "elsewhere":
                found[field.name] = sorted(more)
        return found


def look(sockets: bool = True) -> Belongings:
    """What belongs to this test session now.

    Args:
        sockets: whether to look at this process's sockets: a connected cluster opens and closes them as it likes.
    """
    ours = processes()
    segments = frozenset(os.listdir("/dev/shm"))
    return Belongings(
        processes=frozenset(f"{pid}: {command}" for pid, command in ours.items()),
        threads=frozenset(
            f"{thread.name} ({thread.ident})"
            for thread in threading.enumerate()
            # pyzmq keeps one for the process's life, from its first message of more than 64 KiB on. A dummy is Python's
            # note of a thread that others began, for example of pytest-xdist: from its first `current_thread()` on.
            if type(thread).__module__ != "zmq.utils.garbage" and not isinstance(thread, threading._DummyThread)
        ),
        sockets=frozenset(_tcp_sockets() if sockets else ()),
        shared_memory=segments,
        directories=frozenset(_directories({os.getpid(), *ours})),
        elsewhere=frozenset(_elsewhere(segments, {os.getpid(), *ours})),
    )


def processes() -> dict[int, str]:
    """Process id -> command of every living process that this session started, directly or not."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if command and "multiprocessing.resource_tracker" not in command:
            found[int(entry.name)] = command.strip()
    return found


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not, but one of whose threads only the first has ended does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Polls until `condition` holds; returns after how many seconds it did, fails after `seconds`."""
    begin = time.monotonic()
    while not condition():
        elapsed = time.monotonic() - begin
        assert elapsed < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - begin


def _elsewhere(segments: frozenset[str], ours: set[int]) -> set[str]:
    """Segments that a living process of somebody else has mapped: those are nobody's business here.

    So are semaphores of `multiprocessing` while somebody else's tracker lives: it removes those of killed processes.
    """
    found: set[str] = set()
    others = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) not in ours)
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in others if segments else ():
        with contextlib.suppress(OSError):  # ended meanwhile
            found |= segments & set(re.findall(r"/dev/shm/(\S+)", (entry / "maps").read_text()))
            tracks = b"multiprocessing.resource_tracker" in (entry / "cmdline").read_bytes()
            if tracks and mark not in (entry / "environ").read_bytes().split(b"\0"):
                found |= {name for name in segments if name.startswith("sem.mp-")}
    return found


def _directories(ours: set[int]) -> list[str]:
    """Directories of clusters whose client is one of these processes, or gone."""
    found = Path(tempfile.gettempdir()).glob("ddp_lab-[0-9]*-*")
    owners = {str(path): int(path.name.split("-")[1]) for path in found}
    return [path for path, owner in owners.items() if owner in ours or not alive(owner)]


def _tcp_sockets() -> list[str]:
    """This process's."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return [f"{line.split()[1]} -> {line.split()[2]}" for line in lines if line.split()[9] in own]
