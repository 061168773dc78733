"""Clusters that outlive their client: started below a supervisor process, the keeper, and found by name.

[Note: who keeps a cluster]
Every process of a cluster ends with its parent (`ddp_lab.engine.processes.parent_watch`). The parent of a detached
cluster is not the client but a keeper (`ddp_lab.engine.processes.keeper`): a small process of its own session that
holds the fork server's pipe and stores what a later client must know: the ranks' processes and engines, their
placement, the wire's keys. A client attaches to it through a Unix socket in the cluster's folder, and from then on
talks to the fork server through it. That connection is also the lease: while it is open, the cluster stays. When it
closes, however the client ended, the idle timeout starts; when that expires, the keeper ends everything.

Cells and events do not pass through the keeper. Engines stay connected to the controller, to which the next client
connects as the last one did. The wire's sockets belong to the client and are in the cluster's folder: the next client
can listen at the same address with the same keys. Ranks reconnect by themselves, and say hello each time
(`ddp_lab.engine.telemetry`). The client then introduces itself (`ddp_lab.engine.cells.last_cell`) and receives again
the events that the ring still holds, and all descriptions. A keeper that owned the sockets would be a second copy of
the wire, and would have to forward every event.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import machine
from ...errors import ClusterError
from ...protocol import registry
from ...protocol.entry_points import KEEPER
from .launchers import Controller, ForkServer, check_client, make_run_dir, tail
from .zygote import not_debugged, process_environment

_ANSWER_SECONDS = 10.0
_END_SECONDS = 10.0


@dataclass(frozen=True)
class DetachedCluster:
    """A detached cluster that can be found by name.

    Attributes:
        name: its name, for `Cluster.attach`.
        ranks: how many ranks are alive, of how many.
        attached: process id of the client that is attached; None if there is none.
        since: since when it has been attached, or not, in seconds since the epoch.
        idle_timeout: how many seconds the cluster lives without a client.
        left_seconds: how much of that is left; None while a client is attached.
        keeper: process id of its keeper.
    """

    name: str
    ranks: tuple[int, int]
    attached: int | None
    since: float
    idle_timeout: float
    left_seconds: float | None
    keeper: int


class Keeper:
    """This client's hold on a detached cluster. See [Note: who keeps a cluster].

    Attributes:
        name: the cluster's.
        run_dir: the cluster's folder.
        notes: data that the last client left for this one.
        alone_since: when the last client disconnected, in seconds since the epoch.
        controller: the cluster's.
        fork_server: the cluster's.
        on_taken: called on the reader thread with the process that takes the cluster over; nothing of the cluster may
            be held when it returns.
    """

    def __init__(self, name: str, connection: socket.socket, run_dir: Path, attached: Mapping[str, Any]) -> None:
        self.name = name
        self.run_dir = run_dir
        self.notes: dict[str, Any] = dict(attached["notes"])
        self.pids: dict[str, int] = dict(attached["pids"])
        self.idle_timeout = float(attached["seen"]["lease_seconds"])
        self.alone_since = float(attached["alone_since"])
        self.on_taken: Callable[[int], None] | None = None
        self._socket = connection
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()
        self.controller = _KeptController(self, attached["controller_ended"])
        self.fork_server: ForkServer = _KeptForkServer(self, attached)
        self._reader = threading.Thread(target=self._read, name="ddp_lab-keeper", daemon=True)

    @classmethod
    def start(cls, name: str, idle_timeout: float, environment: Mapping[str, str]) -> Keeper:
        """Starts a keeper, with it controller and fork server, and attaches to it.

        Raises:
            ClusterError: a cluster of that name exists.
        """
        check_client()
        run_dir = make_run_dir()
        try:
            controller, fork_server = Controller(run_dir), ForkServer(run_dir, environment)
            spec = {
                "name": name,
                "registry": str(registry.folder()),
                "run_dir": str(run_dir),
                "cwd": os.getcwd(),
                "lease_seconds": idle_timeout,
                "controller": {
                    "argv": controller.command("{keeper}"),
                    "env": process_environment({}),
                    "log": str(run_dir / "controller.log"),
                },
                "fork_server": {
                    "argv": fork_server.command("{keeper}"),
                    "env": process_environment(environment),
                    "log": str(run_dir / "fork_server.log"),
                },
            }
            with not_debugged():
                done = subprocess.run(
                    [sys.executable, "-m", KEEPER],
                    input=json.dumps(spec).encode() + b"\n",
                    capture_output=True,
                    env=process_environment({}),
                    cwd="/",
                    start_new_session=True,
                    check=False,
                )
            said = done.stdout.decode().split()
            if said == ["exists"]:
                raise ClusterError(f"a detached cluster {name!r} is already running: use `%cluster attach {name}`")
            if said[:1] != ["ready"]:
                raise ClusterError(
                    "the cluster's supervisor process did not start:\n"
                    f"{done.stderr.decode()}{tail(run_dir / 'keeper.log')}"
                )
            return cls._attach(name, run_dir / "keeper", int(said[1]), False)
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise

    @classmethod
    def find(cls, name: str | None, take_over: bool = False) -> Keeper:
        """Attaches to a running cluster.

        Args:
            name: which cluster; None if there is only one.
            take_over: whether to disconnect a client that is attached.

        Raises:
            ClusterError: there is none, or another client is attached.
        """
        entry = find(name)
        return cls._attach(entry.name, Path(entry.socket), entry.pid, take_over)

    @classmethod
    def _attach(cls, name: str, path: Path, pid: int, take_over: bool) -> Keeper:
        connection = _connect(path, pid)
        try:
            answer = _ask(connection, {"op": "attach", "take_over": take_over})
            if answer["event"] != "attached":
                who = f"process {answer['by']}" + (" (this one)" if answer["by"] == os.getpid() else "")
                if answer.get("stuck"):
                    words = f"{who} did not disconnect; stop that process"
                    raise ClusterError(f"cluster {name!r} can't be taken over: {words}")
                raise ClusterError(
                    f"{who} has been attached to cluster {name!r} since {_clock(answer['since'])}; only one client "
                    f"can be attached. `%cluster attach {name} --take-over` (or take_over=True) disconnects it"
                )
            if "events" not in answer:
                raise ClusterError(
                    f"cluster {name!r} was started by another version of ddp_lab: attach with that version, or wait "
                    "until its idle timeout expires"
                )
            return cls(name, connection, path.parent, answer)
        except BaseException:
            connection.close()
            raise

    def listen(self) -> None:
        """Receives events from now on."""
        self._reader.start()

    def note(self, **notes: Any) -> None:
        """Stores data for the next client; JSON-able."""
        self.send({"op": "note", "notes": notes})

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the keeper, or through it to the fork server."""
        with self._lock, contextlib.suppress(OSError):  # it has ended, which the reader reports
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def leave(self) -> None:
        """Disconnects; the cluster's idle timeout starts."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader.ident is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._file.close()
        self._socket.close()

    def stop(self) -> None:
        """Ends the cluster and waits until its processes have ended."""
        descriptor = _pidfd(self.pids["keeper"])
        self.send({"op": "stop"})
        if descriptor is not None:
            with os.fdopen(descriptor) as process:
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                select.select([process], [], [], _END_SECONDS)
        self.leave()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed from here
            for line in self._file:
                event = json.loads(line)
                if event["event"] == "ended":
                    self.fork_server.take_end(self.fork_server._how(event["code"]), self._log())
                elif event["event"] == "controller ended":
                    self.controller.take_end(event["code"])
                elif event["event"] == "controller started":
                    self.pids["controller"] = event["pid"]
                elif event["event"] == "taken":
                    self._let_go(event["by"])
                    return
                else:
                    self.fork_server._hear(event)
        self.fork_server.take_end(
            f"the cluster's supervisor (process {self.pids['keeper']}) ended, or its idle timeout expired", self._log()
        )

    def _let_go(self, by: int) -> None:
        self.fork_server.take_end(f"process {by} took the cluster over", of_rank=f"was taken over by process {by}")
        if self.on_taken is not None:
            self.on_taken(by)

    def _log(self) -> str:
        return f"; the end of the log:\n{tail(self.run_dir / 'fork_server.log')}"


class _KeptController(Controller):
    """The controller of a detached cluster."""

    def __init__(self, keeper: Keeper, code: int | None) -> None:
        super().__init__(keeper.run_dir)
        self._keeper = keeper
        self._code = code

    @property
    def pid(self) -> int | None:
        return self._keeper.pids["controller"] if self._code is None else None

    def take_end(self, code: int) -> None:
        """On the keeper's reader thread: the controller has ended."""
        self._code = code

    def _exit_code(self) -> int | None:
        return self._code

    def start(self, engine_address: str | None = None) -> None:
        """It runs."""

    def start_again(self) -> None:
        self._begin_log()
        self._code = None
        self._keeper.send({"op": "controller"})

    def stop(self) -> None:
        """Nothing: the keeper ends it."""


class _KeptForkServer(ForkServer):
    """The fork server of a detached cluster."""

    def __init__(self, keeper: Keeper, attached: Mapping[str, Any]) -> None:
        super().__init__(keeper.run_dir, {})
        self._keeper = keeper
        for event in attached["events"]:
            self._take(event)
        if attached["ended"] is not None:
            self.take_end(self._how(attached["ended"]))

    @property
    def pid(self) -> int | None:
        return self._keeper.pids["fork server"]

    def start(self) -> None:
        """It runs."""
        self._keeper.listen()

    def stop(self) -> None:
        """Nothing: the keeper ends it."""

    def _send(self, command: Mapping[str, Any]) -> None:
        self._keeper.send(command)


def detached_clusters() -> list[DetachedCluster]:
    """This user's detached clusters on this machine, by name."""
    found = []
    for entry in registry.entries(registry.folder()):
        try:
            with _connect(Path(entry.socket), entry.pid) as connection:
                seen = _ask(connection, {"op": "look"})
        except ClusterError:  # it has just ended
            continue
        ranks = seen["living"], seen["world_size"]
        times = seen["since"], seen["lease_seconds"], seen["left_seconds"]
        found.append(DetachedCluster(entry.name, ranks, seen["attached"], *times, entry.pid))
    return found


def find(name: str | None) -> registry.Entry:
    """The entry of a cluster of this user on this machine; None for the only one.

    Raises:
        ClusterError: there is none, or there are several.
    """
    known = {entry.name: entry for entry in registry.entries(registry.folder())}
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name in known:
        return known[name]
    there = f"there are {', '.join(known)}" if known else "none is running (its idle timeout may have expired)"
    if name is None and not known:
        raise ClusterError("no detached cluster is running (its idle timeout may have expired)")
    what = "give the name of the detached cluster" if name is None else f"no detached cluster is named {name!r}"
    raise ClusterError(f"{what}: {there}")


def free_name() -> str:
    """A name that no detached cluster of this user has: ``lab-1``, ``lab-2``, ..."""
    taken = {entry.name for entry in registry.entries(registry.folder())}
    return next(name for number in range(1, len(taken) + 2) if (name := f"lab-{number}") not in taken)


def _connect(path: Path, pid: int) -> socket.socket:
    """A connection to a keeper; the kernel confirms that it is the expected process of this user.

    Raises:
        ClusterError: no process answers, or another one does.
    """
    _check(machine.hindrances(pid))
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_SECONDS)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise ClusterError(f"the cluster's supervisor (process {pid}) does not respond: {error}") from error
    found, user = _peer(connection)
    if (found, user) != (pid, os.getuid()):
        connection.close()
        raise ClusterError(f"{path} belongs to process {found} of user {user}, not to the cluster's supervisor process")
    return connection


def _ask(connection: socket.socket, question: Mapping[str, Any]) -> dict[str, Any]:
    """The keeper's first line; what follows it is not read."""
    try:
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rb", buffering=0) as file:
            said = file.readline()
    except OSError as error:
        _check(machine.hindrances(_peer(connection)[0]))
        raise ClusterError(f"the cluster's supervisor process does not respond: {error}") from error
    if not said.endswith(b"\n"):
        raise ClusterError("the cluster has just ended")
    connection.settimeout(None)
    answer: dict[str, Any] = json.loads(said)
    return answer


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _check(hindrances: Sequence[str]) -> None:
    """Raises `ClusterError` if something keeps the keeper from running."""
    if hindrances:
        raise ClusterError(f"the cluster's supervisor process {'; '.join(hindrances)}")


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
