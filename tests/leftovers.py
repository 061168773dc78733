"""What a test may leave behind: processes, threads, TCP sockets, shared memory, files of clusters.

Each is found by a mark of this test session, so that nothing that others do on the machine counts: processes inherit a
variable, folders and shared memory carry a process's id or a prefix of ours in their names, or a process of ours has
mapped them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from multiprocessing import process as multiprocessing_process
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

# Inherited by every process that a test starts, so that one is found even if its parent is gone.
MARK = "DDP_LAB_TEST_SESSION"
_SUITE = "DDP_LAB_TEST_SUITE"  # the same for all workers of one run
_SHARED = Path("/dev/shm")
_OWNER = re.compile(r"(?:torch_|ddp_lab-)(\d+)")

_seen: set[int] = set()  # ids of processes that were ours once
_begun = time.time()  # this module is imported before the first test


@dataclass(frozen=True)
class Belongings:
    """What is there at one moment; each entry names itself."""

    processes: frozenset[str]
    threads: frozenset[str]
    sockets: frozenset[str]
    shared_memory: frozenset[str]
    directories: frozenset[str]

    def __sub__(self, other: Belongings) -> dict[str, list[str]]:
        """What is here now, and was nowhere then."""
        pairs = {field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)}
        return {name: sorted(more) for name, more in pairs.items() if more}


def mark() -> None:
    """Begins a test session: what this process and its descendants make from now on is its own."""
    os.environ[MARK] = str(os.getpid())
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[_SUITE] = str(os.getpid())
    # The names of semaphores begin so, here and in processes that multiprocessing starts.
    multiprocessing_process.current_process()._config["semprefix"] = f"/{_prefix()}"  # type: ignore[attr-defined]


def look(sockets: bool = True) -> Belongings:
    """What belongs to this test session now.

    Args:
        sockets: whether to look at this process's sockets: a connected cluster opens and closes them as it likes.
    """
    ours = _processes()
    return Belongings(
        processes=frozenset(f"{pid}: {command}{_test_of(pid)}" for pid, command in _commands(ours).items()),
        threads=frozenset(
            f"{thread.name} ({thread.ident})"
            for thread in threading.enumerate()
            # pyzmq keeps one for the process's life, from its first message of more than 64 KiB on. A dummy is Python's
            # note of a thread that others began, for example of pytest-xdist: from its first `current_thread()` on.
            if type(thread).__module__ != "zmq.utils.garbage" and not isinstance(thread, threading._DummyThread)
        ),
        sockets=frozenset(_tcp_sockets() if sockets else ()),
        shared_memory=frozenset(_shared_memory({os.getpid(), *ours})),
        directories=frozenset(_directories({os.getpid(), *ours})),
    )


def nothing_more_than_before(sockets: bool = True) -> Iterator[None]:
    """Fails if there is more when it is resumed than there was when it was started."""
    before = look(sockets)
    yield
    more = left_since(before, sockets)
    if more:
        pytest.fail(f"left behind: {more}")


def left_since(before: Belongings, sockets: bool = True) -> dict[str, list[str]]:
    """What is still there, and was not before, when all had time to end."""
    try:
        wait_until(lambda: not look(sockets) - before, "")
    except AssertionError:
        return look(sockets) - before
    return {}


def end_tracker() -> None:
    """Lets multiprocessing remove the semaphores of processes that were killed, as it does when this process ends."""
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None


def end_processes() -> None:
    """Asks all that the suite has started to end: once it was interrupted, no test does."""
    for pid in _processes(_SUITE):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def left_by_workers() -> list[str]:
    """Processes of this run that are still there when its workers, also one that crashed, have had time to end."""

    def look_again() -> list[str]:
        return [f"processes: {pid}: {command}{_test_of(pid)}" for pid, command in _commands(_processes(_SUITE)).items()]

    try:
        wait_until(lambda: not look_again(), "")
    except AssertionError:
        return look_again()
    return []


def processes() -> dict[int, str]:
    """Process id -> command of every living process that this session started, directly or not."""
    return _commands(_processes())


def _processes(variable: str = MARK) -> set[int]:
    """Ids of this session's processes, and of trackers of multiprocessing that remove what killed ones leave."""
    mark = f"{variable}={os.environ[variable]}".encode()
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != os.getpid() and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found |= {int(name)} if not _serves_all_tests(int(name)) else set()
        except OSError:  # ended meanwhile, or somebody else's
            continue
    _seen.update(found)
    return found


def _serves_all_tests(pid: int) -> bool:
    """Whether it is a zygote that this process has started: it ends with this process."""
    parent = _read(pid, "stat").rpartition(")")[2].split()[1:2]
    return ".processes.zygote\0" in _read(pid, "cmdline") and parent == [str(os.getpid())]


def _commands(pids: set[int]) -> dict[int, str]:
    """Process id -> command; trackers end after the others, by themselves."""
    found: Mapping[int, str] = {pid: _read(pid, "cmdline").replace("\0", " ").strip() for pid in pids}
    return {pid: text for pid, text in found.items() if text and "multiprocessing.resource_tracker" not in text}


def _test_of(pid: int) -> str:
    """The test in which a process was started."""
    found = re.search(r"(?:^|\0)PYTEST_CURRENT_TEST=([^\0]*)", _read(pid, "environ"))
    return f" (of {found[1]})" if found else ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # ended meanwhile
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not, but one of whose threads only the first has ended does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _prefix() -> str:
    return f"ddp-{os.environ[MARK]}"


def _shared_memory(ours: set[int]) -> set[str]:
    """Names in /dev/shm that carry the id of a process of ours, or our prefix, or that one of ours has mapped."""
    inodes = dict(_inodes())  # a semaphore is mapped under another name, before it gets its own
    mapped = {inode for pid in (ours if inodes else ()) for inode in _mapped(pid)}
    return {
        name
        for name, inode in inodes.items()
        if inode in mapped
        or name.startswith(f"sem.{_prefix()}-")
        or ((owner := _OWNER.match(name)) and int(owner[1]) in _seen | ours and not _is_old(_SHARED / name))
    }


def _is_old(path: Path) -> bool:
    """Whether it is from before this session, or is no more: process ids are used again."""
    try:
        return path.stat().st_mtime < _begun
    except FileNotFoundError:
        return True


def _inodes() -> Iterator[tuple[str, int]]:
    """Name and inode of each file in /dev/shm."""
    with os.scandir(_SHARED) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                yield entry.name, entry.inode()


def _mapped(pid: int) -> set[int]:
    """Inodes of what a process has mapped of /dev/shm."""
    return {int(line.split()[4]) for line in _read(pid, "maps").splitlines() if f" {_SHARED}/" in line}


def _directories(ours: set[int]) -> list[str]:
    """Directories of clusters whose client is one of these processes, or gone; old ones may carry an id used again."""
    found = Path(tempfile.gettempdir()).glob("ddp_lab-[0-9]*-*")
    owners = {str(path): int(path.name.split("-")[1]) for path in found if not _is_old(path)}
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
