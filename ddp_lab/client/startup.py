"""The processes of one local cluster as a whole: brings them up together, connects, replaces engines, takes all down.

What takes long runs side by side: the fork server imports torch while the controller starts and this process imports
ipyparallel. Every wait here looks at the processes it waits for, and ends with the end of a log when one is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from .devices import Placement
from .interrupts import held_back
from .launchers import Controller, ForkServer

if TYPE_CHECKING:
    from .detached import Keeper
    from .remote_launchers import HostServers

__all__ = ["LOOPBACK", "Processes", "Progress", "ignore"]

Progress = Callable[[float, str], None]

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.004
_ANSWER_SECONDS = 10.0  # for the controller's first one, before it is asked again
_LIMIT_SECONDS = 180.0  # a start that waits for something else than a process that ended
_AGAIN_SECONDS = 0.5  # until a new engine that has not answered is asked again
_IMPORT_SECONDS = 1.5  # typical; only the bar's speed depends on it
_BOOTSTRAP = "__import__('ddp_lab.engine.bootstrap', fromlist=['join'])."


class Processes:
    """Controller, fork server and engines of one cluster, and the ipyparallel client connected to them.

    [Note: an engine that is registered]
    An engine counts as registered after a heartbeat. That comes over a connection of its own: the one for requests may
    still be in the making then, and what is sent to an engine that the controller does not know there is lost without
    a word. So a new engine is asked for nothing, again and again, until it has answered once.

    Args:
        placement: how many ranks, where, with which variables.
        keeper: of a cluster that outlives this process.
    """

    def __init__(self, placement: Placement, keeper: Keeper | None = None) -> None:
        self.placement = placement
        self.client: Any = None
        self.engine_of_rank: dict[int, int] = {}
        self.prepared: dict[int, dict[str, Any]] = {}
        self._connection: dict[str, dict[str, Any]] = {}
        self.keeper = keeper
        if keeper is None:
            self._run_dir = Path(tempfile.mkdtemp(prefix=f"ddp_lab-{os.getpid()}-"))
            self.controller = Controller(self._run_dir)
            self.fork_server: ForkServer | HostServers = ForkServer(self._run_dir, placement.environment)
        else:
            self._run_dir = keeper.run_dir
            self.controller, self.fork_server = keeper.controller, keeper.fork_server
        self.logs = self._run_dir / "outputs"  # of cells that print much

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of everything that runs for this cluster."""
        found = {"controller": self.controller.pid, "fork server": self.fork_server.pid}
        if self.keeper is not None:
            found["keeper"] = self.keeper.pids["keeper"]
        ranks = {
            f"rank {rank}": pid for rank, pid in self.fork_server.pids.items() if rank not in self.fork_server.exits
        }
        return {name: pid for name, pid in found.items() if pid is not None} | ranks

    def reach(self, progress: Progress) -> str:
        """Starts what ranks are forked from; returns the address of this machine by which ranks reach it."""
        self.fork_server.start()
        return LOOPBACK

    def place_of(self, rank: int) -> dict[str, Any]:
        """What `ddp_lab.engine.bootstrap.join` needs to know of a rank's place."""
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
        """Host's name -> its clock (`ddp_lab.machine.host_clock`) and its ranks, of hosts that may have another."""
        return {}

    @property
    def broken(self) -> bool:
        """Whether new ranks can only come with everything else."""
        return self.fork_server.failed

    @property
    def far_ranks(self) -> frozenset[int]:
        """Ranks that share no memory with this process: those of other hosts."""
        return frozenset()

    def open(self, progress: Progress) -> None:
        """Starts the rest, after `reach`, and waits until every rank's engine is registered.

        Raises:
            ClusterError: a process ended meanwhile; the message holds the end of its log.
        """
        self._start_controller()
        progress(0.02, "starting the controller")
        self._connect(progress)
        self.fork_engines(progress)

    def open_again(self, engine_of_rank: Mapping[int, int]) -> None:
        """Connects to engines that an earlier client had; ranks that have none, or a lost one, are ended."""
        self._connect(ignore)
        there = set(self.client.ids)
        self.engine_of_rank = {rank: engine for rank, engine in engine_of_rank.items() if engine in there}
        for rank in self.fork_server.pids:
            if rank in self.fork_server.exits and rank in self.engine_of_rank:
                self.unregister(self.engine_of_rank[rank])
            elif rank not in self.fork_server.exits and rank not in self.engine_of_rank:
                self.fork_server.signal(rank, 9)

    def _connect(self, progress: Progress) -> None:
        ipyparallel = importlib.import_module("ipyparallel")  # takes a third of a second: meanwhile they start
        self._connection = self._wait(self.controller.connection, "starting the controller", progress)

        def connected() -> Any:
            self.controller.connection()  # raises if it has ended meanwhile
            try:
                return ipyparallel.Client(
                    self._connection["client"], profile_dir=str(self._run_dir / "profile"), timeout=_ANSWER_SECONDS
                )
            except TimeoutError:
                return None

        with _without_signing_warning():
            self.client = self._wait(connected, "starting the controller", progress)

    def _start_controller(self) -> None:
        self.controller.start()

    def _fork(self, environments: Mapping[int, Mapping[str, str]], progress: Progress) -> None:
        assert isinstance(self.fork_server, ForkServer)
        self.fork_server.fork(self._connection["engine"], environments)

    def fork_engines(self, progress: Progress, ranks: Sequence[int] | None = None) -> None:
        """Forks one engine per rank and waits until all have registered; then `prepare`s all ranks.

        Args:
            progress: is told how far it is.
            ranks: those whose processes are new, in the place of some that ended; None for all.
        """
        ranks = range(self.placement.world_size) if ranks is None else ranks
        self._wait_unregistered({self.engine_of_rank[rank] for rank in ranks if rank in self.engine_of_rank})
        self._bring_back(progress)
        known = set(self.client.ids)
        environments = {rank: {"DDP_LAB_RANK": str(rank), **self.placement.rank_environments[rank]} for rank in ranks}
        self._fork(environments, progress)

        def registered() -> set[int] | None:
            self.fork_server.check(ranks)
            ids = set(self.client.ids) - known
            return ids if len(ids) == len(ranks) else None

        ids = self._wait(registered, "starting engines", progress)
        kept = {engine for rank, engine in self.engine_of_rank.items() if rank not in ranks}
        self._wait_reachable(ids, ranks, progress)
        self._prepare(ids | kept, "starting engines", progress)

    def _wait_reachable(self, engines: set[int], ranks: Sequence[int], progress: Progress) -> None:
        """Waits until each of these has answered a request. See [Note: an engine that is registered]."""
        ipyparallel = importlib.import_module("ipyparallel")
        asked: dict[int, list[Any]] = {engine: [] for engine in engines}
        again = 0.0

        def reached() -> bool | None:
            nonlocal again
            self.fork_server.check(ranks)
            missing = [engine for engine, sent in asked.items() if not any(one.ready() for one in sent)]
            if missing and time.monotonic() >= again:
                again = time.monotonic() + _AGAIN_SECONDS
                with held_back():
                    for engine in missing:
                        asked[engine].append(self.client[engine].apply_async(ipyparallel.Reference("int")))
            return None if missing else True

        self._wait(reached, "starting engines", progress)

    def _bring_back(self, progress: Progress) -> None:
        """Makes sure that there is something to fork from."""

    def prepare(self, doing: str) -> None:
        """Asks every rank to get ready to join anew; fills `prepared` with the answers by rank."""
        self._prepare(self.engine_of_rank.values(), doing, ignore)

    def _prepare(self, engines: Iterable[int], doing: str, progress: Progress) -> None:
        answers = self.call(dict.fromkeys(engines, ("prepare", self.place_of(0)["address"])), doing, progress)
        self.engine_of_rank = {answer["rank"]: engine for engine, answer in answers.items()}
        self.prepared = {answer["rank"]: answer for answer in answers.values()}

    def call(self, calls: Mapping[int, tuple[Any, ...]], doing: str, progress: Progress) -> dict[int, Any]:
        """Calls functions of `ddp_lab.engine.bootstrap` on engines and waits for all answers.

        Args:
            calls: engine id -> the function's name and its arguments.
            doing: what this is, for progress and errors.

        Returns:
            engine id -> what it returned.

        Raises:
            ClusterError: it raised on a rank, or a rank's process ended.
        """
        ipyparallel = importlib.import_module("ipyparallel")
        with held_back():  # all or none: ranks wait for each other
            pending = {
                engine: self.client[engine].apply_async(ipyparallel.Reference(_BOOTSTRAP + function), *arguments)
                for engine, (function, *arguments) in calls.items()
            }

        def answered() -> dict[int, Any] | None:
            self.fork_server.check(range(self.placement.world_size))
            for engine, result in pending.items():
                if result.ready() and not result.successful():
                    raise ClusterError(self._failure(engine, result, doing))
            if all(result.ready() for result in pending.values()):
                return {engine: result.get() for engine, result in pending.items()}
            return None

        replies: dict[int, Any] = self._wait(answered, doing, progress)
        return replies

    def end_engines(self) -> None:
        """Kills every rank's process and waits until they are gone; the controller forgets their engines."""
        for rank in self.fork_server.pids:
            self.fork_server.signal(rank, 9)
        ranks = set(self.fork_server.pids)
        self._wait(lambda: ranks <= self.fork_server.exits.keys() or None, "ending ranks", ignore)
        for engine in self.engine_of_rank.values():
            self.unregister(engine)
        self._wait_unregistered(set(self.engine_of_rank.values()))
        self.engine_of_rank = {}

    def _wait_unregistered(self, engines: set[int]) -> None:
        """Waits until the controller has forgotten these: a new engine may get the id of an old one."""
        self._wait(lambda: not engines & set(self.client.ids) or None, "ending ranks", ignore)

    def unregister(self, engine: int) -> None:
        """Tells the controller that an engine's process is gone: nobody else would."""
        zmq = importlib.import_module("zmq")
        util = importlib.import_module("ipyparallel.util")
        session = importlib.import_module("jupyter_client.session")
        info = self._connection["engine"]
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 1000
            util.connect(
                socket,
                f"{info['interface']}:{info['registration']}",
                curve_serverkey=info["curve_serverkey"].encode(),
            )
            with _without_signing_warning():
                sender = session.Session(
                    key=info["key"].encode(),
                    packer=info["pack"],
                    unpacker=info["unpack"],
                    signature_scheme=info["signature_scheme"],
                )
            sender.send(socket, "unregistration_request", content={"id": engine})

    def close(self) -> None:
        """Ends everything that runs and removes the cluster's files."""
        if self.client is not None:
            self.client.close(linger=0)
            self.client = None
        if self.keeper is not None:
            self.keeper.stop()
        self.fork_server.stop()
        self.controller.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self.engine_of_rank = {}

    def leave(self) -> None:
        """Lets go of a cluster that outlives this process; everything of it goes on."""
        assert self.keeper is not None
        if self.client is not None:
            self.client.close(linger=0)
            self.client = None
        self.keeper.leave()

    def _wait(self, look: Callable[[], Any], doing: str, progress: Progress) -> Any:
        """Polls until `look` returns something else than None."""
        begin = time.monotonic()
        while (found := look()) is None:
            elapsed = time.monotonic() - begin
            if elapsed > _LIMIT_SECONDS:
                raise ClusterError(f"{doing} took more than {_LIMIT_SECONDS:.0f} s")
            self.fork_server.check()
            progress(*self._how_far(doing, elapsed))
            time.sleep(_POLL_SECONDS)
        return found

    def _how_far(self, doing: str, elapsed: float) -> tuple[float, str]:
        if doing == "starting engines" and not self.fork_server.ready:
            return 0.1 + 0.6 * (1 - math.exp(-elapsed / _IMPORT_SECONDS)), self.fork_server.stage
        if doing == "starting engines":
            n = self.placement.world_size
            return 0.75, f"starting engines {len(self.fork_server.pids)}/{n}"
        return {"connecting to the hosts": 0.02, "starting the controller": 0.05}.get(doing, 0.9), doing

    def _failure(self, engine: int, result: Any, doing: str) -> str:
        rank = {number: rank for rank, number in self.engine_of_rank.items()}.get(engine)
        error = result.exception()
        trace = "\n".join(getattr(error, "traceback", None) or [])
        return f"{doing} failed on rank {rank}: {error}\n{trace}".rstrip()


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
    """Progress that nobody watches."""
