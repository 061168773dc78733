"""Imports torch once for all clusters of one client, and forks their fork servers and controllers from itself.

`python -m ddp_lab.engine.processes.zygote PARENT SECONDS` reads requests from standard input, a Unix socket that keeps
messages apart. A request carries five descriptors: a file with

    {"run": "fork_server" or "controller", "arguments": [...], "environment": {...}}

(arguments without the parent), the new process's standard input, output and error, and a pipe to which two lines are
written: its process id when it is forked, its exit code when it has ended. To the socket one byte is written when the
imports have ended.

What it forks ends with it, and it with its parent: see `parent_watch`. It also ends when its parent has closed the
socket, or asked for nothing for so many seconds, and none of its processes runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...machine import no_collector
from . import controller, fork_server, parent_watch

_QUIET_SECONDS = 1.0  # without a request, until it prepares for errors
_DESCRIPTORS = 5
_PROGRAMS: Mapping[str, Callable[[list[str]], None]] = {"fork_server": fork_server.main, "controller": controller.main}


class Zygote:
    """What one client has asked for; one thread.

    Args:
        channel: the socket.
        seconds: without a process of its own, until it ends.
    """

    def __init__(self, channel: socket.socket, seconds: float) -> None:
        self._channel = channel
        self._seconds = seconds
        self._open = True  # whether there can be requests
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
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(b"1")

    def serve(self) -> Callable[[], None] | None:
        """Forks and reaps until nobody needs it; in a forked process, returns what that runs."""
        prepared = False
        while self._open or self._children:
            seconds = None if self._children else self._seconds
            waits: list[Any] = [self._channel, *self._children] if self._open else [*self._children]
            ready, _, _ = select.select(waits, [], [], seconds if prepared else _QUIET_SECONDS)
            for pidfd in self._children.keys() & set(ready):
                self._reap(pidfd)
            if self._channel in ready and (child := self._answer()) is not None:
                return child
            if not ready and not prepared:
                fork_server.format_a_collectives_traceback()
                prepared = True
            elif not ready:  # from now on a request fails where it is made; one that is here already is answered
                self._channel.shutdown(socket.SHUT_RD)
        return None

    def _answer(self) -> Callable[[], None] | None:
        descriptors = list[int]()
        with contextlib.suppress(ConnectionResetError):  # closed before that byte was read
            _, descriptors, _, _ = socket.recv_fds(self._channel, 1, _DESCRIPTORS)
        if len(descriptors) < _DESCRIPTORS:
            self._open = False
            return None
        body, *streams, status = descriptors
        with os.fdopen(body, "rb") as file:
            request = json.loads(file.read())
        if self._failure is not None:
            os.write(streams[1], json.dumps({"event": "failed", "error": self._failure}).encode() + b"\n")
            self._open = False
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
        self._channel.close()
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


def main(parent: int, seconds: float) -> None:
    """Serves one client; in a forked process, runs that."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    parent_watch.on_parent_exit(parent, lambda: os._exit(0))
    zygote = Zygote(channel, seconds)
    zygote.load()
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


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
