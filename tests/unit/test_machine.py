"""What a process knows of another one on its machine: whether it can continue, and what helps if it can't."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab import machine
from tests.waiting import wait_until

_ENDLESS = resource.RLIM_INFINITY


@pytest.fixture
def full() -> Iterator[subprocess.Popen[str]]:
    """A process that has opened as many files as it may, which are 64 of at most 4096."""
    code = "import os\ntry:\n    while True: os.dup(0)\nexcept OSError: print('full', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)),
    ) as process:
        assert process.stdout.readline() == "full\n"
        try:
            yield process
        finally:
            process.kill()


def test_no_more_files(full: subprocess.Popen[str]) -> None:
    """It says the limit and the command that raises it; where none can, that Python must be restarted."""
    began = f"has reached its limit of 64 open files: `prlimit --pid {full.pid} --nofile="
    assert machine.used_up(full.pid) == [f"{began}1024:` raises it"]
    resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (64, 100))
    assert machine.used_up(full.pid) == [f"{began}100:` raises it"]
    resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (64, 64))
    anew = "restart Python or Jupyter with a higher limit (`ulimit -n`)"
    assert machine.used_up(full.pid) == [f"has reached its limit of 64 open files: {anew}"]


def test_no_more_memory(full: subprocess.Popen[str]) -> None:
    """A process that has no room for another thread's stack is told with what it has."""
    resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (4096, 4096))
    assert machine.used_up(full.pid) == []
    taken = int(Path(f"/proc/{full.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(full.pid, resource.RLIMIT_AS, (taken, _ENDLESS))
    words = f"has reached its memory limit ({taken / 2**20:,.0f} MiB of address space): "
    assert machine.used_up(full.pid) == [f"{words}`prlimit --pid {full.pid} --as=unlimited:` raises it"]


def test_stopped_and_ended(full: subprocess.Popen[str]) -> None:
    """A stopped process comes first with what resumes it; nothing hinders one that has ended."""
    os.kill(full.pid, signal.SIGSTOP)
    wait_until(lambda: machine.stopped(full.pid), "its stop")
    stop, files = machine.hindrances(full.pid)
    assert stop == f"is stopped (SIGSTOP): `kill -CONT {full.pid}` resumes it"
    assert files.startswith("has reached its limit of")
    assert machine.started(full.pid).startswith(machine.host_clock())
    full.kill()
    full.wait()
    assert (machine.hindrances(full.pid), machine.stopped(full.pid), machine.started(full.pid)) == ([], False, "")


def test_a_package_that_is_missing() -> None:
    """It has no version, which is no error."""
    assert machine._version("nobody-has-this") == ""
    assert machine._version("torch") != ""
