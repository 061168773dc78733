"""Runs one of torch's own tests in processes in which DistributedDataParallel is ours.

[Note: how torch's tests run]
`Suites` keeps a fork server (`every_process/fork_server.py`) for each mode and world size. The server has imported
torch and its tests; PYTHONPATH begins with `every_process/`, so that this and every process spawned from it swaps the
class right after it has imported torch. A test runs in a process forked from the server, in a session of its own, and
starts its ranks itself. When it has ended, or has had its time, all processes of the session are ended. Each process
appends to a file which classes it constructed, and whose constructor ran.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import DEADLINE_S, wait_until

__all__ = ["OURS", "Construction", "Listed", "Outcome", "Suites", "read_list"]

HERE = Path(__file__).resolve().parent
OURS = "ddp_lab:DistributedDataParallel"


@dataclass(frozen=True)
class Listed:
    """A line of a list: ``MODE<TAB>WORLD_SIZE<TAB>Class::test[<TAB>option ...]``.

    Attributes:
        mode: plain, cpuify or revived, see `every_process/swap_class.py`; or mpi, see `every_process/other_backend.py`.
        world_size: number of ranks.
        test: ``Class::test``.
        seconds: the time it gets.
        attempts: how often it may run. More than 1 only for a test that fails now and then whatever the class: seen
            with torch's own, or a race of the test itself before a model is made.
        soak: whether it takes too long for `make test`.
    """

    mode: str
    world_size: int
    test: str
    seconds: float = DEADLINE_S
    attempts: int = 1
    soak: bool = False

    @property
    def id(self) -> str:
        return f"{self.test.split('::')[1]}-{self.mode}-{self.world_size}"


def read_list(name: str) -> list[Listed]:
    """The tests of ``lists/NAME.txt``; ``#`` starts a comment."""
    listed = []
    for line in (HERE / "lists" / f"{name}.txt").read_text().splitlines():
        fields = line.split("#")[0].strip().split("\t")
        if fields != [""]:
            mode, world_size, test, *options = fields
            pairs = (option.split("=") for option in options)
            listed.append(Listed(mode, int(world_size), test, **{key: int(value) for key, value in pairs}))
    return listed


@dataclass(frozen=True)
class Construction:
    """A DistributedDataParallel that a process constructed: the module of its class, and that of the constructor."""

    pid: int
    cls: str
    by: str


@dataclass(frozen=True)
class Outcome:
    """What became of a test: passed, failed, skipped or missing; why; what it wrote, constructed and sent through."""

    outcome: str
    text: str
    log: str
    constructed: set[Construction]
    backends: set[str]


class Suites:
    """The fork servers of one run, started when first needed.

    Args:
        cls: ``module:Class`` that takes the place of torch's, or ``stock``.
        start: how a test starts its ranks: ``fork``, or ``spawn`` as torch does it.
        backend: of which groups are made: ``gloo``, or one that takes its place.
    """

    def __init__(self, cls: str = OURS, start: str = "fork", backend: str = "gloo") -> None:
        self.cls = cls
        self.start = start
        self.backend = backend
        self._folder = Path(tempfile.mkdtemp(prefix="torch_suite_"))
        self._servers: dict[tuple[str, int], _Server] = {}
        self._count = 0

    def run(self, listed: Listed) -> Outcome:
        """Runs a test once."""
        self._count += 1
        log, result, marks = (self._folder / f"{self._count}.{kind}" for kind in ("log", "result", "marks"))
        in_time = self._server(listed.mode, listed.world_size).run(
            {"test": listed.test, "log": str(log), "result": str(result), "marks": str(marks)}, listed.seconds
        )
        found = json.loads(result.read_text()) if in_time and result.exists() else _no_result(in_time, listed)
        lines = [line.split() for line in marks.read_text().splitlines()] if marks.exists() else []
        constructed = {Construction(int(pid), cls, by) for pid, cls, by in lines if cls != "backend"}
        backends = {by for _, cls, by in lines if cls == "backend"}
        written = [log, *sorted(self._folder.glob(f"{log.name}.stacks.*"))]
        text = "".join(file.read_text(errors="replace") for file in written)
        return Outcome(found["outcome"], found["text"], text, constructed, backends)

    def close(self) -> None:
        """Ends the servers and removes what they wrote."""
        for server in self._servers.values():
            server.ask_to_end()
        for server in self._servers.values():
            server.close()
        shutil.rmtree(self._folder)

    def _server(self, mode: str, world_size: int) -> _Server:
        key = mode, world_size
        if key not in self._servers:
            self._servers[key] = _Server(self._environment(mode, world_size), self._folder)
        if not self._servers[key].alive:
            raise RuntimeError(f"the server of torch's tests ({mode}, {world_size} ranks) has died")
        return self._servers[key]

    def _environment(self, mode: str, world_size: int) -> dict[str, str]:
        ours = [HERE / "every_process", HERE.parents[1]]
        given = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, ours), *([given] if given else [])]),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts processes that import torch
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self._folder),
            "TEMP_DIR": str(self._folder),  # torch's tests read this, BACKEND and WORLD_SIZE
            "BACKEND": "mpi" if mode == "mpi" else "gloo",
            "WORLD_SIZE": str(world_size),
            "DDP_LAB_SUITE_BACKEND": self.backend,
            "DDP_LAB_SUITE_CLASS": self.cls,
            "DDP_LAB_SUITE_MODE": "plain" if mode == "mpi" else mode,
            "DDP_LAB_SUITE_START": self.start,
        }


class _Server:
    """`every_process/fork_server.py`, running."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "every_process" / "fork_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment,
        )
        self._unread = b""
        self.alive = True
        self._started = False

    def run(self, request: dict[str, str], seconds: float) -> bool:
        """Runs a test and ends all its processes; whether it ended in time."""
        if not self._started:
            self._expect()
            self._started = True
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        started = self._expect()
        ended = self._hear(seconds)
        if ended is None:
            _signal(started["pid"], signal.SIGUSR1)  # each process writes its stacks
            _wait_for_stacks(Path(request["log"]))
        _signal(started["pid"], signal.SIGKILL)
        if ended is None:
            self._expect()
        return ended is not None

    def ask_to_end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    def close(self) -> None:
        assert self._process.stdout
        self._process.wait()
        self._process.stdout.close()

    def _expect(self) -> Any:
        line = self._hear(DEADLINE_S)
        if line is None:
            raise RuntimeError("the server of torch's tests does not answer")
        return line

    def _hear(self, seconds: float) -> Any:
        """The next line, or None if none comes in time; RuntimeError if the server has died."""
        assert self._process.stdout
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 4096)
            if not more:
                self.alive = False
                raise RuntimeError(f"the server of torch's tests died, exit code {self._process.wait()}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _no_result(in_time: bool, listed: Listed) -> dict[str, str]:
    why = "its process died" if in_time else f"not finished after {listed.seconds} s; all stacks are in the output"
    return {"outcome": "failed", "text": f"{listed.test}: {why}"}


def _wait_for_stacks(log: Path) -> None:
    """Until each living process has written its stacks to the end, the outermost frame of its main thread."""
    wait_until(
        lambda: all(
            file.read_text().endswith("in <module>\n") or not psutil.pid_exists(int(file.suffix[1:]))
            for file in log.parent.glob(f"{log.name}.stacks.*")
        ),
        "the stacks of all processes",
    )


def _signal(session: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, number)
