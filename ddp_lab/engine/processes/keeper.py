"""Keeps a cluster that outlives its client: the parent of its controller and fork server, in the client's place.

`python -m ddp_lab.engine.processes.keeper` reads what to start from standard input (one JSON object), goes into the
background, writes ``ready PID`` and closes its output. Standard library only, and one thread. See [Note: who keeps a
cluster] in `ddp_lab.cluster.processes.keeper`.

Clients connect to its Unix socket and speak JSON, one object a line. The first line is ``{"op": "attach"}`` or
``{"op": "look"}``; an attached client sends the commands of the fork server (``fork``, ``signal``), and
``note`` (data for the next client), ``controller`` (start a new one: the former has ended) or ``stop``. It receives the
fork server's events, and ``ended`` (the fork server has), ``controller ended``, ``controller started`` or ``taken``
(another client has taken the cluster over). Invalid messages are counted, sometimes logged, and dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...printable import Dropped
from ...protocol import registry

_FIRST_CLIENT_SECONDS = 30.0  # for who has started it to attach, whatever the idle timeout
_SEND_SECONDS = 2.0
_TERM_SECONDS = 1.5
_YIELD_SECONDS = 5.0  # how long a client may take to disconnect when another one takes its cluster over
_BACKLOG = 16
_PAUSE_SECONDS = 0.05  # before retrying to accept a connection
_LONGEST_LINE = 16 << 20  # bytes


class _Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(_SEND_SECONDS)
        self.pid, self.uid, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        self._buffer = b""

    def lines(self) -> list[bytes] | None:
        """Its messages; None once it has disconnected."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines if len(self._buffer) <= _LONGEST_LINE else None

    def say(self, event: str, **content: Any) -> bool:
        """Whether the message could be sent."""
        return self.pass_on(json.dumps({"event": event, **content}).encode() + b"\n")

    def pass_on(self, line: bytes) -> bool:
        try:
            self.socket.sendall(line)
        except OSError:  # it has disconnected, or does not read
            return False
        return True


class Keeper:
    """A cluster's processes, and the attached client.

    Args:
        spec: ``name``, ``registry`` (folder), ``run_dir``, ``cwd`` (of the ranks), ``lease_seconds``, ``controller``
            and ``fork_server``: their ``argv`` (``"{keeper}"`` stands for this process's id), ``env`` and ``log``.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._lease: float = spec["lease_seconds"]
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()
        self._client: _Peer | None = None
        self._next: _Peer | None = None  # waits until the attached client has disconnected
        self._since = time.time()
        self._notes: dict[str, Any] = {}
        # The fork server's events for the next client: kind and rank -> the last event.
        self._events: dict[tuple[str, int | None], Mapping[str, Any]] = {}
        self._ended: int | None = None  # the fork server's exit code
        self._controller_ended: int | None = None  # the controller's
        self._dropped = Dropped()  # invalid messages
        self._rest = b""

    def open(self) -> None:
        """Listens, registers itself and starts the processes."""
        path = os.path.join(self._spec["run_dir"], "keeper")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        self._folder = Path(self._spec["registry"])
        registry.entries(self._folder)  # removes the remains of a cluster whose keeper was killed
        self._entry = registry.add(self._folder, self._spec["name"], path)
        self._start_controller()
        self._fork_server = self._start("fork_server", subprocess.PIPE)
        assert self._fork_server.stdout is not None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._fork_server.stdout, selectors.EVENT_READ, self._hear_fork_server)
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(read, selectors.EVENT_READ, self.end)
        self._deadline = time.monotonic() + _FIRST_CLIENT_SECONDS

    def serve(self) -> None:
        """Runs until a client says ``stop``, the lease expires or a signal ends this process."""
        while True:
            wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._next is not None:
                    self._refuse_next()
                else:
                    self.end()

    def end(self) -> None:
        """Ends everything, removes the cluster's files, ends this process."""
        assert self._fork_server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._fork_server.stdin.close()
        self._controller.terminate()
        for process in (self._fork_server, self._controller):
            try:
                process.wait(_TERM_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # ranks end with the fork server
                process.wait()
        registry.remove(self._folder, self._entry)
        shutil.rmtree(self._spec["run_dir"], ignore_errors=True)
        os._exit(0)

    def _start(self, name: str, pipe: int) -> subprocess.Popen[bytes]:
        given = self._spec[name]
        argv = [str(os.getpid()) if word == "{keeper}" else word for word in given["argv"]]
        log = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                argv,
                stdin=pipe,
                stdout=pipe if pipe == subprocess.PIPE else log,
                stderr=log,
                env=given["env"],
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _start_controller(self) -> None:
        self._controller = self._start("controller", subprocess.DEVNULL)
        self._controller_ended = None
        end = os.pidfd_open(self._controller.pid)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._hear_controllers_end(end))

    def _replace_controller(self, former_ended: int) -> None:
        try:
            self._start_controller()
        except OSError as error:  # e.g. too many open files: the ranks stay alive
            print(f"could not start a new controller: {error}", file=sys.stderr, flush=True)
            self._controller_ended = former_ended
        if self._client is None:
            return
        if self._controller_ended is None:
            self._client.say("controller started", pid=self._controller.pid)
        else:
            self._client.say("controller ended", code=former_ended)

    def _hear_controllers_end(self, end: int) -> None:
        self._selector.unregister(end)
        os.close(end)
        self._controller_ended = self._controller.wait()
        if self._client is not None:
            self._client.say("controller ended", code=self._controller_ended)

    # The fork server

    def _hear_fork_server(self) -> None:
        assert self._fork_server.stdout is not None
        data = os.read(self._fork_server.stdout.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(self._fork_server.stdout)
            self._ended = self._fork_server.wait()
            if self._client is not None:
                self._client.say("ended", code=self._ended)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._note_event(json.loads(line))
            if self._client is not None and not self._client.pass_on(line + b"\n"):
                self._lose(self._client)

    def _note_event(self, event: Mapping[str, Any]) -> None:
        kind, rank = event["event"], event.get("rank")
        if kind == "forked":
            self._events.pop(("exited", rank), None)
        if kind != "exited" or self._events.get(("forked", rank), {}).get("pid") == event["pid"]:
            self._events[kind, rank] = event

    # Clients

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left for it, or it has disconnected
            time.sleep(_PAUSE_SECONDS)
            return
        peer = _Peer(connection)
        if peer.uid != os.getuid():
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(peer))

    def _hear(self, peer: _Peer) -> None:
        lines = peer.lines()
        if lines is None:
            self._lose(peer)
            return
        for line in lines:
            message = _parsed(line)
            if message is None:
                self._drop(line)
            elif peer is self._client:
                self._obey(message, line)
            elif message["op"] == "look":
                peer.say("seen", **self._seen())
            elif message["op"] == "attach":
                self._attach(peer, bool(message.get("take_over")))
            else:
                self._drop(line)

    def _drop(self, line: bytes) -> None:
        """An invalid message: sometimes logged, see `Dropped`."""
        if self._dropped.one_more():
            print(f"messages dropped: {self._dropped.count}; the last one: {line[:80]!r}", file=sys.stderr, flush=True)

    def _seen(self) -> dict[str, Any]:
        """The facts for any process of this user."""
        left = None if self._client is not None or self._deadline is None else self._deadline - time.monotonic()
        living = [rank for kind, rank in self._events if kind == "forked" and ("exited", rank) not in self._events]
        return {
            "attached": self._client.pid if self._client is not None else None,
            "since": self._since,
            "lease_seconds": self._lease,
            "left_seconds": left,
            "living": len(living),
            "world_size": self._notes.get("world_size", len(living)),
        }

    def _attach(self, peer: _Peer, take_over: bool) -> None:
        if self._client is None:
            self._adopt(peer)
        elif not take_over or self._next is not None:
            peer.say("refused", by=self._client.pid, since=self._since)
            self._lose(peer)
        else:
            self._next = peer
            self._deadline = time.monotonic() + _YIELD_SECONDS
            self._client.say("taken", by=peer.pid)  # it disconnects; see `_lose`

    def _adopt(self, peer: _Peer) -> None:
        alone_since = self._since
        self._client, self._next, self._deadline, self._since = peer, None, None, time.time()
        peer.say(
            "attached",
            events=list(self._events.values()),
            ended=self._ended,
            controller_ended=self._controller_ended,
            notes=self._notes,
            pids={"keeper": os.getpid(), "controller": self._controller.pid, "fork server": self._fork_server.pid},
            seen=self._seen(),
            alone_since=alone_since,
        )

    def _refuse_next(self) -> None:
        """The attached client does not disconnect: it may be suspended."""
        assert self._client is not None
        assert self._next is not None
        peer, self._next, self._deadline = self._next, None, None
        peer.say("refused", by=self._client.pid, since=self._since, stuck=True)
        self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        """A connection has ended, or must end."""
        if peer.socket.fileno() >= 0:
            self._selector.unregister(peer.socket)
            peer.socket.close()
        if peer is self._next:
            self._next = self._deadline = None
        elif peer is self._client:
            self._client, self._since = None, time.time()
            # Ranks that never joined are useless.
            self._deadline = time.monotonic() + (self._lease if self._notes.get("joined") else 0.0)
            if self._next is not None:
                self._adopt(self._next)

    def _obey(self, message: Mapping[str, Any], line: bytes) -> None:
        op = message["op"]
        if op == "note" and isinstance(message.get("notes"), dict):
            self._notes.update(message["notes"])
        elif op == "controller":
            if self._controller_ended is not None:
                self._replace_controller(self._controller_ended)
        elif op == "stop":
            self.end()
        elif _for_fork_server(message):
            for one in message.get("ranks", ()):
                self._events.pop(("forked", one["rank"]), None)
                self._events.pop(("exited", one["rank"]), None)
                one["folder"] = self._spec["cwd"]  # whichever client asks
            assert self._fork_server.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended, which the client is told
                self._fork_server.stdin.write(json.dumps(message).encode() + b"\n")
                self._fork_server.stdin.flush()
        else:
            self._drop(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A message; None if it is invalid."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("op"), str) else None


def _for_fork_server(message: Mapping[str, Any]) -> bool:
    """Whether the fork server would understand it."""
    if message["op"] == "signal":
        return isinstance(message.get("rank"), int) and isinstance(message.get("signal"), int)
    ranks = message.get("ranks")
    if message["op"] != "fork" or not isinstance(ranks, list) or not isinstance(message.get("connection"), dict):
        return False
    wanted = {"rank": int, "env": dict, "log": str}
    return all(isinstance(one, dict) and all(isinstance(one.get(n), k) for n, k in wanted.items()) for one in ranks)


def main() -> None:
    """Goes into the background and supervises a cluster."""
    spec = json.loads(sys.stdin.readline())
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    os.chdir("/")
    out = os.dup(1)
    os.set_inheritable(out, False)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(os.path.join(spec["run_dir"], "keeper.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    keeper = Keeper(spec)
    try:
        keeper.open()
    except FileExistsError:
        os.write(out, b"exists\n")
        return
    os.write(out, f"ready {os.getpid()}\n".encode())
    os.close(out)
    keeper.serve()


if __name__ == "__main__":
    main()
