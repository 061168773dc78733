"""The process of this client from which its clusters' fork servers and controllers are forked.

[Note: zygote]
Importing torch is most of a cluster's start. So one process, the zygote, imports it for all clusters of this client
(`ddp_lab.engine.processes.zygote`); a cluster that starts later is ready in tenths of a second. `%load_ext ddp_lab`
starts it, or already the kernel (`ddp_lab.notebook.kernel`), unless DDP_LAB_EARLY=0 is in the environment; else the
first cluster does. It has the variables of the cluster that it was started for. A cluster with others gets a zygote of
its own, which takes its place: variables may count at an import. What it forks gets all variables as they are then.
Clusters that outlive this process, and fork servers of other hosts, are started without it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ...control.interrupts import held_back
from ...protocol.entry_points import ZYGOTE
from .devices import place

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_OFF = "DDP_LAB_EARLY"
_UNUSED_SECONDS = 600.0
_LOG_BYTES = 65_536
# Set by ipykernel while it starts, by shells, and by pytest for each test; no import reads them.
_NEVER_AT_IMPORT = {
    *("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "MPLBACKEND", "PAGER", "PYDEVD_USE_FRAME_EVAL", "TERM"),
    *("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"),
}


class Forked:
    """A process that a zygote forks as soon as it can: what `subprocess.Popen` is for a process of one's own.

    Attributes:
        zygote: it.
        stdin: what the process reads, if its input and output are pipes.
        stdout: what it writes.
        orphaned: whether it has ended, or never began, because the zygote has ended, whose exit code then counts.
    """

    def __init__(self, zygote: Zygote, status: int, stdin: BinaryIO | None, stdout: BinaryIO | None) -> None:
        self.zygote = zygote
        self.orphaned = False
        self._status = status
        self.stdin, self.stdout = stdin, stdout
        self._lock = threading.Lock()  # guards the next two
        self._said = b""  # lines of its process id and exit code, as far as they have come
        self._code: int | None = None

    def __del__(self) -> None:
        os.close(self._status)

    def _hear(self, seconds: float | None) -> bool:
        """Waits for news; returns whether there are some."""
        if not _readable(self._status, seconds):
            return False
        with self._lock:
            if self._code is None and _readable(self._status, 0):
                self._said += (said := os.read(self._status, 64))
                lines = self._said.split(b"\n")
                if len(lines) > 2:
                    self._code = int(lines[1])
                elif not said:
                    self.orphaned, self._code = True, self.zygote.process.wait()
        return True

    @property
    def pid(self) -> int | None:
        """Process id; None until it is forked."""
        while b"\n" not in self._said and self._code is None and self._hear(0):
            pass
        lines = self._said.split(b"\n")
        return int(lines[0]) if len(lines) > 1 else None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        while self._code is None and self._hear(0):
            pass
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended; returns its exit code.

        Args:
            timeout: in seconds.

        Raises:
            subprocess.TimeoutExpired: it runs after that time.
        """
        while self._code is None:
            if not self._hear(timeout):
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends it a signal if it is there; one that is not forked yet does not get it."""
        if self.poll() is None and (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it; if it is not forked yet, with its zygote, which may be stopped."""
        if self.pid is None:
            self.zygote.process.kill()
        self.send_signal(signal.SIGKILL)


class Zygote:
    """A process that has imported torch, or is importing it.

    Args:
        environment: its variables.

    Attributes:
        process: it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.variables = _that_count(environment)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = os.memfd_create("ddp_lab-log")
        self._ready = False
        with theirs, contextlib.ExitStack() as failed, not_debugged():
            failed.callback(self.close)
            self.process = subprocess.Popen(
                [sys.executable, "-m", ZYGOTE, str(os.getpid()), str(_UNUSED_SECONDS)],
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )
            failed.pop_all()

    @property
    def ready(self) -> bool:
        """Whether it has imported torch."""
        if not self._ready and _readable(self._channel.fileno(), 0):
            self._ready = bool(self._channel.recv(1))
        return self._ready

    @property
    def log(self) -> str:
        """What it has written."""
        return os.pread(self._log, _LOG_BYTES, 0).decode(errors="replace")

    def fork(self, run: str, arguments: Sequence[str], environment: Mapping[str, str], log: int, pipes: bool) -> Forked:
        """Asks for a process, and returns at once.

        Args:
            run: the program, as `ddp_lab.engine.processes.zygote` knows it.
            arguments: without its parent.
            environment: its variables.
            log: descriptor that receives its errors, and its output if that is no pipe.
            pipes: whether its input and output are pipes.

        Raises:
            OSError: the zygote has ended, or a limit of this process does not allow it.
        """
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:

            def pipe(ours: int) -> tuple[int, int]:
                """The end that we keep, and theirs."""
                ends = os.pipe()
                kept.callback(os.close, ends[ours])
                sent.callback(os.close, ends[1 - ours])
                return ends[ours], ends[1 - ours]

            body = os.memfd_create("ddp_lab-request")
            sent.callback(os.close, body)
            os.write(body, json.dumps({"run": run, "arguments": [*arguments], "environment": {**environment}}).encode())
            os.lseek(body, 0, os.SEEK_SET)
            status, their_status = pipe(0)
            stdin = stdout = -1
            if pipes:
                (stdin, their_stdin), (stdout, their_stdout) = pipe(1), pipe(0)
            else:
                their_stdin, their_stdout = os.open(os.devnull, os.O_RDONLY), log
                sent.callback(os.close, their_stdin)
            socket.send_fds(self._channel, [b"1"], [body, their_stdin, their_stdout, log, their_status])
            kept.pop_all()
        return Forked(
            self, status, os.fdopen(stdin, "wb") if pipes else None, os.fdopen(stdout, "rb") if pipes else None
        )

    def close(self) -> None:
        """It ends when nothing that it has forked runs."""
        self._channel.close()

    def __del__(self) -> None:
        os.close(self._log)


_lock = threading.Lock()
_zygote: Zygote | None = None  # that new clusters use
_former: list[Zygote] = []  # which end with what they have forked
_owner = os.getpid()  # a process that is forked from this one has none


def begin() -> None:
    """Starts the zygote of clusters with default arguments, unless there is one, or must be none; returns at once."""
    if os.environ.get(_OFF) == "0":
        return
    with (
        held_back(),
        _lock,
        contextlib.suppress(OSError),
    ):  # no folder, process or thread can be made: the start of a cluster says so
        _with(process_environment(place(None, None, {}).environment))


def fork(run: str, arguments: Sequence[str], environment: Mapping[str, str], log: int, pipes: bool = False) -> Forked:
    """Asks the zygote with these variables for a process, as `Zygote.fork`; if there is none, it is started.

    Raises:
        OSError: a limit of this process does not allow it.
    """
    with held_back(), _lock:
        try:
            return _with(environment).fork(run, arguments, environment, log, pipes)
        except BrokenPipeError:  # it was not needed for so long that it has ended just now
            return _with(environment).fork(run, arguments, environment, log, pipes)


def fork_now(run: str, arguments: Sequence[str], log: int) -> Forked | None:
    """Asks the zygote for a process with this one's variables; None if it is not there yet."""
    with held_back(), _lock:
        if _zygote is None or _owner != os.getpid() or not _zygote.ready:
            return None
        try:
            return _zygote.fork(run, arguments, process_environment({}), log, pipes=False)
        except BrokenPipeError:
            return None


def _with(environment: Mapping[str, str]) -> Zygote:
    """The zygote with these variables, which may still be importing torch. Needs the lock."""
    global _zygote, _owner
    if _owner != os.getpid():
        _zygote, _owner = None, os.getpid()
        _former.clear()
    _former[:] = [one for one in _former if one.process.poll() is None]
    found = _zygote
    if found is not None and (found.process.poll() is not None or found.variables != _that_count(environment)):
        _end()
    if _zygote is None:
        _zygote = Zygote(environment)
    return _zygote


def pid() -> int | None:
    """Process id of the zygote that a cluster of this process would use; None if there is none."""
    return _zygote.process.pid if _zygote is not None and _owner == os.getpid() else None


def pids() -> set[int]:
    """Process ids of this process's zygotes: of that one, and of former ones that clusters still need."""
    with _lock:
        return {one.process.pid for one in (*_former, _zygote) if one is not None} if _owner == os.getpid() else set()


def end() -> None:
    """Ends the zygote, unless a cluster needs it: then it ends with that."""
    with held_back(), _lock:
        _end()


@atexit.register
def _at_exit() -> None:
    """Clusters that have not ended by now end with it, as with this process."""
    if _owner == os.getpid() and _zygote is not None:
        end()
        for one in _former:
            one.process.kill()
            one.process.wait()


def _end() -> None:
    global _zygote
    if _zygote is not None:
        _zygote.close()
        _former.append(_zygote)
        _zygote = None


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _that_count(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _NEVER_AT_IMPORT}


def not_debugged() -> contextlib.AbstractContextManager[None]:
    """In this context, a debugger of this process does not make started processes wait for it.

    ipykernel's does while JupyterLab's debugger is on, and no front end ever answers them.
    """
    tracer = sys.modules.get("pydevd")
    return contextlib.nullcontext() if tracer is None else tracer.skip_subprocess_arg_patch()


def process_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and `extra`; modules are importable from where this process finds them, ddp_lab too."""
    made = {**os.environ, **extra}
    path = made.get("PYTHONPATH", "")
    folders = [os.path.abspath(folder) for folder in path.split(os.pathsep)] if path else []
    made["PYTHONPATH"] = os.pathsep.join([*folders, _PACKAGE_ROOT])
    return made
