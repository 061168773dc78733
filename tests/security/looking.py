"""What the processes of a cluster listen on and leave on disk, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.cluster.conftest import Lab

LISTENING = "0A"  # state of a TCP socket in /proc/net/tcp


def process_ids(lab: Lab) -> dict[int, str]:
    """Process id -> name of the client and of every process that it started for a cluster, children included."""
    found = {os.getpid(): "client"}
    waiting = list(lab.pids().items())
    while waiting:
        name, pid = waiting.pop()
        if pid not in found:
            found[pid] = name
            waiting += [(f"child of {name}", child.pid) for child in psutil.Process(pid).children()]
    return found


def listening(pid: int) -> dict[int, str]:
    """Port -> address, in the kernel's hexadecimal digits, of every TCP socket on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:  # closed since it was listed
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found[int(port, 16)] = address
    return found


def run_folder(lab: Lab) -> Path:
    """Where a cluster keeps its files."""
    return lab.session.processes._run_dir


def everything_in(folder: Path) -> Iterator[Path]:
    """A folder and all that lies in it."""
    yield folder
    yield from sorted(folder.rglob("*"))
