"""Cluster: the ranks that cells run on.

A cluster is a controller, a fork server and one engine per rank on this machine, and a wire for cells, events and
control. The code of the ranks is in `ddp_lab.engine`; this side refers to it by name only, and never imports torch.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ..control.records import RankHealth, RankRecord
from ..control.training import TrainingControl
from ..control.wire import Wire
from ..diagnosis.report import HangReport
from ..errors import ClusterError
from ..formatting import enumeration, label_of
from ..output.display import RunView, kernel_shell, write_line
from ..output.status_table import status_tables
from ..protocol.entry_points import RankFunction
from ..protocol.messages import CellText
from ..timeline.timeline import Timeline
from .cells import variables
from .cells.run import CellOptions, CellResult
from .cells.runner import CellRunner, Runs
from .config import ClusterConfig
from .experiments import Experiments
from .processes.hosts import parse_hosts
from .processes.keeper import DetachedCluster, Keeper, detached_clusters, free_name
from .processes.remote_launchers import Starting
from .processes.startup import Progress, ignore
from .session import MissedCell, Session
from .views import Views

if TYPE_CHECKING:
    from ..simulation.link_model import CommModel


_P = ParamSpec("_P")
_R = TypeVar("_R")
_running: list[Cluster] = []  # in this process, the current one at the end
_numbers = itertools.count(1)  # of clusters without a name of their own


def _of(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Cluster, _P], _R]:
    """A method of a part of the cluster, as a method of the cluster."""

    @functools.wraps(method)
    def forwarded(self: Cluster, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(getattr(self, part), *args, **kwargs)

    forwarded.__qualname__ = f"Cluster.{method.__name__}"
    return forwarded


class Cluster:
    """Ranks on this machine, one per GPU or CPU ranks if there is none; or on several hosts.

    Use it as a context manager in scripts; in notebooks `%cluster start` makes one. All processes end with this
    one, even if it is killed, unless the cluster is detached.

    Args:
        n: number of ranks; None for one per device, or 2 CPU ranks.
        backend: of the default process group; ``"auto"`` is NCCL for CUDA tensors and Gloo for CPU ones;
            without GPUs shared memory (``"shm"``), and Gloo where ranks are on several hosts.
        devices: which of the visible GPUs, by index; None for all.
        env: environment variables of the ranks, set before torch is imported there.
        hang_seconds: hang timeout. A cell whose ranks wait for each other without progress for this long reports the
            cause, once; None: never.
        hosts: ranks on other machines, over ssh: ``"a:4,b:4"``, ``["a:4", "b:4"]`` or ``{"a": 4, "b": 4}``, numbered
            by host; ``"localhost"`` is this machine, ``"allocation"`` means the hosts and tasks that Slurm, PBS,
            LSF or Grid Engine has allocated to this job. Code, data and packages must exist there.
        launcher: how they are started: ``"ssh"``; inside an allocation, whose hosts are then the default, ``"slurm"``
            (srun) or ``"mpi"`` (mpiexec); or a command's words, for example ``["blaunch", "{host}"]`` (LSF) or
            ``["docker", "exec", "-i", "{host}"]``.
        python: path of the Python that runs ranks on other hosts; None: the same path as here.
        client_address: the address of this machine to which the hosts connect; None: found automatically.
        host_timeout: host timeout. A host that does not respond for this long is lost, and its ranks with it.
        detach: whether the ranks outlive this process, with their variables and what they run, until `stop`:
            `Cluster.attach` attaches to them again, from any process of this user. Such a cluster
            keeps running after a ``with`` block.
        name: distinguishes it from other clusters of this process, and identifies a detached one; None for
            ``cluster-1``, ``cluster-2``, ..., or ``lab-1``, ``lab-2``, ... if it is detached.
        idle_timeout: how many seconds a detached cluster lives while no client is attached.

    Attributes:
        results: name (of `%%distributed --name`, or a label) -> `CellRun` of the last such cell, running or ended:
            `.status()`, `.wait()`, `.outputs()`, `.text(rank)`, `.interrupt()`, `.values`, `.failures`.
        timeline: `Timeline` of what the ranks record; it stays when the cluster stops.
        training: `TrainingControl`, which changes and inspects models while they train.

    Raises:
        ValueError: an argument is invalid here.

    Example:
        >>> with ddp_lab.Cluster(2) as lab:
        ...     print(lab.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values)
        {0: 2.0, 1: 2.0}
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        backend: str = "auto",
        devices: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        hang_seconds: float | None = 10.0,
        hosts: str | Sequence[str] | Mapping[str, int] | None = None,
        launcher: str | Sequence[str] = "ssh",
        python: str | None = None,
        client_address: str | None = None,
        host_timeout: float = 30.0,
        detach: bool = False,
        name: str | None = None,
        idle_timeout: float = 3600.0,
    ) -> None:
        if hang_seconds is not None and hang_seconds <= 0:
            raise ValueError(f"hang_seconds={hang_seconds}: give a time in seconds, or None for never")
        starting = Starting(launcher, python, client_address, host_timeout)
        config = ClusterConfig.of(
            n,
            backend=backend,
            devices=devices,
            env=env,
            hosts=hosts,
            starting=starting,
            detach=detach,
            name=name,
            idle_timeout=idle_timeout,
        )
        self._set_up(config, name)
        self.hang_seconds: float | None = hang_seconds

    def _set_up(self, config: ClusterConfig, name: str | None) -> None:
        self._config = config
        self._life = _Life(self)
        self._runner = CellRunner(config.placement.world_size, shared=config.detach)
        self._views, self._experiments = Views(self), Experiments(self)
        self.name = name if name is not None or config.detach else _automatic_name()
        self.timeline = Timeline()
        self.training = TrainingControl(self)

    # Life cycle

    @property
    def running(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._life.session is not None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.placement.world_size

    @property
    def idle_timeout(self) -> float:
        """How many seconds a detached cluster lives while no client is attached."""
        return self._config.idle_timeout

    def start(self, progress: Progress | None = None) -> Cluster:
        """Starts the processes and joins the ranks; returns once every rank has finished an all-reduce.

        Args:
            progress: called in the calling thread with a fraction from 0 to 1 and the current stage.

        Raises:
            ClusterError: it, or another one of its name, is already running, or a rank failed to start; the message
                contains the end of its log.
        """
        if self._life.session is not None:
            raise ClusterError("the cluster is already running")
        self._life.check_only_one()
        show = progress or ignore
        keeper = None
        if self._config.detach:
            self.name = self.name or free_name()
            keeper = Keeper.start(self.name, self.idle_timeout, self._config.placement.environment)
        session = self._life.begin(keeper)
        try:
            session.open(show)
        except BaseException:
            self.stop()
            raise
        show(1.0, "ready")
        self._life.is_up(session)
        return self

    def stop(self) -> None:
        """Ends every process of the cluster and waits for them; no effect if it is stopped."""
        session = self._life.session
        if session is None or session.owner != os.getpid():
            return
        self._runner.give_up("ended when the cluster was stopped")
        try:
            session.close()
        finally:
            self._life.is_down()

    def restart(self, progress: Progress | None = None) -> None:
        """Restarts every rank's process: variables are lost, process groups are new."""
        session, show = self.session, progress or ignore
        if session.processes.broken:
            self.stop()
            self.start(progress)
            return
        self._runner.give_up("ended when the cluster was restarted")
        try:
            session.replace_ranks(show)
        except BaseException:
            self.stop()
            raise
        show(1.0, "ready")

    def rejoin(self, replace: Iterable[int] = ()) -> dict[int, str]:
        """Rebuilds the process groups; variables are kept, and models and names refer to the new groups.

        A failed rank gets a new process, without variables: `ddp_lab.copy_state_from` copies them from another rank.

        Args:
            replace: ranks whose processes are terminated and restarted, whatever they do.

        Returns:
            rank -> how its former process ended, for those that have a new one.

        Raises:
            ClusterError: a rank is still running a cell, or could not be started.
        """
        return self.session.members.rejoin(replace=[] if not replace else _chosen(replace, self.world_size))

    def use(self) -> None:
        """Makes this the current cluster of the process: `%%distributed` cells without ``--cluster`` run on it.

        Raises:
            ClusterError: it is not running.
        """
        if not self.running:
            raise _does_not_run()
        _running.remove(self)
        _running.append(self)

    @classmethod
    def attach(cls, name: str | None = None, *, take_over: bool = False) -> Cluster:
        """Attaches to a detached cluster of this user on this machine; its ranks, variables and cells are unchanged.

        `missed_cells` then lists the cells that ran meanwhile. One that is still running can be interrupted; the next
        cell waits for its end. `Cluster.find` is the same method.

        Args:
            name: which cluster; None if there is only one.
            take_over: whether to disconnect a client that is attached; its cells continue on the ranks.

        Raises:
            ClusterError: there is no such cluster, a client is attached, or another cluster of that name runs here.

        Example:
            >>> lab = ddp_lab.Cluster.attach("train")
            >>> lab.pull("loss")
            {0: 0.25, 1: 0.25}
        """
        keeper = Keeper.find(name, take_over)
        try:
            cluster = cls.__new__(cls)
            cluster._set_up(ClusterConfig.noted(keeper.notes, keeper.idle_timeout), keeper.name)
            cluster.hang_seconds = keeper.notes["watch_seconds"]
            cluster._life.check_only_one(detached=True)
        except BaseException:
            keeper.leave()
            raise
        session = cluster._life.begin(keeper)
        try:
            session.reattach(keeper)
        except BaseException:
            cluster._life.detach("could not be attached to")
            raise
        cluster._life.is_up(session)
        return cluster

    find = attach

    @staticmethod
    def detached() -> list[DetachedCluster]:
        """This user's detached clusters on this machine: name, ranks, attached client, remaining idle time."""
        return detached_clusters()

    def detach(self) -> None:
        """Detaches from a cluster that was started with ``detach=True``; its ranks and their cells keep running.

        A call that waits for a cell here raises an error; the cell itself continues on the ranks.

        Raises:
            ClusterError: it is not running, or was not started with ``detach=True``.
        """
        session = self._life.session
        if session is None:
            raise ClusterError("the cluster is not running")
        if session.processes.keeper is None:
            raise ClusterError(
                "only a cluster started with detach=True (`%cluster start --detach`) outlives this process"
            )
        if session.owner == os.getpid():
            self._life.detach(f"kept running without this process (`%cluster attach {self.name}` re-attaches)")

    @property
    def missed_cells(self) -> tuple[MissedCell, ...]:
        """The cells that ran while no client was attached, as they are now; empty unless `attach` made this object."""
        return () if self._life.session is None else self._life.session.refresh_missed_cells()

    def successor(self) -> Cluster | None:
        """The cluster that this process uses now that this one is stopped; None if there is none."""
        return None if self.running else current_cluster()

    def __repr__(self) -> str:
        return f"<Cluster {self.name or ''!r}: {self._life.words()}>"

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self._life.at_exit()

    # Cells

    @property
    def results(self) -> Runs:
        """Name -> the last cell of that name, running or ended."""
        return self._runner.results

    @property
    def link(self) -> CommModel | None:
        """The `CommModel` that `measure_communication` has fitted; None before."""
        return self._experiments.link

    @property
    def last_result(self) -> CellResult | None:
        """The result of the last cell that was waited for and did not fail."""
        return self._runner.last_result

    def run(
        self,
        code: str | CellText | Callable[..., Any] | RankFunction,
        /,
        *args: Any,
        ranks: Iterable[int] | None = None,
        wait: bool = True,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a cell, or calls a function, on ranks.

        Args:
            code: the cell's text, or a function. If a cell fails on a rank, cells that were queued behind it there are
                not run.
            args: the function's arguments.
            ranks: where; None for all.
            wait: False returns the `CellRun` at once.
            timeout: seconds after which the ranks are interrupted.
            kwargs: the function's keyword arguments, of any name but these three. With a text: ``label``, the cell's
                name in tracebacks and in `results`; ``board``, which shows the outputs; ``view``, which shows the
                progress with `wait=False`; ``tick``, called from time to time while waiting.

        Returns:
            `CellResult`; with `wait=False`, the `CellRun`.

        Raises:
            CellError: it failed on a rank; ranks that waited for that rank were unblocked, and variables are kept.
            ClusterError: a rank is still running a cell, or the cluster is not running.
            TypeError: the function can't be sent, or has a parameter of one of the three names, which was given.
        """
        own = {name: value for name, value in (("ranks", ranks), ("timeout", timeout)) if value is not None}
        options = CellOptions.of(code, args, kwargs, [*own, *([] if wait else ["wait"])])
        options = replace(options, timeout=timeout, hang_seconds=self.hang_seconds)
        return self._runner.run(
            self.session, code, _chosen(ranks, self.world_size), options, wait, self._life.view_of_run
        )

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Raises KeyboardInterrupt in the running cells, even inside a blocked collective; returns at once."""
        self.session.members.interrupt(ranks)

    def push(self, mapping: Mapping[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks (None: all): all of them everywhere, or none if one can't be sent or loaded.

        Arrays, tensors and models of the notebook's classes arrive unchanged; each rank has a copy of its own.

        Raises:
            TypeError: a value can't be sent; the message names it and the part that can't be.
        """
        chosen = _chosen(ranks, self.world_size)
        variables.push(self.run, mapping, chosen, self.session.processes.far_ranks.intersection(chosen))

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Returns rank -> value of a variable or expression (None: all ranks).

        Tensors are copied to the host, as tensors if this process has imported torch, else as numpy arrays (bfloat16
        and float8 as float32). For a model or an optimizer, its `state_dict()` is returned.
        """
        chosen = _chosen(ranks, self.world_size)
        return variables.pull(self.run, name, chosen, self.session.processes.far_ranks.intersection(chosen))

    # Inspection

    def status(self) -> tuple[RankRecord, ...]:
        """Every rank as it is now."""
        return self.session.members.records()

    def health(self, seconds: float = 1.0) -> tuple[RankHealth, ...]:
        """Every rank as it is now: its cell and for how long it runs, when it was last heard from, and its GPU.

        Args:
            seconds: how long to wait for answers at most; a rank without one is ``"silent"``.
        """
        return self.session.members.health(seconds)

    def doctor(self) -> HangReport:
        """Diagnoses a hang: the cause, and what each rank is doing; also while a cell runs, without stopping it.

        Example:
            >>> print(lab.doctor().diagnosis.sentence)
            rank 0 waits in all_reduce #2 of 4 B (float32 [1]); rank 1 is in `time.sleep(60)` at cell 3 line 2.
        """
        session = self.session
        return HangReport.collect(session.members.source, session.processes.conditions())

    def pids(self) -> dict[str, int]:
        """Name -> process id of every process of the cluster; empty when it is stopped."""
        return {} if self._life.session is None else self._life.session.processes.pids

    def busy_ranks(self) -> set[int]:
        """Ranks that were sent a cell that has not ended."""
        return self.session.members.busy()

    def lost(self) -> Mapping[int, str]:
        """rank -> how its process ended, for failed ranks."""
        return self.session.members.lost()

    @property
    def client(self) -> Any:
        """The connected `ipyparallel.Client`; it connects when it is first asked for."""
        return self.session.processes.client

    @property
    def engine_of_rank(self) -> dict[int, int]:
        """rank -> ipyparallel engine id."""
        return dict(self.session.processes.engine_of_rank)

    @property
    def wire(self) -> Wire:
        """The channel for events and control."""
        return self.session.wire

    # Training models

    reconfigure = _of("training", TrainingControl.reconfigure)
    before_after = _of("training", TrainingControl.before_after)
    inject = _of("training", TrainingControl.inject)
    faults = _of("training", TrainingControl.faults)
    clear_faults = _of("training", TrainingControl.clear_faults)
    breakpoints = _of("training", TrainingControl.breakpoints)
    step_state = _of("training", TrainingControl.step_state)
    wait_paused = _of("training", TrainingControl.wait_paused)
    next_event = _of("training", TrainingControl.next_event)
    next_bucket = _of("training", TrainingControl.next_bucket)
    next_breakpoint = _of("training", TrainingControl.next_breakpoint)
    resume = _of("training", TrainingControl.resume)
    watch_gradients = _of("training", TrainingControl.watch_gradients)
    watch_drift = _of("training", TrainingControl.watch_drift)
    check_drift = _of("training", TrainingControl.check_drift)
    monitoring = _of("training", TrainingControl.monitoring)
    measure_communication = _of("_experiments", Experiments.measure_communication)
    simulate = _of("_experiments", Experiments.simulate)
    tune = _of("_experiments", Experiments.tune)

    # Widgets

    panel = _of("_views", Views.panel)
    dashboard = _of("_views", Views.dashboard)
    what_if = _of("_views", Views.what_if)
    animate_collective = _of("_views", Views.animate_collective)
    dashboard_means = _of("_views", Views.means)

    def _ipython_display_(self) -> None:
        """Shows the panel in a notebook, the table of `status` elsewhere."""
        if kernel_shell() is not None:
            self.panel()._ipython_display_()
            return
        text = status_tables(self.status())[0] if self.running else "The cluster is not running: `.start()` starts it."
        write_line("stdout", text)

    # Internals

    @property
    def session(self) -> Session:
        """The running session.

        Raises:
            ClusterError: the cluster is not running.
        """
        if self._life.session is None:
            raise _does_not_run()
        return self._life.session


class _Life:
    """A cluster's session, from its start or from attaching to it, and its place among the clusters of this process."""

    def __init__(self, cluster: Cluster) -> None:
        self.session: Session | None = None
        self._started = False
        self._cluster = cluster

    @property
    def attached(self) -> bool:
        """Whether it is running and outlives this process."""
        return self.session is not None and self.session.processes.keeper is not None

    def check_only_one(self, detached: bool = False) -> None:
        """Refuses the name of another cluster of this process; a detached one may be attached here already."""
        name = self._cluster.name
        known = [one for one in _running if not (detached and one._life.attached)]
        if any(one.name == name for one in known if one.name is not None):
            raise ClusterError(
                f"a cluster {name!r} is already running in this process: choose another name, or stop it first"
            )

    def begin(self, keeper: Keeper | None) -> Session:
        """Makes the session."""
        cluster = self._cluster
        notes = {"watch_seconds": cluster.hang_seconds}
        self.session = Session(cluster._config, keeper, cluster.timeline, cluster.results.give_up, notes)
        self._started = True
        atexit.register(self.at_exit)
        return self.session

    def is_up(self, session: Session) -> None:
        """Its ranks have joined."""
        if session.processes.keeper is not None:
            session.processes.keeper.on_taken = lambda by: self.detach(f"was taken over by process {by}")
        _running.append(self._cluster)

    def is_down(self) -> None:
        """Its session has ended."""
        self.session = None
        atexit.unregister(self.at_exit)
        if self._cluster in _running:
            _running.remove(self._cluster)

    def at_exit(self) -> None:
        """The process, or a ``with`` block, ends."""
        (self._cluster.detach if self.attached else self._cluster.stop)()

    def detach(self, why: str) -> None:
        """Leaves a detached cluster, also on the keeper's reader thread."""
        session = self.session
        self.is_down()
        if session is not None:
            session.detach(why)

    def words(self) -> str:
        """Its ranks, and what they do."""
        session, cluster = self.session, self._cluster
        if session is None:
            return "stopped" if self._started else "not started"
        doing = "starting"
        if not session.starting:
            lost = session.members.lost()
            cells = [run.label for run in cluster.results.pending_cells(range(cluster.world_size))]
            doing = f"{label_of(lost)} lost" if lost else f"running {enumeration(cells)}" if cells else "idle"
        device = cluster._config.placement.devices[0].partition(":")[0]
        return f"{label_of(range(cluster.world_size))}, {device}, {doing}"

    def view_of_run(self, waited: bool) -> RunView | None:
        """A view of a cell's progress in the notebook."""
        after = "its ranks ended with it"
        if self.attached:
            after = f"its ranks keep running: `%cluster attach {self._cluster.name}` shows how it ended"
        return self._cluster._views.of_run(waited, after)


def _chosen(ranks: Iterable[int] | None, world_size: int) -> list[int]:
    chosen = list(range(world_size)) if ranks is None else sorted(set(ranks))
    for rank in chosen:
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank}: the cluster has ranks 0 to {world_size - 1}")
    if not chosen:
        raise ValueError("choose at least one rank")
    return chosen


def _does_not_run() -> ClusterError:
    others = f"; {_running[-1]!r} is running: `lab = ddp_lab.current_cluster()`" if _running else ""
    return ClusterError(f"the cluster is not running: start it with `%cluster start` or `.start()`{others}")


def _automatic_name() -> str:
    """``cluster-1``, ``cluster-2``, ...: a name that no running cluster of this process has."""
    taken = {one.name for one in _running}
    return next(name for number in _numbers if (name := f"cluster-{number}") not in taken)


def uses_hosts(cluster: Cluster, hosts: str, n: int | None) -> bool:
    """Whether its ranks are on these hosts, given as for the constructor."""
    config = cluster._config
    return config.hosts is not None and config.hosts.hosts == parse_hosts(hosts, n)


def current_cluster() -> Cluster | None:
    """The running cluster that was started last or chosen by `%cluster use`; None if there is none."""
    return _running[-1] if _running else None


def running_clusters() -> list[Cluster]:
    """All clusters of this process that run, the current one first."""
    return _running[::-1]
