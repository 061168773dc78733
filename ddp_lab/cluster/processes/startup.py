"""Starts a cluster's processes and connects to them: controller, fork server, one engine per rank.

Controller and fork server start together. A rank that the fork server forks registers with the controller, as an engine
of ipyparallel, and thereby gets its kernel. It connects to the client's wire at once, over which it is asked to join.

[Note: a controller that was killed]
Neither ranks nor cells need the controller: only the start of an engine and ipyparallel's own requests (`%%px`) travel
through it. Code that waits for a cell monitors it (`Processes.look_after`): if it has ended, a successor is started, to
which engines connect by themselves (see [Note: a controller that takes over] in
`ddp_lab.engine.processes.controller`). ipyparallel's client does not learn which engines were unregistered while it had
no connection: it is replaced when it is asked for again.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ... import machine
from ...control.interrupts import interrupts_deferred
from ...control.wire import Wire
from ...errors import ClusterError
from ...protocol.entry_points import RANK, RankFunction
from ...protocol.messages import Call, CellReport, RequestFailure, arguments, report_of
from .devices import Placement
from .launchers import Controller, ForkServer, RankProcess, check_client, make_run_dir

if TYPE_CHECKING:
    from .keeper import Keeper
    from .remote_launchers import HostServers


Progress = Callable[[float, str], None]

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.004
_LOOK_SECONDS = 1.0  # between two checks of a wait whether a process can continue
_HINDERED_SECONDS, _UNSEEN_SECONDS = 10.0, 2.0  # for a wait on a process that can't; without visible progress
_ANSWER_SECONDS = 10.0  # for the controller's first answer, before it is asked again
_LIMIT_SECONDS = 180.0  # limit of a start whose processes are all alive
_MISSED_SECONDS = 2.0  # until a client that lacks an engine is replaced
_AGAIN_SECONDS = 0.5  # until an engine that has not answered is asked again
_SUCCESSORS, _SUCCESSOR_SECONDS = 5, 60.0  # at most so many controllers may end within that time
_IMPORT_SECONDS = 1.5  # typical; only the bar's speed depends on it
_CONNECTING = "starting the controller"


class Processes:
    """Controller, fork server and engines of one cluster.

    Args:
        placement: how many ranks, where, with which variables.
        keeper: of a cluster that outlives this process.
    """

    def __init__(self, placement: Placement, keeper: Keeper | None = None) -> None:
        self.placement = placement
        self.wire: Wire | None = None  # to the ranks, set before they are forked
        self.engine_of_rank: dict[int, int] = {}
        self._uuids: dict[int, str] = {}  # of engines, by which the controller knows them
        self._client: Any = None
        self._reached: set[str] = set()  # uuids of engines that have answered the client
        self.prepared: dict[int, dict[str, Any]] = {}
        self._connection: dict[str, dict[str, Any]] = {}
        self._former_clients: list[Any] = []
        self._looking = threading.Lock()  # guards the next three
        self._ends: list[str] = []
        self._ended_s: list[float] = []
        self._up = False
        self._heard = 0  # controllers that had ended when the client connected
        self.keeper = keeper
        self._folder: str | None = None  # of ranks; None: their fork server's
        if keeper is None:
            check_client()
            self._folder = os.getcwd()
            self._run_dir = make_run_dir()
            self.controller = Controller(self._run_dir)
            self.fork_server: ForkServer | HostServers = ForkServer(self._run_dir, placement.environment)
        else:
            self._run_dir = keeper.run_dir
            self.controller, self.fork_server = keeper.controller, keeper.fork_server
        self.logs = self._run_dir / "outputs"  # of cells that print much

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of everything that runs for this cluster."""
        server = self.fork_server
        found = {"controller": self.controller.pid, "fork server": server.pid, "zygote": server.zygote_pid}
        if self.keeper is not None:
            found["keeper"] = self.keeper.pids["keeper"]
        ranks = {
            f"rank {rank}": pid for rank, pid in self.fork_server.pids.items() if rank not in self.fork_server.exits
        }
        return {name: pid for name, pid in found.items() if pid is not None} | ranks

    def reach(self, progress: Progress) -> str:
        """Starts what ranks are forked from; returns where the wire must listen: an address, or a folder."""
        self.fork_server.start()
        folder = self._run_dir / "wire"
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder)

    def place_of(self, rank: int) -> dict[str, Any]:
        """The data on a rank's place that `ddp_lab.engine.rank.join` needs."""
        return {
            "local_rank": rank,
            "local_world_size": self.placement.world_size,
            "host_index": 0,
            "address": LOOPBACK,
            "interface": "lo",
            "device": self.placement.devices[rank],
        }

    def endpoint_of(self, rank: int, endpoint: Mapping[str, str]) -> dict[str, str]:
        """The wire's endpoint as a rank reaches it."""
        return dict(endpoint)

    def clocks(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Host's name -> its clock (`ddp_lab.machine.host_clock`) and ranks, for hosts that may have another clock."""
        return {}

    @property
    def broken(self) -> bool:
        """Whether new ranks require a restart of everything."""
        return self.fork_server.failed or self._disturbed

    @property
    def _disturbed(self) -> bool:
        """Whether a controller of this cluster ended unexpectedly, or a required process can't continue."""
        needed = [pid for name, pid in self._on_this_machine() if not name.startswith("rank")]
        return self.controller.ended is not None or bool(self._ends) or any(map(machine.hindrances, needed))

    def look_after(self) -> tuple[str, ...]:
        """How this cluster's former controllers ended, in words; if the last one has ended, starts a new one.

        See [Note: a controller that was killed]. Any thread.

        Raises:
            ClusterError: it has ended repeatedly; the message contains the end of its log.
        """
        with interrupts_deferred(), self._looking:
            if self._up and (ended := self.controller.ended) is not None:
                now = time.monotonic()
                self._ended_s = [at for at in self._ended_s if now - at < _SUCCESSOR_SECONDS]
                if len(self._ended_s) == _SUCCESSORS:
                    self.controller.check()
                self._ended_s.append(now)
                living = [engine for rank, engine in self.engine_of_rank.items() if rank not in self.fork_server.exits]
                self.controller.remember({engine: self._uuids[engine] for engine in living})
                self.controller.start_again()
                self._ends.append(ended)
            return tuple(self._ends)

    @property
    def controller_ends(self) -> int:
        """How many controllers have ended, as far as known."""
        return len(self._ends)

    def conditions(self) -> list[str]:
        """A line on each process that can't continue and each controller that ended; not on suspended ranks."""
        try:
            ends = [f"{end}. The controller was restarted." for end in self.look_after()]
        except ClusterError as error:
            ends = [f"{error}\n`%cluster restart` starts new processes"]
        return [*self.hindered(of_rank=machine.used_up), *ends]

    def hindered(self, of_rank: Callable[[int], list[str]] = machine.hindrances) -> list[str]:
        """Local processes of this cluster that can't continue, with cause and fix: stopped by a signal, or at a limit.

        Args:
            of_rank: returns what keeps a rank's process from continuing.
        """
        found = []
        for name, pid in self._on_this_machine():
            if name.startswith("rank"):
                found += [f"{name} {what}" for what in of_rank(pid)]
            else:
                shown = "supervisor process" if name == "keeper" else name
                found += [f"the {shown} {what}" for what in machine.hindrances(pid)]
        return found

    def _on_this_machine(self) -> list[tuple[str, int]]:
        """Name and process id of this cluster's processes on this machine."""
        far = {f"rank {rank}" for rank in self.far_ranks}
        monitor = self.controller.heart_monitor
        return [
            *((name, pid) for name, pid in self.pids.items() if name not in far),
            *([("controller's heart monitor", monitor)] if monitor is not None else []),
        ]

    @property
    def far_ranks(self) -> frozenset[int]:
        """Ranks that share no memory with this process: those of other hosts."""
        return frozenset()

    def open(self, progress: Progress) -> None:
        """Starts the rest, after `reach`, and waits until every rank has answered.

        Raises:
            ClusterError: a process ended meanwhile; the message contains the end of its log.
        """
        self._start_controller()
        progress(0.02, _CONNECTING)
        self._connection = self._wait(self.controller.connection, _CONNECTING, progress)
        self.fork_engines(progress)
        self._up = True

    def reattach(self, engines: Mapping[int, tuple[int, str]]) -> None:
        """Connects to an earlier client's ranks; those that have not joined are terminated.

        Args:
            engines: rank -> id and uuid of its engine, of all that have joined.
        """
        self._up = True
        self._know(engines)
        self.look_after()
        self._connection = self._wait(self.controller.connection, _CONNECTING, ignore)
        for rank in self.fork_server.pids:
            if rank in self.fork_server.exits and rank in self.engine_of_rank:
                self.unregister(self.engine_of_rank[rank])
            elif rank not in self.fork_server.exits and rank not in self.engine_of_rank:
                self.fork_server.signal(rank, 9)

    @property
    def client(self) -> Any:
        """The connected ipyparallel client, made when it is first asked for; it knows the engines of all living ranks.

        Raises:
            ClusterError: the controller does not answer.
        """
        if self._client is None or len(self.look_after()) > self._heard:
            if self._client is not None:
                self._former_clients.append(self._client)  # the user may have views of it
            self._client = self._connected_client()
            self._reached.clear()

        def living() -> set[int]:
            return {engine for rank, engine in self.engine_of_rank.items() if rank not in self.fork_server.exits}

        again = time.monotonic() + _MISSED_SECONDS

        def registered() -> bool | None:
            nonlocal again
            if living() <= set(self._client.ids):
                return True
            if time.monotonic() > again:  # the client does not learn of an engine that registers while it connects
                self._former_clients.append(self._client)
                self._client = self._connected_client()
                self._reached.clear()
                again = time.monotonic() + _MISSED_SECONDS
            return None

        self._wait(registered, _CONNECTING, ignore)
        self._wait_reachable(living())
        return self._client

    def _wait_reachable(self, engines: set[int]) -> None:
        """Waits until each of these has answered a request.

        An engine counts as registered after a heartbeat. Heartbeats use a connection of their own: the one for requests
        may not exist yet, and requests to an engine that the controller does not know there are lost silently. So an
        engine is sent an empty request repeatedly, until it has answered once.
        """
        ipyparallel = importlib.import_module("ipyparallel")
        asked: dict[int, list[Any]] = {engine: [] for engine in engines if self._uuids[engine] not in self._reached}
        again = 0.0

        def reached() -> bool | None:
            nonlocal again
            missing = [engine for engine, sent in asked.items() if not any(one.ready() for one in sent)]
            if missing and time.monotonic() >= again:
                again = time.monotonic() + _AGAIN_SECONDS
                with interrupts_deferred():
                    for engine in missing:
                        asked[engine].append(self._client[engine].apply_async(ipyparallel.Reference("int")))
            return None if missing else True

        self._wait(reached, _CONNECTING, ignore)
        self._reached.update(self._uuids[engine] for engine in asked)

    def _connected_client(self) -> Any:
        ipyparallel = importlib.import_module("ipyparallel")  # takes a third of a second

        def connected() -> Any:
            if not question.poll(0):  # until then a client would wait without seeing what happens
                return None
            try:
                return ipyparallel.Client(
                    self._connection["client"],
                    profile_dir=str(self._run_dir / "profile"),
                    timeout=_ANSWER_SECONDS,
                )
            except TimeoutError:
                return None

        self._heard = len(self._ends)
        with self._say_to_controller("connection_request") as question, _without_signing_warning():
            return self._wait(connected, _CONNECTING, ignore)

    def _start_controller(self) -> None:
        self.controller.start()

    def _fork(self, ranks: Mapping[int, RankProcess], progress: Progress) -> None:
        assert isinstance(self.fork_server, ForkServer)
        self.fork_server.fork(self._connection["engine"], ranks)

    def fork_engines(self, progress: Progress, ranks: Sequence[int] | None = None) -> None:
        """Forks one engine per rank, and `prepare`s all ranks.

        Args:
            progress: called with the progress.
            ranks: those whose processes are new, replacing failed ones; None for all.
        """
        assert self.wire is not None
        ranks = range(self.placement.world_size) if ranks is None else ranks
        self.look_after()
        self._bring_back(progress)
        self.wire.forget(ranks)
        endpoint = self.wire.endpoint()
        common = {"world_size": self.placement.world_size, "detached": self.keeper is not None}
        made = {
            rank: RankProcess(
                {"DDP_LAB_RANK": str(rank), **self.placement.rank_environments[rank]},
                {**common, "endpoint": self.endpoint_of(rank, endpoint)},
                self._folder,
                gives_way=self.placement.devices[rank] == "cpu",
            )
            for rank in ranks
        }
        self._fork(made, progress)
        self._prepare("starting engines", progress)

    def _bring_back(self, progress: Progress) -> None:
        """Makes sure that there is a fork server."""

    def prepare(self, doing: str) -> None:
        """Asks every rank to prepare to join again; fills `prepared` with the answers by rank."""
        self._prepare(doing, ignore)

    def _prepare(self, doing: str, progress: Progress) -> None:
        asked = ("prepare", self.place_of(0)["address"])
        self.prepared = self.call(dict.fromkeys(range(self.placement.world_size), asked), doing, progress)
        self._know({rank: (answer["engine"], answer["uuid"]) for rank, answer in self.prepared.items()})

    def _know(self, engines: Mapping[int, tuple[int, str]]) -> None:
        self.engine_of_rank = {rank: engine for rank, (engine, _) in engines.items()}
        self._uuids = dict(engines.values())

    def call(self, calls: Mapping[int, tuple[Any, ...]], doing: str, progress: Progress) -> dict[int, Any]:
        """Calls functions of `ddp_lab.engine.rank` on ranks and waits for all answers.

        Args:
            calls: rank -> the function's name and its arguments.
            doing: the name of the step, for progress and errors.

        Returns:
            rank -> what it returned.

        Raises:
            ClusterError: it raised on a rank, or a rank's process exited.
        """
        assert self.wire is not None
        self.look_after()
        call_id = f"call-{uuid.uuid4().hex}"
        reports: dict[int, CellReport | RequestFailure] = {}

        def answered() -> dict[int, Any] | None:
            self.fork_server.check(range(self.placement.world_size))
            values = {}
            for rank, report in list(reports.items()):
                if isinstance(report, RequestFailure):
                    raise ClusterError(_failure(rank, report, doing))
                values[rank] = pickle.loads(report.blob or b"")
            return values if len(values) == len(calls) else None

        with interrupts_deferred():  # all or none: ranks wait for each other
            self.wire.listen(call_id, lambda rank, kind, frames: reports.setdefault(rank, report_of(frames)))
            for rank, (function, *args) in calls.items():
                self.wire.send([rank], Call(call_id, RankFunction(RANK, function), arguments(args, {})))
        try:
            replies: dict[int, Any] = self._wait(answered, doing, progress)
        finally:
            self.wire.unlisten(call_id)
        return replies

    def end_engines(self) -> None:
        """Kills every rank's process and waits until they have exited; the controller forgets their engines."""
        for rank in self.fork_server.pids:
            self.fork_server.signal(rank, 9)
        ranks = set(self.fork_server.pids)
        self._wait(lambda: ranks <= self.fork_server.exits.keys() or None, "ending ranks", ignore)
        for engine in self.engine_of_rank.values():
            self.unregister(engine)
        self.engine_of_rank = {}

    def unregister(self, engine: int) -> None:
        """Tells the controller that an engine's process has exited: nothing else does."""
        self._say_to_controller("unregistration_request", {"id": engine}).close()

    def _say_to_controller(self, what: str, content: Mapping[str, Any] | None = None) -> Any:
        """Sends a request to the controller; returns the socket on which it may answer."""
        util = importlib.import_module("ipyparallel.util")
        session = importlib.import_module("jupyter_client.session")
        info = self._connection["client"]
        zmq = importlib.import_module("zmq")
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 1000
        address = f"{info['interface']}:{info['registration']}"
        util.connect(socket, address, curve_serverkey=info["curve_serverkey"].encode())
        with _without_signing_warning():
            sender = session.Session(
                key=info["key"].encode(),
                packer=info["pack"],
                unpacker=info["unpack"],
                signature_scheme=info["signature_scheme"],
            )
        sender.send(socket, what, content=dict(content or {}))
        return socket

    def close(self) -> None:
        """Ends everything that runs and removes the cluster's files."""
        self._close_clients()
        if self.keeper is not None:
            self.keeper.stop()
        self.fork_server.stop()
        # A client that is killed while it ends, as Jupyter does after five seconds, leaves the files to the controller.
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self.controller.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)  # what the controller has made meanwhile
        self.engine_of_rank = {}

    def leave(self) -> None:
        """Disconnects from a cluster that outlives this process; all of its processes continue."""
        assert self.keeper is not None
        self._close_clients()
        self.keeper.leave()

    def _close_clients(self) -> None:
        with interrupts_deferred(), self._looking:
            self._up = False
        for client in (*self._former_clients, self._client):
            if client is not None:
                client.close(linger=0)
        self._former_clients, self._client = [], None

    def _wait(self, look: Callable[[], Any], doing: str, progress: Progress) -> Any:
        """Polls until `look` returns something other than None."""
        begin, ends = time.monotonic(), len(self._ends)
        look_s, hindered = _LOOK_SECONDS, list[str]()
        while (found := look()) is None:
            elapsed = time.monotonic() - begin
            if elapsed > _LIMIT_SECONDS:
                raise ClusterError(f"{doing} took more than {_LIMIT_SECONDS:.0f} s")
            if not self._up or doing != _CONNECTING:  # connecting reports failed ranks later
                self.fork_server.check()
            if not self._up:
                self.controller.check()
            elif len(now := self.look_after()) > ends and doing != _CONNECTING:
                raise ClusterError(
                    f"{now[-1]} ({doing}). The controller was restarted and the ranks are alive: try again"
                )
            fraction, text = self._how_far(doing, elapsed)
            if elapsed > look_s:
                look_s = elapsed + _LOOK_SECONDS
                # Connecting does not wait for ranks.
                hindered = self.hindered((lambda pid: []) if doing == _CONNECTING else machine.hindrances)
            if hindered and elapsed > (limit := _UNSEEN_SECONDS if progress is ignore else _HINDERED_SECONDS):
                raise ClusterError(f"{doing} took more than {limit:.0f} s: {'; '.join(hindered)}")
            progress(fraction, "; ".join([text, *hindered]))
            time.sleep(_POLL_SECONDS)
        return found

    def _how_far(self, doing: str, elapsed: float) -> tuple[float, str]:
        if doing == "starting engines" and not self.fork_server.ready:
            return 0.1 + 0.6 * (1 - math.exp(-elapsed / _IMPORT_SECONDS)), self.fork_server.stage
        if doing == "starting engines":
            n = self.placement.world_size
            return 0.75, f"starting engines {len(self.fork_server.pids)}/{n}"
        return {"connecting to the hosts": 0.02, _CONNECTING: 0.05}.get(doing, 0.9), doing


def _failure(rank: int, error: RequestFailure, doing: str) -> str:
    if error.name == ClusterError.__name__:  # which says what to do
        return f"{doing} failed on rank {rank}: {error.message}"
    return f"{doing} failed on rank {rank}: {error.name}: {error.message}\n{error.traceback}".rstrip()


@contextlib.contextmanager
def _without_signing_warning() -> Iterator[None]:
    """ipyparallel leaves signing to CurveZMQ, and jupyter_client warns that messages are not signed."""
    log = importlib.import_module("traitlets.log").get_logger()

    def keep(record: logging.LogRecord) -> bool:
        return "Message signing is disabled" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def ignore(fraction: float, text: str) -> None:
    """Ignores progress."""
