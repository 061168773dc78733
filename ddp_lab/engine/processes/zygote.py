"""Imports torch once for all clusters of one client, and forks their fork servers and controllers from itself.

`python -m ddp_lab.engine.processes.zygote PARENT SECONDS` reads requests from standard input, a Unix socket that keeps
messages apart. A request carries five descriptors: a file with

    {"run": "fork_server", "controller" or "zygote", "arguments": [...], "environment": {...}}

(arguments without the parent), the new process's standard input, output and error, and a pipe to which two lines are
written: its process id when it is forked, its exit code when it has ended. To the socket one byte is written when the
imports have ended.

What it forks ends with it, and it with its parent: see `parent_watch`. It also ends when its parent has closed the
socket, or asked for nothing for so many seconds, and none of its processes runs.

With a FOLDER as third argument it serves every process of this user that connects to the socket `zygote` there, which
has one forked for itself. It ends with its parent only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...machine import no_collector
from . import controller, fork_server, parent_watch

_QUIET_SECONDS = 1.0  # without a request, until it prepares what ranks will need
_DESCRIPTORS = 5


class Zygote:
    """What clients have asked for; one thread.

    Args:
        channels: sockets of clients.
        listeners: sockets to which clients connect.
        seconds: without a client's request or a process of its own, until it ends.
    """

    def __init__(self, channels: set[socket.socket], listeners: set[socket.socket], seconds: float) -> None:
        self._channels = channels
        self._listeners = listeners
        self._seconds = None if math.isinf(seconds) else seconds
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> process id, pipe for its exit code
        self._failure: str | None = None

    @property
    def failed(self) -> bool:
        """Whether an import has failed."""
        return self._failure is not None

    def load(self) -> None:
        """Imports what fork servers and controllers need; an error is told to who asks for one."""
        try:
            fork_server.load()
            with no_collector():
                importlib.import_module("ipyparallel.controller.app")
        except BaseException:  # noqa: BLE001 - it is told to who asks
            self._failure = traceback.format_exc()
            return
        for channel in self._channels:
            with contextlib.suppress(ConnectionError):
                channel.send(b"1")

    def serve(self) -> Callable[[], None] | None:
        """Forks and reaps until nobody needs it; in a forked process, returns what that runs."""
        prepared = False
        while self._channels or self._children or self._listeners:
            waits: list[Any] = [*self._channels, *self._children, *self._listeners]
            seconds = None if self._children else self._seconds
            ready, _, _ = select.select(waits, [], [], seconds if prepared else _QUIET_SECONDS)
            for pidfd in self._children.keys() & set(ready):
                self._reap(pidfd)
            for channel in self._channels & set(ready):
                if (child := self._answer(channel)) is not None:
                    return child
            for listener in self._listeners & set(ready):
                self._accept(listener)
            if not ready and not prepared:
                fork_server.prepare()
                prepared = True
            elif not ready:  # from now on a request fails where it is made; one that is here already is answered
                for channel in self._channels:
                    channel.shutdown(socket.SHUT_RD)
        return None

    def _accept(self, listener: socket.socket) -> None:
        channel, _ = listener.accept()
        _, uid, _ = struct.unpack(
            "3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if uid == os.getuid():
            self._channels.add(channel)
        else:
            channel.close()

    def _answer(self, channel: socket.socket) -> Callable[[], None] | None:
        descriptors = list[int]()
        with contextlib.suppress(ConnectionResetError):  # closed before that byte was read
            _, descriptors, _, _ = socket.recv_fds(channel, 1, _DESCRIPTORS)
        if len(descriptors) < _DESCRIPTORS:
            self._channels.remove(channel)
            channel.close()
            return None
        body, *streams, status = descriptors
        with os.fdopen(body, "rb") as file:
            request = json.loads(file.read())
        if self._failure is not None:
            os.write(streams[1], json.dumps({"event": "failed", "error": self._failure}).encode() + b"\n")
            self._channels.remove(channel)
            channel.close()
        elif (pid := os.fork()) == 0:
            self._become(request["environment"], streams, status)
            return lambda: _PROGRAMS[request["run"]]([str(os.getppid()), *request["arguments"]])
        else:
            os.write(status, f"{pid}\n".encode())
            self._children[os.pidfd_open(pid)] = pid, os.dup(status)
        for descriptor in (*streams, status):
            os.close(descriptor)
        return None

    def _become(self, environment: Mapping[str, str], streams: Sequence[int], status: int) -> None:
        """In the forked process: nothing of the zygote's is left, and its surroundings are those of the request."""
        os.setsid()
        for channel in (*self._channels, *self._listeners):
            channel.close()
        for pidfd, (_, other) in self._children.items():
            os.close(pidfd)
            os.close(other)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(status)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        time.tzset()

    def _reap(self, pidfd: int) -> None:
        pid, status = self._children.pop(pidfd)
        # Told before it is reaped: until then nothing else can have its id.
        ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{code}\n".encode())
        os.waitpid(pid, 0)
        os.close(status)
        os.close(pidfd)


def main(argv: list[str]) -> None:
    """Serves its clients; in a forked process, runs that.

    Args:
        argv: the process to end with; seconds; a folder, if there may be several clients.
    """
    parent, seconds, *folder = argv
    channels = set() if folder else {socket.socket(fileno=os.dup(0))}
    listeners = {_listener(Path(folder[0]))} if folder else set()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    parent_watch.has_client(int(parent))
    parent_watch.on_exit(int(parent), lambda: parent_watch.end_and_remove(*folder) if folder else os._exit(0))
    zygote = Zygote(channels, listeners, float(seconds))
    zygote.load()
    if zygote.failed and folder:  # each client finds out by itself
        os._exit(1)
    child = zygote.serve()
    if child is None:
        os._exit(zygote.failed)
    code = 1
    try:
        child()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        traceback.print_exc()
    # Not the interpreter's own end: after an import of torch it takes half a second of processor time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listener(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(str(folder / "zygote"))
    made.listen()
    return made


_PROGRAMS: Mapping[str, Callable[[list[str]], None]] = {
    "fork_server": fork_server.main,
    "controller": controller.main,
    "zygote": lambda argv: main(argv[1:]),  # it ends with its client
}

if __name__ == "__main__":
    main(sys.argv[1:])
