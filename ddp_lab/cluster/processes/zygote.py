"""The process of this client from which its clusters' fork servers and controllers are forked.

[Note: zygote]
Importing torch is most of a cluster's start. So one process, the zygote, imports it for all clusters of this client
(`ddp_lab.engine.processes.zygote`); a cluster that starts later is ready in tenths of a second. `%load_ext ddp_lab`
starts it, or already the kernel (`ddp_lab.notebook.kernel`), unless DDP_LAB_EARLY=0 is in the environment; else the
first cluster does. It has the variables of the cluster that it was started for. A cluster with others gets a zygote of
its own, which takes its place: variables may count at an import. So does the next cluster after pip has replaced torch,
or one of our files has changed. What it forks gets all variables as they are then. Clusters that outlive this process,
and fork servers of other hosts, are started without it.

`ddp-lab lab` offers a zygote to all kernels of its JupyterLab: a kernel with the same variables has its own forked from
that, which takes hundredths of a second. It ends with its kernel all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ...control.interrupts import interrupts_deferred
from ...protocol.entry_points import ZYGOTE
from .devices import place

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
OFFERED = "DDP_LAB_ZYGOTE"  # a folder, with a zygote that another process offers
_OFF = "DDP_LAB_EARLY"
_NEEDED = "needed"  # the file with what a client of an offered zygote must have, too
_IMPORTED = ("torch", "numpy", "ipyparallel", "ipykernel", "ipython", "pyzmq", "tornado")
_UNUSED_SECONDS = 600.0
_LOG_BYTES = 65_536
# Set by Jupyter, by shells, by pytest for each test, and read later; no import reads them.
_NEVER_AT_IMPORT = {
    *("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "MPLBACKEND", "PAGER", "PYDEVD_USE_FRAME_EVAL", "TERM"),
    *("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"),
    *("DDP_LAB_EARLY", "DDP_LAB_GIVE_WAY", OFFERED),
}
_NEVER_PREFIXES = ("JPY_", "JUPYTER")


class Forked:
    """A process that a zygote forks as soon as it can: what `subprocess.Popen` is for a process of one's own.

    Attributes:
        zygote: it.
        stdin: what the process reads, if its input and output are pipes.
        stdout: what it writes.
        orphaned: whether it has ended, or never began, because the zygote has ended, whose exit code then counts.
    """

    def __init__(self, zygote: _Forking, status: int, stdin: BinaryIO | None, stdout: BinaryIO | None) -> None:
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
                    self.orphaned, self._code = True, self.zygote.ended()
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
            self.zygote.kill()
        self.send_signal(signal.SIGKILL)


class _Forking:
    """A process that forks others, at the other end of a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    @property
    def pid(self) -> int | None:
        """Its process id, if it is this process's."""
        return None

    def ended(self) -> int:
        """Waits until it has ended; returns its exit code."""
        return 1  # another process's: only an import that fails ends it before this one

    def kill(self) -> None:
        """Ends it, if it is this process's."""

    @property
    def log(self) -> str:
        """What it has written."""
        return ""

    def fork(
        self,
        run: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        stdin: int | None = None,
        pipes: bool = False,
    ) -> Forked:
        """Asks for a process, and returns at once.

        Args:
            run: the program, as `ddp_lab.engine.processes.zygote` knows it.
            arguments: without its parent.
            environment: its variables.
            log: descriptor that receives its errors, and its output if that is no pipe.
            stdin: descriptor of its input; None for nothing to read, or a pipe.
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

            body = _file()
            sent.callback(os.close, body)
            os.write(body, json.dumps({"run": run, "arguments": [*arguments], "environment": {**environment}}).encode())
            os.lseek(body, 0, os.SEEK_SET)
            status, their_status = pipe(0)
            ours, their_stdout = (-1, -1), log
            if pipes:
                (write, stdin), (read, their_stdout) = pipe(1), pipe(0)
                ours = write, read
            elif stdin is None:
                stdin = os.open(os.devnull, os.O_RDONLY)
                sent.callback(os.close, stdin)
            socket.send_fds(self._channel, [b"1"], [body, stdin, their_stdout, log, their_status])
            kept.pop_all()
        streams = (os.fdopen(ours[0], "wb"), os.fdopen(ours[1], "rb")) if pipes else (None, None)
        return Forked(self, status, *streams)

    def close(self) -> None:
        """From now on it forks no more; this process's zygote ends when nothing that it has forked runs."""
        self._channel.close()


class Zygote(_Forking):
    """This process's, which has imported torch, or is importing it.

    Args:
        environment: its variables.

    Attributes:
        process: it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._log = _file()
        self.variables = _that_count(environment)
        self._ready = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self.process = self._begun(environment, theirs.fileno())
            failed.pop_all()

    def _begun(self, environment: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes] | Forked:
        arguments = [str(os.getpid()), str(_UNUSED_SECONDS)]
        if (other := _offered(self.variables)) is not None:
            with contextlib.closing(other), contextlib.suppress(ConnectionError):  # it has just ended
                return other.fork("zygote", arguments, environment, self._log, stdin)
        with not_debugged():
            return subprocess.Popen(
                [sys.executable, "-m", ZYGOTE, *arguments],
                stdin=stdin,
                stdout=self._log,
                stderr=self._log,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )

    @property
    def soon(self) -> bool:
        """Whether it forks at once: it has imported torch, or comes from a process that has."""
        if not self._ready:
            told = _readable(self._channel.fileno(), 0) and bool(self._channel.recv(1))  # an error if it has ended
            self._ready = told or isinstance(self.process, Forked)
        return self._ready

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def ended(self) -> int:
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()

    @property
    def log(self) -> str:
        return os.pread(self._log, _LOG_BYTES, 0).decode(errors="replace")

    def __del__(self) -> None:
        os.close(self._log)


def offer(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a zygote for all processes that have `OFFERED` in their environment; it ends with this process.

    Args:
        folder: an empty one, which only this user may enter; the value of `OFFERED`.
        environment: variables besides this process's.
    """
    variables = process_environment({**place(None, None, environment).environment, **environment})
    Path(folder, _NEEDED).write_text(json.dumps(_that_count(variables)))
    with not_debugged():
        return subprocess.Popen(
            [sys.executable, "-m", ZYGOTE, str(os.getpid()), "inf", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=variables,
            cwd="/",
            start_new_session=True,
        )


def _offered(variables: Mapping[str, str]) -> _Forking | None:
    """A zygote with these variables that another process offers."""
    if (folder := os.environ.get(OFFERED)) is None:
        return None
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if json.loads(Path(folder, _NEEDED).read_text()) == variables:
            channel.connect(str(Path(folder, "zygote")))
            return _Forking(channel)
    except (OSError, ValueError):  # it has ended, or has only just been started
        pass
    channel.close()
    return None


_lock = threading.Lock()
_zygote: Zygote | None = None  # that new clusters use
_former: list[Zygote] = []  # which end with what they have forked
_owner = os.getpid()  # a process that is forked from this one has none


def wanted() -> bool:
    """Whether one may be started before a cluster is."""
    return os.environ.get(_OFF) != "0"


def begin() -> None:
    """Starts the zygote of clusters with default arguments, unless there is one, or must be none; returns at once."""
    if not wanted():
        return
    # Where no process can be started, the start of a cluster says so.
    with interrupts_deferred(), _lock, contextlib.suppress(OSError):
        _with(process_environment(place(None, None, {}).environment))


def fork(run: str, arguments: Sequence[str], environment: Mapping[str, str], log: int, pipes: bool = False) -> Forked:
    """Asks the zygote with these variables for a process, as `Zygote.fork`; if there is none, it is started.

    Raises:
        OSError: a limit of this process does not allow it.
    """
    with interrupts_deferred(), _lock:
        try:
            return _with(environment).fork(run, arguments, environment, log, pipes=pipes)
        except ConnectionError:  # it was not needed for so long that it has ended just now
            _end()
            return _with(environment).fork(run, arguments, environment, log, pipes=pipes)


def fork_now(run: str, arguments: Sequence[str], log: int) -> Forked | None:
    """Asks the zygote for a process with this one's variables; None if it still has to import torch."""
    with interrupts_deferred(), _lock:
        if _zygote is None or _owner != os.getpid():
            return None
        try:
            return _zygote.fork(run, arguments, process_environment({}), log) if _zygote.soon else None
        except ConnectionError:  # it has ended
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
    return _zygote.pid if _zygote is not None and _owner == os.getpid() else None


def end() -> None:
    """Ends the zygote, unless a cluster needs it: then it ends with that."""
    with interrupts_deferred(), _lock:
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


def _file() -> int:
    """The descriptor of a new file without a name."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _readable(descriptor: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _that_count(environment: Mapping[str, str]) -> dict[str, str]:
    """What makes two zygotes different: Python, variables, versions of what is imported, and how new our files are."""
    versions = {"python": f"{sys.prefix} {sys.version}"}
    for package in _IMPORTED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[f"{package} version"] = importlib.metadata.version(package)
    changed = max(path.stat().st_mtime_ns for path in Path(_PACKAGE_ROOT, "ddp_lab").rglob("*.[ps][yo]"))
    variables = {
        name: value
        for name, value in environment.items()
        if name not in _NEVER_AT_IMPORT and not name.startswith(_NEVER_PREFIXES)
    }
    return {**variables, **versions, "ddp_lab changed": str(changed)}


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
