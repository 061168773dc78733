"""Starts and ends the processes of a local cluster: ipyparallel's controller, and the fork server that makes engines.

Each gets this process's id and ends when this process ends, even if it is killed; see
`ddp_lab.engine.processes.parent_watch`. Only processes started here, whose ids are held here, are ever signalled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from ...documentation import with_help
from ...errors import ClusterError
from ...formatting import exit_words
from ...protocol.entry_points import CONTROLLER, FORK_SERVER
from . import zygote
from .zygote import Forked, not_debugged, process_environment

_TAIL_LINES = 15
_CRASH = "Fatal Python error"  # as faulthandler begins
_MODULES = "Extension modules: "  # which Python lists below a crash
_BELOW_CELLS = ("interactiveshell.py", "ddp_lab/engine/cells/cell.py")  # frames from here on are not the user's
# An engine counts as registered after its first heartbeat. A missed one means nothing: the fork server
# reports the end of a rank, and a machine that pauses for a minute must not kill any.
_HEARTBEAT_MS = 200
_NEVER = 1_000_000_000
_HEART_MONITOR_KILLED = 128  # and the signal's number: the controller's exit code then
_TERM_SECONDS = 1.0
_RANKS_SECONDS = 10.0  # half a second is usual; processes that ranks have started end only with the fork server
_FILES = 128  # descriptors; a start with two ranks takes some 60 in each process
_FULL = 65_536  # a disk with fewer free bytes counts as full
_LONGEST_PATH = 107  # bytes of a Unix socket's; the system's limit
_LONGEST_SOCKET = "/wire/control"
# The last lines in the log of a process that exceeded a limit; that in words, with a fix.
_USED_UP = (
    (
        ("Too many open files",),
        "it ran out of file descriptors (restart Python or Jupyter with a higher limit, e.g. after `ulimit -n 4096`)",
    ),
    (
        (
            *("MemoryError", "Cannot allocate memory", "failed to map segment", "can't start new thread", "bad_alloc"),
            *("OUT OF MEMORY", "Resource temporarily unavailable (src/thread"),  # ZeroMQ's
        ),
        "it ran out of memory (end processes that fill it, or restart Python or Jupyter with a higher limit, e.g. "
        "after `ulimit -v unlimited`)",
    ),
)
_CRASH_LINES = 200  # of a log's end: a crash writes its stacks after its reason
# By default it keeps the last thousand requests with all their outputs, joined again for each line that arrives.
_NO_DATABASE = "ipyparallel.controller.dictdb.NoDB"


class Controller:
    """ipyparallel's controller: one process and its heart monitor, CurveZMQ on, behind Unix sockets in the run folder.

    Engines of other hosts connect to an address that they can reach; clients still connect to the sockets. See
    [Note: a controller that takes over] in `ddp_lab.engine.processes.controller`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._profile = run_dir / "profile"
        self._log = run_dir / "controller.log"
        self._log_begins = 0  # where the newest controller's log begins
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._command: list[str] = []

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def heart_monitor(self) -> int | None:
        """Process id of its child while it has one."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            found = children.read_text().split()
        except OSError:  # it has ended, or the kernel does not report them
            return None
        return int(found[0]) if found else None

    @property
    def ended(self) -> str | None:
        """How it has ended, e.g. ``"the controller was killed by SIGKILL (signal 9)"``; None while it runs."""
        code, who = self._exit_code(), "the controller"
        if code is None:
            return None
        if code > _HEART_MONITOR_KILLED:
            code, who = _HEART_MONITOR_KILLED - code, "the controller's heart monitor"
        return f"{_of(self._process)}{who} {exit_words(code)}{because(_text_of(self._log)[self._log_begins :], code)}"

    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def command(self, parent: str, engine_address: str | None = None) -> list[str]:
        """The command to run below the process `parent`; creates the folders that it needs."""
        for folder in (self._profile, self._profile / "security"):
            folder.mkdir(mode=0o700)
        sockets = self._run_dir / "c"  # a prefix: their names are c:1, c:2, ...
        options = [
            f"--profile-dir={self._profile}",
            "--usethreads",
            *(f"--IPController.{side}_transport=ipc" for side in ("client", "monitor")),
            *(f"--IPController.{side}_ip={sockets}" for side in ("client", "monitor")),
            f"--IPController.engine_transport={'ipc' if engine_address is None else 'tcp'}",
            f"--IPController.engine_ip={sockets if engine_address is None else engine_address}",
            "--IPController.enable_curve=True",
            f"--IPController.db_class={_NO_DATABASE}",
            f"--HeartMonitor.period={_HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={_NEVER}",
            "--IPController.registration_timeout=600000",
            "--log-level=WARN",
        ]
        return [sys.executable, "-m", CONTROLLER, parent, str(self._run_dir), *options]

    def start(self, engine_address: str | None = None) -> None:
        """Starts it and returns at once, also if it was started before.

        Args:
            engine_address: where engines of other hosts connect; ``"0.0.0.0"`` for every address of this machine.
        """
        if self._process is not None:
            return
        self._command = self.command(str(os.getpid()), engine_address)
        self.start_again()

    def start_again(self) -> None:
        """Starts a successor to one that has ended, and returns at once."""
        self._begin_log()
        with open_log(self._log) as log:
            self._process = zygote.fork_now("controller", self._command[4:], log.fileno()) or started(
                self._command, log.fileno()
            )

    def _begin_log(self) -> None:
        self._log_begins = len(_text_of(self._log))

    def remember(self, engines: Mapping[int, str]) -> None:
        """Writes for a successor which engines (id -> uuid) are registered: the former may be killed while writing."""
        path = self._profile / "log" / "engines.json"
        draft = path.with_suffix(".new")
        with contextlib.suppress(OSError):  # e.g. a full disk: then the controller's own file must suffice
            draft.write_text(json.dumps({"engines": dict(engines), "next_id": max(engines, default=-1) + 1}))
            draft.replace(path)

    def check(self) -> None:
        """Raises `ClusterError` with the end of its log if it has ended."""
        if (ended := self.ended) is not None:
            full = self._run_dir.exists() and shutil.disk_usage(self._run_dir).free < _FULL
            where = f" (No space left on device: {self._run_dir}; set TMPDIR to another folder)" if full else ""
            raise ClusterError(f"{ended}{where}; the end of its log:\n{tail(self._log)}")

    def connection(self) -> dict[str, dict[str, Any]] | None:
        """How a ``"client"`` and an ``"engine"`` connect; None until the controller has written it.

        Raises:
            ClusterError: the controller ended.
        """
        self.check()
        found = {}
        for kind in ("client", "engine"):
            try:
                text = (self._profile / "security" / f"ipcontroller-{kind}.json").read_text()
                found[kind] = json.loads(text)
            except (FileNotFoundError, ValueError):  # not there, or half written
                return None
        return found

    def stop(self) -> None:
        """Ends it and waits until it has ended."""
        if self._process is None:
            return
        self._process.terminate()
        _wait_for_end(self._process, _TERM_SECONDS)
        self._process = None


@dataclass(frozen=True)
class RankProcess:
    """What a rank's process needs at its start.

    Attributes:
        environment: its own variables.
        client: how it connects to the client, as `ddp_lab.engine.rank.connect`.
        folder: its current one; None for its fork server's, or what the supervisor process knows.
        gives_way: whether other processes go first, see [Note: ranks give way] in
            `ddp_lab.engine.processes.fork_server`.
    """

    environment: Mapping[str, str]
    client: Mapping[str, Any]
    folder: str | None = None
    gives_way: bool = False


class ForkServer:
    """The process that imports torch once and forks the ranks' engines; see `ddp_lab.engine.processes.fork_server`.

    Attributes:
        stage: what it is doing, in words.
        ready: whether it can fork.
        pids: rank -> process id, of all that it forked.
        exits: rank -> exit code, of those that have ended.
        reasons: rank -> why it ended, if more is known than its exit code.
        on_exit: called with the rank when one has ended.
    """

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._environment = dict(environment)
        self._answers: dict[int, dict[str, Any]] = {}
        self._questions = itertools.count(1)
        self._writing = threading.Lock()
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self.stage = "starting"
        self.ready = False
        self.pids: dict[int, int] = {}
        self.exits: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.on_exit: Callable[[int], None] | None = None
        self._failure: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote that has not forked it yet."""
        process = self._process
        return process.zygote.pid if isinstance(process, Forked) and process.pid is None else None

    @property
    def failed(self) -> bool:
        """Whether it has ended or could not import what ranks need."""
        return self._failure is not None

    def command(self, parent: str) -> list[str]:
        """The command to run below the process `parent`."""
        return [sys.executable, "-m", FORK_SERVER, parent, str(self._run_dir)]

    def start(self) -> None:
        """Starts it and returns at once, also if it was started before; it imports torch meanwhile."""
        if self._process is not None:
            return
        self.stage = "importing torch"
        with open_log(self._log) as log:
            self._process = self._started(log.fileno())
        self._reader = threading.Thread(target=self._read, name="ddp_lab-fork-server", daemon=True)
        self._reader.start()

    def _started(self, log: int) -> subprocess.Popen[bytes] | Forked:
        environment = process_environment(self._environment)
        return zygote.fork("fork_server", [str(self._run_dir)], environment, log, pipes=True)

    def fork(self, connection: Mapping[str, Any], ranks: Mapping[int, RankProcess]) -> None:
        """Requests one engine per rank; they start when torch is imported.

        Args:
            connection: how an engine connects to the controller.
            ranks: rank -> what its process needs.
        """
        with self._lock:
            for rank in ranks:
                for known in (self.exits, self.pids, self.reasons):
                    known.pop(rank, None)
        asked = [
            {
                "rank": rank,
                "env": dict(one.environment),
                "log": str(self.log_of(rank)),
                "client": dict(one.client),
                "folder": one.folder,
                "gives_way": one.gives_way,
            }
            for rank, one in ranks.items()
        ]
        self._send({"op": "fork", "connection": connection, "ranks": asked})

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank's process; SIGKILL also to the processes that it has started."""
        self._send({"op": "signal", "rank": rank, "signal": int(number)})

    def ask(self, op: str, **arguments: Any) -> int:
        """Asks a question that `AddressProbe` of the fork server answers; returns a number for `answer`."""
        number = next(self._questions)
        self._send({"op": op, "id": number, **arguments})
        return number

    def answer(self, number: int) -> dict[str, Any] | None:
        """Its answer to a question, returned once; None until then."""
        return self._answers.pop(number, None)

    def unreachable(self, ranks: Iterable[int], seconds: float) -> set[int]:
        """Those of these ranks whose host is unreachable: none, because it is this one."""
        return set()

    def log_of(self, rank: int) -> Path:
        """The file with the output of the rank's process outside cells."""
        return self._run_dir / f"rank-{rank}.log"

    def check(self, ranks: Sequence[int] = ()) -> None:
        """Raises `ClusterError` with the end of the log if the fork server or one of `ranks` has ended."""
        if self._failure is not None:
            raise ClusterError(f"the ranks could not start{because(self._failure, 1) or ':'}\n{self._failure}")
        for rank in ranks:
            if rank in self.exits:
                why, log = self.reasons.get(rank) or exit_words(self.exits[rank]), tail(self.log_of(rank))
                said = f"while starting, rank {rank} {why}; the end of its log:\n{log}"
                raise ClusterError(with_help(said, "rank-failed-at-start"))

    def stop(self) -> None:
        """Ends every rank, then the fork server, and waits for it."""
        if self._process is None or self._reader is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        _wait_for_end(self._process, _RANKS_SECONDS)  # if it is killed, its ranks end too
        self._reader.join()
        self._process.stdout.close()
        self._process = None

    @property
    def _log(self) -> Path:
        return self._run_dir / "fork_server.log"

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # It ended: `check` reports why.
        with contextlib.suppress(BrokenPipeError, ValueError), self._writing:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(self._parsed(line))
        self._ended(self._process.wait())

    def _hear(self, event: Mapping[str, Any]) -> None:
        """One event, on the reader's thread."""
        with self._lock:
            gone = self._take(event)
        told = self.on_exit
        if gone is not None and told is not None:
            told(gone)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(line)
        return event

    def _take(self, event: Mapping[str, Any]) -> int | None:
        """Records an event; returns the rank that has ended according to it. Needs the lock."""
        kind = event["event"]
        if kind == "stage":
            self.stage = event["name"]
        elif kind == "ready":
            self.stage, self.ready = "forking", True
        elif kind == "forked":
            self.pids[event["rank"]] = event["pid"]
        elif kind == "exited":
            if self.pids.get(event["rank"]) == event["pid"]:
                log = self.log_of(event["rank"])
                if log.exists() and (why := because(_text_of(log), event["code"])):
                    self.reasons[event["rank"]] = exit_words(event["code"]) + why
                self.exits[event["rank"]] = event["code"]
                return int(event["rank"])
        elif kind == "answer":
            self._answers[event["id"]] = dict(event)
        elif kind == "failed":
            self._failure = last_lines(event["error"])
        return None

    def _ended(self, code: int) -> None:
        """On the reader's thread: the process has ended, and its ranks with it."""
        self.take_end(self._how(code), f"; the end of its log:\n{last_lines(self._said)}")

    def _how(self, code: int) -> str:
        return f"{_of(self._process)}the fork server {exit_words(code)}{because(self._said, code)}"

    @property
    def _said(self) -> str:
        return self._process.zygote.log if _orphaned(self._process) else _text_of(self._log)

    def take_end(self, why: str, more: str = "", of_rank: str | None = None) -> None:
        """No more events will arrive: the ranks have ended with the fork server.

        Args:
            why: the cause.
            more: appended to the error that a request for new ranks raises.
            of_rank: the text for each rank; None: that it has ended, and why.
        """
        with self._lock:
            for rank in self.pids:
                if rank not in self.exits:
                    self.reasons[rank] = of_rank or f"ended: {why} (`%cluster restart` starts new ranks)"
                    self.exits[rank] = -signal.SIGKILL
            if self._failure is None:
                self._failure = why + more


def _orphaned(process: subprocess.Popen[bytes] | Forked | None) -> TypeGuard[Forked]:
    return isinstance(process, Forked) and process.orphaned


def _of(process: subprocess.Popen[bytes] | Forked | None) -> str:
    """Begins a sentence on a process's end."""
    return "the zygote of " if _orphaned(process) else ""


def started(command: Sequence[str], log: int, pipes: bool = False) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, and in the root folder: it imports nothing from the notebook's.

    Args:
        command: what to run.
        log: descriptor that receives its errors, and its output if that is no pipe.
        pipes: whether its input and output are pipes.
    """
    with not_debugged():
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else log,
            stderr=log,
            env=process_environment({}),
            cwd="/",
            start_new_session=True,
        )


def _wait_for_end(process: subprocess.Popen[bytes] | Forked, seconds: float) -> None:
    """Waits until a process that was asked to end has ended; kills it after `seconds`."""
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_run_dir() -> Path:
    """A folder for a cluster's files and sockets, private to this user; in /tmp if its path would be too long."""
    made = Path(tempfile.mkdtemp(prefix=(prefix := f"ddp_lab-{os.getpid()}-")))
    if len(os.fsencode(made)) + len(_LONGEST_SOCKET) > _LONGEST_PATH:
        made.rmdir()
        made = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return made


def check_client() -> None:
    """Raises `ClusterError` if this process's limit of open files is too low for a cluster, or its folder is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ClusterError("the current folder was removed: change to another, e.g. with `%cd ~`") from None
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < _FILES:
        raise ClusterError(
            f"this process may open only {allowed} files, but a cluster needs {_FILES}: raise the limit before you "
            f"start Python or Jupyter (`ulimit -n 1024`)"
        )


def open_log(path: Path) -> BinaryIO:
    """Opens a log for appending; only this user may read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def tail(path: Path) -> str:
    """The last lines of a log file."""
    return last_lines(_text_of(path)) if path.exists() else "(no log)"


def because(log: str, code: int) -> str:
    """The cause of a process's end according to the end of its log, if it exceeded a limit; else "". Begins with a
    colon.
    """
    if code >= 0 or code == -signal.SIGABRT:
        end = "\n".join(log.splitlines()[-_CRASH_LINES:])
        for signs, words in _USED_UP:
            if any(sign in end for sign in signs):
                return f": {words}"
    return ""


def last_words(path: Path) -> str:
    """The last lines of a rank's log; of a crash in C code, what crashed and the user's frames."""
    text = tail(path) if _CRASH not in (whole := _text_of(path)) else whole[whole.rindex(_CRASH) :]
    lines = [line for line in text.splitlines() if line and not line.startswith(_MODULES)]
    outside = (number for number, line in enumerate(lines) if any(each in line for each in _BELOW_CELLS))
    return "\n".join(lines[: next(outside, _TAIL_LINES)])


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def last_lines(text: str) -> str:
    """The end of a log."""
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])
