"""Cluster: ranks that cells run on.

A cluster is a controller, a fork server and one engine per rank on this machine, an ipyparallel client, and a wire
for events and control. What the ranks do is in `ddp_lab.engine`; this side reaches it by name only, and never
imports torch.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import machine
from ..errors import CellError, ClusterError
from ..events import Batch
from ..insight.words import enumeration
from . import namespace
from .allocation import ALLOCATION
from .cell_options import RunView
from .cell_run import CellOptions, CellResult, CellRun, CellText, RankFunction
from .clock import HostClocks
from .cluster_views import ClusterViews
from .devices import place
from .displays import kernel_shell
from .doctor import Report, Watch
from .failures import replaced_text
from .host_commands import of_batch_system
from .host_processes import HostProcesses, HostSettings
from .hosts import parse_hosts, provisional
from .interrupts import held_back
from .keeping import Keeping, check_name
from .looking import Looking
from .membership import Membership, RankRecord
from .outputs import Board, default_board
from .predictions import Predictions
from .rank_sets import label_of
from .remote_launchers import Starting
from .runs import Runs
from .startup import Processes, Progress, ignore
from .timeline import Timeline
from .vitals import RankVitals
from .wire import Wire

if TYPE_CHECKING:
    from ..insight.link_model import LinkModel

__all__ = ["Cluster", "RankRecord", "current_cluster", "running_clusters"]

_BACKENDS = ("auto", "nccl", "gloo", "shm", "mpi")
_running: list[Cluster] = []  # in this process, the current one at the end
_numbers = itertools.count(1)  # of clusters without a name of their own
_sessions = itertools.count(time.time_ns())  # ranks remember cells by their ids: no later client may use one again


class Cluster(Predictions, Looking, ClusterViews, Keeping):
    """Ranks on this machine, one per GPU, or CPU ranks where there is none; or on several hosts.

    Use it as a context manager in scripts; in notebooks `%cluster start` makes one. All processes end with this
    one, however it ends, unless they are detached.

    Args:
        n: number of ranks; None for one per device, or 2 CPU ranks.
        backend: of the default process group; ``"auto"`` is NCCL for CUDA tensors and Gloo for CPU ones;
            without GPUs shared memory (``"shm"``), and Gloo where ranks are on several hosts.
        devices: which of the visible GPUs, by index; None for all.
        env: environment variables of the ranks, set before torch is imported there.
        watch_seconds: a cell that makes no progress for so long while ranks wait for each other is told why, once;
            None: never.
        hosts: ranks on other machines, over ssh: ``"a:4,b:4"``, ``["a:4", "b:4"]`` or ``{"a": 4, "b": 4}``, numbered
            by host; ``"localhost"`` is this machine, ``"allocation"`` stands for the hosts and tasks that Slurm, PBS,
            LSF or Grid Engine has given to this job. Code, data and packages must be there.
        engines: what starts them: ``"ssh"``; inside of an allocation, whose hosts are the default then, ``"slurm"``
            (srun), ``"mpi"`` (mpiexec), ``"lsf"`` (blaunch) or ``"sge"`` (qrsh); or a command's words, for example
            ``["docker", "exec", "-i", "{host}"]``.
        python: the Python that runs ranks on other hosts; None for the path of this one.
        address: this machine's address that the hosts reach; None finds it.
        host_seconds: a host that answers nothing for so long is lost, and its ranks with it.
        detach: whether the ranks outlive this process, with their variables and what they run, until `stop`:
            `Cluster.find` attaches to them again, from any process of this user. The end of a ``with`` block leaves
            such a cluster running.
        name: tells it from other clusters of this process, and finds a detached one again; None for ``cluster-1``,
            ``cluster-2``, ..., or ``lab-1``, ``lab-2``, ... if it is detached.
        lease_seconds: how long a detached cluster lives while no client is attached.

    Attributes:
        results: name (of `%%distributed --name`, or a label) -> `CellRun` of the last such cell, running or ended:
            `.status()`, `.wait()`, `.outputs()`, `.text(rank)`, `.interrupt()`, `.values`, `.failures`.

    Raises:
        ValueError: an argument makes no sense here.

    Example:
        with ddp_lab.Cluster(2) as lab:
            lab.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values    # {0: 2.0, 1: 2.0}
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        backend: str = "auto",
        devices: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        watch_seconds: float | None = 10.0,
        hosts: str | Sequence[str] | Mapping[str, int] | None = None,
        engines: str | Sequence[str] = "ssh",
        python: str | None = None,
        address: str | None = None,
        host_seconds: float = 30.0,
        detach: bool = False,
        name: str | None = None,
        lease_seconds: float = 3600.0,
    ) -> None:
        check_name(name, lease_seconds)
        if detach and hosts is not None:
            raise ValueError("detach=True: ranks on other hosts end with this process; leave out hosts")
        if watch_seconds is not None and watch_seconds <= 0:
            raise ValueError(f"watch_seconds={watch_seconds}: give a time in seconds, or None for never")
        if backend not in _BACKENDS:
            raise ValueError(f"backend={backend!r}: choose one of {', '.join(_BACKENDS)}")
        environment = {name: str(value) for name, value in (env or {}).items()}
        self._hosts: HostSettings | None = None
        if hosts is None and of_batch_system(engines):
            hosts = ALLOCATION
        if hosts is None and (engines != "ssh" or python is not None or address is not None):
            raise ValueError("engines=, python= and address= say how ranks run on other hosts: give hosts= as well")
        if hosts is not None:
            self._hosts = HostSettings(
                parse_hosts(hosts, n),
                devices,
                environment,
                backend,
                address=address,
                starting=Starting(engines, python, host_seconds),
            )
            self._placement = provisional(self._hosts.hosts)
        else:
            self._placement = place(n, devices, environment, backend)
        self._backend = backend
        self.watch_seconds = watch_seconds
        self._processes: Processes | None = None
        self._wire: Wire | None = None
        self._members: Membership | None = None
        self._clocks: HostClocks | None = None
        self._owner = 0
        self._detach = detach
        self.name = name if name is not None or detach else _automatic_name()
        self.lease_seconds = lease_seconds
        self._told = {}
        self._cells = itertools.count(1)
        self._session = f"{os.getpid()}-{next(_sessions)}" if detach else str(os.getpid())
        self.timeline = Timeline()
        self.last_result: CellResult | None = None
        self.results = Runs()
        self._link: LinkModel | None = None

    # Life

    @property
    def running(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._processes is not None

    @property
    def _attached(self) -> bool:
        """Whether it runs and outlives this process."""
        return self._processes is not None and self._processes.keeper is not None

    def successor(self) -> Cluster | None:
        """The cluster that this process uses now that this one does not run; None if there is none."""
        return None if self.running else current_cluster()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._placement.world_size

    def runs_on(self, hosts: str, n: int | None) -> bool:
        """Whether its ranks are on these hosts, named as for the constructor."""
        return self._hosts is not None and self._hosts.hosts == parse_hosts(hosts, n)

    @property
    def client(self) -> Any:
        """The connected `ipyparallel.Client`."""
        return self._up().client

    @property
    def engine_of_rank(self) -> dict[int, int]:
        """rank -> ipyparallel engine id."""
        return dict(self._up().engine_of_rank)

    @property
    def wire(self) -> Wire:
        """The channel for events and control."""
        self._up()
        assert self._wire is not None
        return self._wire

    def start(self, progress: Progress | None = None) -> Cluster:
        """Starts the processes and joins the ranks; returns once every rank has finished an all-reduce.

        Args:
            progress: called with a fraction from 0 to 1 and what is being waited for, in the calling thread.

        Raises:
            ClusterError: it runs already, another one of its name does, or a rank failed to start; the message holds
                the end of its log.
        """
        if self._processes is not None:
            raise ClusterError("the cluster runs already")
        self._check_only_one()
        show = progress or ignore
        self._owner = os.getpid()
        self._processes = (
            Processes(self._placement, self._keeper()) if self._hosts is None else HostProcesses(self._hosts)
        )
        try:
            self._listen(show)
            self._processes.open(show)
            self._members = Membership(self._processes, self.wire, self._backend, self._clocks)
            self._members.on_joined, self._members.on_lost = self._remember, self.results.give_up
            self._members.join(show)
        except BaseException:
            self.stop()
            raise
        show(1.0, "ready")
        self._is_up()
        return self

    def _listen(self, progress: Progress = ignore) -> None:
        atexit.register(self._at_exit)
        processes = self._up()
        self._wire = self._new_wire(processes.reach(progress))
        if self._hosts is not None:
            self._clocks = HostClocks(self._wire, processes.clocks, machine.host_clock(), self.timeline.set_status)
        self._wire.on_batch(self._take_batch)
        self._wire.on_description(self.timeline.describe)
        self._wire.on_status(self.timeline.set_status)

    def _check_only_one(self, detached: bool = False) -> None:
        """Refuses the name of another cluster that runs here; a detached one may be attached here already."""
        known = [one for one in _running if not (detached and one._attached)]
        if any(one.name == self.name for one in known if one.name is not None):
            raise ClusterError(
                f"a cluster {self.name!r} runs in this process already: choose another name, or stop that one first"
            )

    def _is_up(self) -> None:
        _running.append(self)

    def _is_down(self) -> None:
        atexit.unregister(self._at_exit)
        if self in _running:
            _running.remove(self)

    def _at_exit(self) -> None:
        if self._attached:
            self.detach()
        else:
            self.stop()

    def stop(self) -> None:
        """Ends every process of the cluster and waits for them; without effect on a stopped one."""
        if self._processes is None or self._owner != os.getpid():
            return
        self._processes.fork_server.on_exit = None
        self._give_up_cells("ended when the cluster was stopped")
        try:
            if self._clocks is not None:
                self._clocks.stop()
            self._processes.close()
        finally:
            self._processes = None
            if self._wire is not None:
                self._wire.close()
            self._wire = self._members = self._clocks = None
            self._is_down()

    def restart(self, progress: Progress | None = None) -> None:
        """Replaces every rank's process by a new one: variables are gone, groups are new."""
        processes, show = self._up(), progress or ignore
        if processes.broken:
            self.stop()
            self.start(progress)
            return
        processes.fork_server.on_exit = None
        self._give_up_cells("ended when the cluster was restarted")
        try:
            processes.end_engines()
            processes.fork_engines(show)
            self._joined().join(show)
        except BaseException:
            self.stop()
            raise
        show(1.0, "ready")

    def _give_up_cells(self, why: str) -> None:
        self.results.give_up(dict.fromkeys(range(self._placement.world_size), why))

    def rejoin(self, replace: Iterable[int] = ()) -> dict[int, str]:
        """Gives the ranks new process groups; variables are kept, and models and names follow to the new groups.

        A rank whose process has ended gets a new one, without variables: `ddp_lab.restore_from` copies them.

        Args:
            replace: ranks whose processes are ended first, whatever they do.

        Returns:
            rank -> how its former process ended, for those that have a new one.

        Raises:
            ClusterError: a rank still runs a cell, or could not be started.
        """
        return self._joined().rejoin(replace=[] if not replace else self._chosen(replace))

    def use(self) -> None:
        """Makes it the current cluster of this process: `%%distributed` cells without ``--cluster`` run on it.

        Raises:
            ClusterError: it does not run.
        """
        self._up()
        _running.remove(self)
        _running.append(self)

    def __repr__(self) -> str:
        if not self.running:
            return f"<Cluster {self.name or ''!r}: {'stopped' if self._owner else 'not started'}>"
        ranks, device = label_of(range(self.world_size)), self._placement.devices[0].partition(":")[0]
        return f"<Cluster {self.name!r}: {ranks}, {device}, {self._doing()}>"

    def _doing(self) -> str:
        """What its ranks do, in words."""
        if self._members is None:
            return "starting"
        lost = self._members.lost()
        if lost:
            return f"{label_of(lost)} lost"
        cells = [run.label for run in self.results.ahead(range(self.world_size))]
        return f"runs {enumeration(cells)}" if cells else "idle"

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self._at_exit()

    # Cells

    def run(
        self,
        code: str | CellText | Callable[..., Any] | RankFunction,
        *args: Any,
        ranks: Iterable[int] | None = None,
        wait: bool = True,
        timeout: float | None = None,
        label: str | None = None,
        board: Board | None = None,
        view: RunView | None = None,
        tick: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a cell, or calls a function, on ranks.

        Args:
            code: the cell's text, or a function. Of cells that wait for each other on a rank, those behind one that
                fails are not run.
            args: the function's arguments.
            ranks: where; None for all.
            wait: False returns the `CellRun` at once.
            timeout: seconds after which the ranks are interrupted.
            label: the cell's name in tracebacks, and in `results`.
            board: shows the outputs; None for the one that fits this process.
            view: with `wait=False` shows how far the cell is; None for a widget in a notebook, else for none.
            tick: called now and then while waiting.
            kwargs: the function's keyword arguments.

        Returns:
            `CellResult`; with `wait=False`, the `CellRun`.

        Raises:
            CellError: it failed on a rank; peers that waited for that rank have ended too, variables are kept.
            ClusterError: a rank still runs a cell, or the cluster does not run.
        """
        chosen = self._chosen(ranks)
        members = self._joined()
        idle = members.suspect  # then the ranks are waited for
        replaced = members.ensure_whole()
        number = next(self._cells)
        name = code.name if isinstance(code, CellText) else label or ""
        if replaced:
            board = board or default_board(chosen)
            board.announce(sorted(replaced), replaced_text(replaced, self.world_size))
        label = label or f"cell {number}"
        if isinstance(code, RankFunction):
            name = ""
        elif not wait:
            name, view = name or label, view or self._view_of_run()
        options = CellOptions(
            label=label,
            name=name,
            args=args,
            kwargs=kwargs,
            board=board,
            interrupt=members.interrupt,
            ended=members.note_end,
            lost_ranks=members.lost,
            end_silent=members.end_silent,
            last_words=members.last_words,
            answer=lambda rank, message: self.wire.send([rank], message),
            timeout=timeout,
            processes=self._up().watch(members.ask),
            watch=self._watch(chosen),
            on_axis=None if self._clocks is None else self._clocks.on_axis,
            far=self.far_ranks.intersection(chosen),
            logs=self._up().logs,
            after=() if idle else self.ahead(chosen),
        )
        cell_id = f"{self._session}-{number}"
        cell_run = CellRun(self.client, self.engine_of_rank, code, chosen, cell_id=cell_id, options=options)
        with held_back():
            members.begin(cell_id, chosen)
            self.results.add(cell_run.submit(None if wait else view), name)
            if not wait:
                return cell_run.follow()
            try:
                late = (lambda: self._view_of_run(waited=True)) if isinstance(code, CellText) else None
                self.last_result = cell_run.wait(tick, late)
            except (CellError, KeyboardInterrupt):
                members.suspect = True
                members.settle()
                raise
            self.wire.wait_for(cell_id, chosen)
            return self.last_result

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Raises KeyboardInterrupt in the cells that run, also in a collective that waits; returns at once."""
        self._joined().interrupt(ranks)

    def push(self, mapping: Mapping[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks (None: all): all of them everywhere, or, if one can't travel or be loaded, none.

        Arrays and tensors arrive as they are, each rank with a copy of its own, and models of the notebook's classes.

        Raises:
            TypeError: a value can't be sent; the message names it and its part.
        """
        namespace.push(self, mapping, self._chosen(ranks))

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Returns rank -> value of a variable or expression (None: all ranks).

        Tensors come to the host, as tensors if this process has imported torch, else as numpy arrays (bfloat16 and
        float8 as float32); of a model or an optimizer comes the `state_dict()`.
        """
        return namespace.pull(self, name, self._chosen(ranks))

    # Looks

    def status(self) -> tuple[RankRecord, ...]:
        """Every rank as it is now."""
        return self._joined().records()

    def vitals(self, seconds: float = 1.0) -> tuple[RankVitals, ...]:
        """Every rank as it is now, what it runs for how long, when it was last heard of, and its GPU.

        Args:
            seconds: to wait for answers at most; a rank without one is ``"silent"``.
        """
        return self._joined().vitals(seconds)

    def doctor(self) -> Report:
        """Says why the ranks do not come on, and what each of them does; also while a cell runs, without stopping it.

        Example:
            lab.doctor()
            # rank 0 waits in all_reduce #2 of 4 B (float32 [1]); rank 1 is in `time.sleep(60)` at cell 3 line 2.
        """
        members = self._joined()
        return Report.made(members.examine, self._up().conditions())

    def ahead(self, ranks: Iterable[int]) -> tuple[CellRun, ...]:
        """The cells that a cell on these ranks would wait for."""
        return self.results.ahead(self._joined().busy().intersection(ranks))

    @property
    def far_ranks(self) -> frozenset[int]:
        """Ranks of other hosts: large objects travel to and from them in messages, not through shared memory."""
        return self._up().far_ranks

    def busy_ranks(self) -> set[int]:
        """Ranks that were given a cell that has not ended."""
        return self._joined().busy()

    def pids(self) -> dict[str, int]:
        """Name -> process id of every process of the cluster; empty when it is stopped."""
        return {} if self._processes is None else self._processes.pids

    # Behind the scenes

    def _up(self) -> Processes:
        if self._processes is None:
            others = f"; {_running[-1]!r} runs: `lab = ddp_lab.current_cluster()`" if _running else ""
            raise ClusterError(f"the cluster does not run: start it with `%cluster start` or `.start()`{others}")
        return self._processes

    def _joined(self) -> Membership:
        self._up()
        if self._members is None:
            raise ClusterError("the cluster is still starting")
        return self._members

    def _view_of_run(self, waited: bool = False) -> RunView | None:
        """What shows how far a cell is; if it is waited for, on pages that were opened meanwhile."""
        if kernel_shell() is None:
            return None
        from ..widgets.background_cell import BackgroundCell

        after = "its ranks ended with it"
        if self._up().keeper is not None:
            after = f"its ranks go on: `%cluster attach {self.name}` says what became of it"
        return BackgroundCell(self.timeline, after, waited)

    def _take_batch(self, batch: Batch) -> None:
        """On the wire's thread: events of all hosts are stored on one time axis."""
        self.timeline.extend(batch if self._clocks is None else self._clocks.placed(batch))

    def _watch(self, ranks: Sequence[int]) -> Watch | None:
        if self.watch_seconds is None:
            return None
        return Watch(self._joined().examine, self.watch_seconds, partial=len(ranks) < self.world_size)

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        for rank in chosen:
            if not 0 <= rank < self.world_size:
                raise ValueError(f"there is no rank {rank}: the cluster has ranks 0 to {self.world_size - 1}")
        if not chosen:
            raise ValueError("no rank was chosen")
        return chosen


def _automatic_name() -> str:
    """``cluster-1``, ``cluster-2``, ...: one that no running cluster of this process has."""
    taken = {one.name for one in _running}
    return next(name for number in _numbers if (name := f"cluster-{number}") not in taken)


def current_cluster() -> Cluster | None:
    """The cluster that was started last, or chosen by `%cluster use`, and still runs; None if there is none."""
    return _running[-1] if _running else None


def running_clusters() -> list[Cluster]:
    """All clusters of this process that run, the current one first."""
    return _running[::-1]
