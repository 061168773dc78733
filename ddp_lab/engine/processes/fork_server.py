"""Imports torch once, then forks one engine per rank: a rank starts in tenths of a second and shares torch's pages.

`python -m ddp_lab.engine.processes.fork_server PARENT RUN_DIR` reads one JSON object a line from standard input and
answers the same way on standard output:

    {"op": "fork", "connection": {...}, "ranks": [{"rank": 0, "env": {...}, "log": "...", "client": {...},
      "folder": "...", "gives_way": true}, ...]}
    {"op": "signal", "rank": 0, "signal": 15}
    {"op": "ping"}, and the questions of `AddressProbe`, with an "id"

The end of its input ends every rank.

Events: `stage` (what it does now), `ready`, `forked` (rank, pid), `exited` (rank, pid, code; minus the signal's number
if one ended it), `failed` (traceback), `answer` (id), `pong`. It holds no CUDA context, no sockets and runs no tensor
operation, so that a forked rank starts clean. Its ranks can't outlive it, nor it its parent: see `parent_watch`.

[Note: ranks give way]
CPU ranks train on all cores, beside the notebook's kernel and page: these wait for a core at every turn, and the page
then stops for up to a tenth of a second. So CPU ranks run at a lower priority; where nothing else wants the cores they
are as fast as before. Linux may share cores between sessions, not processes (`autogroup`): ranks then have the fork
server's session, not each its own, so that one that waits for another hands its core on; and a process's nice value
counts only within its session, which has one too. A rank of a GPU keeps its priority, because the GPU waits for it;
with DDP_LAB_GIVE_WAY=0 every rank does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import json
import logging
import math
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import machine
from ...machine import no_collector, visible_gpus
from ...protocol import entry_points
from . import parent_watch

_TERM_SECONDS = 0.5
_NICE = 5  # of a rank that gives way: it gets a third of what another busy process gets
_LAST_WORDS = 16_384  # bytes of a rank's log that travel to another host
_USED_BY_ENGINES = (
    "ipykernel.debugger",
    "ipyparallel.engine.app",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "numpy.random",
    "sqlite3",
    "threadpoolctl",
    "tornado.platform.asyncio",
)


class ForkServer:
    """The ranks that this process forked, and the channel to the client.

    Args:
        run_dir: the cluster's folder.
        commands: descriptor that the client writes to.
        events: descriptor that the client reads.
        logs: folder for logs of ranks if the client is on another host; the end of a log is sent when its rank ends.
        lease: seconds without a command after which the client counts as lost; None: its end is noticed directly.
    """

    def __init__(
        self, run_dir: str, commands: int, events: int, logs: Path | None = None, lease: float | None = None
    ) -> None:
        self._run_dir = run_dir
        self._logs = logs
        self._lease = lease
        self._address_probe = AddressProbe()
        self._commands = commands
        self._events = events
        # pid -> rank; forked by one thread, ended by whichever learns of the end first
        self._ranks: dict[int, int] = {}
        self._forking = threading.Lock()
        self._ending = False
        self._buffer = b""
        self._heard_s = 0.0  # when the client was last heard

    def send(self, event: str, **content: Any) -> None:
        """Writes one event to the client; the parent watch handles a client that has exited."""
        if self._ending:  # the end of a rank that this process kills for its own end is no news
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._events, json.dumps({"event": event, **content}).encode() + b"\n")

    def end_now(self) -> None:
        """Kills every rank with the processes it started, removes the cluster's files, ends this process."""
        self._ending = True
        self._forking.acquire()  # permanently: no more ranks are forked, which would create files again
        for pid in list(self._ranks):
            _kill_group(pid)
        for pid in list(self._ranks):
            with contextlib.suppress(ChildProcessError):  # the other thread has reaped it
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        parent_watch.end_and_remove(self._run_dir)

    def serve(self) -> Callable[[], None] | None:
        """Forks, signals and reaps until the input ends; in a forked rank, returns the function that it runs."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        os.set_blocking(wakeup_read, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._commands, selectors.EVENT_READ)
            selector.register(wakeup_read, selectors.EVENT_READ)
            while True:
                ready = selector.select(self._lease)
                if self._silent_for() > (self._lease or math.inf):
                    self._end_gently()
                    return None
                for key, _ in ready:
                    if key.fd == wakeup_read:
                        os.read(wakeup_read, 4096)
                        self._reap()
                        continue
                    data = os.read(self._commands, 1 << 16)
                    self._heard_s = time.monotonic()
                    if not data:
                        self._end_gently()
                        return None
                    for command in self._lines(data):
                        child = self._obey(command)
                        if child is not None:
                            signal.set_wakeup_fd(-1)
                            os.close(wakeup_read)
                            os.close(wakeup_write)
                            return child

    def _silent_for(self) -> float:
        """Seconds since the client was last heard; unread input counts as heard."""
        waiting, _, _ = select.select([self._commands], [], [], 0)
        return 0.0 if waiting else time.monotonic() - self._heard_s

    def _end_gently(self) -> None:
        """Asks every rank to end, so that its atexit functions run, and waits a moment."""
        for pid in self._ranks:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while self._ranks and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _obey(self, command: Mapping[str, Any]) -> Callable[[], None] | None:
        if command["op"] == "fork":
            for spec in command["ranks"]:
                server = os.getpid()
                with self._forking:
                    pid = os.fork()
                    if pid != 0:
                        self._ranks[pid] = spec["rank"]
                if pid == 0:
                    parent_watch.kill_with_parent_thread(server)
                    os.setpgid(0, 0)
                    os.close(self._commands)
                    os.close(self._events)
                    log = spec["log"] if self._logs is None else str(self._log_of(spec["rank"]))
                    return lambda: _run_rank(spec, log, command["connection"], self._run_dir)
                self.send("forked", rank=spec["rank"], pid=pid)
        elif command["op"] == "signal":
            for pid, rank in self._ranks.items():
                if rank == command["rank"]:
                    if command["signal"] == signal.SIGKILL:
                        _kill_group(pid)
                    else:
                        os.kill(pid, command["signal"])
        elif command["op"] == "ping":
            self.send("pong")
        elif (answer := self._address_probe.answer(command)) is not None:
            self.send("answer", id=command["id"], **answer)
        return None

    def _log_of(self, rank: int) -> Path:
        assert self._logs is not None
        return self._logs / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> dict[str, str]:
        """Further fields of an `exited` event: the end of the rank's log, for a client on another host."""
        if self._logs is None or not self._log_of(rank).exists():
            return {}
        return {"log": self._log_of(rank).read_bytes()[-_LAST_WORDS:].decode(errors="replace")}

    def _reap(self) -> None:
        for pid in list(self._ranks):
            # Handled before it is reaped: until then its process group's id can't be reused.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            rank = self._ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self.send("exited", rank=rank, pid=pid, code=code, **self._last_words(rank))


class AddressProbe:
    """Answers a client's questions about the network before ranks start; it holds a socket until the next `listen`.

    Host names are not reliable: a name may resolve to loopback, to an address of another network, or not at all. So the
    system is asked which address it would send from (`route`), and connections to listeners are tried (`listen`,
    `reach`).
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a command, None if it is not such a question.

        ``route``: ``address`` and ``interface`` from which this host reaches ``to``. ``listen``: the ``port`` of a
        socket that listens on ``address`` (None: the former one is closed). ``reach``: whether (``targets``: pairs of
        address and port) can be connected to within ``seconds``. A failure is returned as ``error``.
        """
        kinds = {"route": self._route, "listen": self._listen, "reach": self._reach}
        if command["op"] not in kinds:
            return None
        try:
            return kinds[command["op"]](command)
        except OSError as error:
            return {"error": error.strerror or str(error)}

    def _route(self, command: Mapping[str, Any]) -> dict[str, Any]:
        address = machine.local_address(command["to"])
        return {"address": address, "interface": machine.interface_of(address)}

    def _listen(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if command["address"] is None:
            return {}
        self._listener = socket.create_server((command["address"], 0))
        return {"port": self._listener.getsockname()[1]}

    def _reach(self, command: Mapping[str, Any]) -> dict[str, Any]:
        for address, port in command["targets"]:
            try:
                with contextlib.closing(socket.create_connection((address, port), command["seconds"])):
                    pass
            except OSError as error:
                return {"error": error.strerror or str(error), "target": [address, port]}
        return {}


def _give_way() -> None:
    """Lets other processes go first: see [Note: ranks give way]."""
    os.nice(_NICE)
    # A rank works without it too. There may be no such file, or none to write to; and of two changes within a tenth of
    # a second Linux refuses the second, after another rank of this session has made the first.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # its group does not exist before it has called setpgid
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


@functools.cache
def load() -> None:
    """Imports what every rank needs, once; nothing here may start a thread, open a socket or touch a GPU."""
    with no_collector():
        # An engine has no debugger's channel, yet ipykernel would import a hundred modules for it in every rank.
        sys.modules["debugpy"] = None  # type: ignore[assignment]
        for name in _USED_BY_ENGINES:
            importlib.import_module(name)
        del sys.modules["debugpy"]
        importlib.import_module("torch.distributed")
        importlib.import_module(entry_points.RANK).preload()
        _format_traceback_of({}.popitem)  # the imports and caches of the first one take 0.15 s


def _format_traceback_of(failing: Callable[[], Any]) -> None:
    from IPython.core import ultratb

    formatter: Any = ultratb.AutoFormattedTB
    try:
        failing()
    except (LookupError, TypeError):
        formatter(mode="Context").structured_traceback(*sys.exc_info())


@functools.cache
def format_a_collectives_traceback() -> None:
    """Pays for the first traceback through `torch.distributed`, whose source is parsed (0.3 s), for all ranks to come.

    A rank that paid when it fails would keep its peers' cell open for that long.
    """
    import torch.distributed as dist

    nothing: Any = None
    _format_traceback_of(lambda: dist.all_reduce(nothing))  # raised before any collective is entered


@functools.cache
def prepare() -> None:
    """Does for all ranks to come what each would do at its first optimizer and its first error.

    An optimizer imports torch's compiler (1.6 s). Not where there is a GPU: whether that import touches it depends on
    torch's build, and a process that has touched a GPU must not fork.
    """
    if not visible_gpus(os.environ):
        with no_collector():
            importlib.import_module("torch._dynamo")
    format_a_collectives_traceback()


def _run_rank(spec: Mapping[str, Any], log_path: str, connection: Mapping[str, Any], run_dir: str) -> None:
    """Becomes the engine of one rank; ends the process when the engine has been asked to end."""
    import numpy as np
    import torch
    from ipyparallel.engine.app import IPEngine
    from threadpoolctl import threadpool_limits
    from traitlets.config import Config

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [""]
    sys.path.pop(0)  # the fork server's folder; ipyparallel adds "", the current one, as in a notebook
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(spec["env"])
    if spec.get("gives_way") and os.environ.get("DDP_LAB_GIVE_WAY", "1") != "0":
        _give_way()
    np.random.seed()  # forked ranks must not share one state
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), "blas")  # numpy's
    config = Config()
    config.ProfileDir.location = os.path.join(run_dir, "profile")
    config.Application.log_level = logging.ERROR
    config.IPEngine.id = spec["rank"]
    config.IPEngine.work_dir = spec.get("folder") or os.getcwd()
    config.IPEngine.enable_nanny = False  # the fork server notices an exit, the agent relays interrupts
    config.IPEngine.max_heartbeat_misses = 0  # a paused controller must not end a rank
    config.IPEngine.timeout = 60.0

    class Engine(IPEngine):  # type: ignore[misc]
        """Answers the client as soon as it has a kernel; the controller counts it as registered after a heartbeat."""

        async def complete_registration(self, *arguments: Any) -> None:
            await super().complete_registration(*arguments)
            importlib.import_module(entry_points.RANK).connect(self.kernel, spec["rank"], spec["client"])

    engine = Engine.instance(config=config, connection_info_env=json.dumps(connection))
    engine.initialize([])
    # For crashes in C code; ipykernel's own would write to a pipe that is no longer read.
    faulthandler.enable(log, all_threads=False)
    try:
        engine.start()
    except RuntimeError as error:  # tornado's words for a loop that is stopped: how an engine is asked to end
        if "loop stopped" not in str(error):
            raise
    # Not the interpreter's own end: it would wait for threads that may sit in a collective.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def take_channel() -> tuple[int, int]:
    """The descriptors of standard input and output, from now on used only for the client.

    Printed text goes to the log, and Ctrl-C in the client's terminal is left to the client.
    """
    commands, events = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return commands, events


def serve(server: ForkServer, parent: int, failed: Callable[[], None] = lambda: None) -> None:
    """Serves one client until its end of the input closes; in a forked rank, becomes that rank.

    Args:
        server: an unused server.
        parent: the process with which it ends.
        failed: called when something that ranks need can't be imported.
    """
    parent_watch.on_parent_exit(parent, server.end_now)
    try:
        server.send("stage", name="importing torch")
        load()
    except BaseException:
        server.send("failed", error=traceback.format_exc())
        failed()
        raise
    server.send("ready")
    child = server.serve()
    if child is None:
        server.end_now()
    else:
        child()


def main(argv: list[str]) -> None:
    """Serves the client of a cluster on this machine: the process to end with, and the cluster's folder."""
    parent, run_dir = argv
    serve(ForkServer(run_dir, *take_channel()), int(parent))


if __name__ == "__main__":
    main(sys.argv[1:])
