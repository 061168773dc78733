"""Cluster: the ranks that cells run on.

A cluster is a controller, a fork server and one engine per rank on this machine, and a wire for cells, events and
control. The code of the ranks is in `ddp_lab.engine`; this side refers to it by name only, and never imports torch.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ..control.collectives import DEFAULT_BYTES
from ..control.records import RankHealth, RankRecord
from ..control.training import TrainingControl
from ..control.wire import Wire
from ..diagnosis.hang_report import HangReport
from ..errors import ClusterError
from ..formatting import enumeration, label_of
from ..output.display import RunView, kernel_shell, write_line
from ..output.status_table import status_tables
from ..protocol.entry_points import RankFunction
from ..protocol.messages import CellText
from ..timeline.timeline import Timeline
from .cells import variables
from .cells.run import CellOptions, CellResult
from .config import ClusterConfig
from .processes.hosts import parse_hosts
from .processes.keeper import DetachedCluster, Keeper, detached_clusters, free_name
from .processes.remote_launchers import Starting
from .processes.startup import Progress, ignore
from .runner import CellRunner, Runs
from .session import MissedCell, Session

if TYPE_CHECKING:
    from ..dashboard.cluster_panel.panel import ClusterPanel
    from ..dashboard.collectives import Collectives
    from ..dashboard.dashboard import Dashboard
    from ..simulation.link_model import CommModel
    from ..simulation.settings import Tuned
    from ..timeline.what_if import WhatIf


_P = ParamSpec("_P")
_R = TypeVar("_R")
_running: list[Cluster] = []  # in this process, the current one at the end
_numbers = itertools.count(1)  # of clusters without a name of their own


def _of_training(method: Callable[Concatenate[TrainingControl, _P], _R]) -> Callable[Concatenate[Cluster, _P], _R]:
    """A method of `Cluster.training`, as a method of the cluster."""

    @functools.wraps(method)
    def forwarded(self: Cluster, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(self.training, *args, **kwargs)

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
        link: the `CommModel` that `measure_communication` has fitted; None before.

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
        self._session: Session | None = None
        self._started = False
        self._runner = CellRunner(config.placement.world_size, shared=config.detach)
        self._panel: ClusterPanel | None = None
        self.name = name if name is not None or config.detach else _automatic_name()
        self.timeline = Timeline()
        self.training = TrainingControl(self)
        self.link: CommModel | None = None

    # Life cycle

    @property
    def running(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._session is not None

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
        if self._session is not None:
            raise ClusterError("the cluster is already running")
        self._check_only_one()
        show = progress or ignore
        keeper = None
        if self._config.detach:
            self.name = self.name or free_name()
            keeper = Keeper.start(self.name, self.idle_timeout, self._config.placement.environment)
        session = self._begin(keeper)
        try:
            session.open(show)
        except BaseException:
            self.stop()
            raise
        show(1.0, "ready")
        self._is_up(session)
        return self

    def stop(self) -> None:
        """Ends every process of the cluster and waits for them; no effect if it is stopped."""
        session = self._session
        if session is None or session.owner != os.getpid():
            return
        self._runner.give_up("ended when the cluster was stopped")
        try:
            session.close()
        finally:
            self._is_down()

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
        return self.session.members.rejoin(replace=[] if not replace else self._chosen(replace))

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
            cluster._check_only_one(detached=True)
        except BaseException:
            keeper.leave()
            raise
        session = cluster._begin(keeper)
        try:
            session.open_again(keeper)
        except BaseException:
            cluster._let_go("could not be attached to")
            raise
        cluster._is_up(session)
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
        session = self._session
        if session is None:
            raise ClusterError("the cluster is not running")
        if session.processes.keeper is None:
            raise ClusterError(
                "only a cluster started with detach=True (`%cluster start --detach`) outlives this process"
            )
        if session.owner == os.getpid():
            self._let_go(f"kept running without this process (`%cluster attach {self.name}` re-attaches)")

    @property
    def missed_cells(self) -> tuple[MissedCell, ...]:
        """The cells that ran while no client was attached, as they are now; empty unless `attach` made this object."""
        return () if self._session is None else self._session.ask_missed()

    def successor(self) -> Cluster | None:
        """The cluster that this process uses now that this one is stopped; None if there is none."""
        return None if self.running else current_cluster()

    def runs_on(self, hosts: str, n: int | None) -> bool:
        """Whether its ranks are on these hosts, given as for the constructor."""
        return self._config.hosts is not None and self._config.hosts.hosts == parse_hosts(hosts, n)

    def __repr__(self) -> str:
        if self._session is None:
            return f"<Cluster {self.name or ''!r}: {'stopped' if self._started else 'not started'}>"
        ranks, device = label_of(range(self.world_size)), self._config.placement.devices[0].partition(":")[0]
        return f"<Cluster {self.name!r}: {ranks}, {device}, {self._doing(self._session)}>"

    def _doing(self, session: Session) -> str:
        """What its ranks do, in words."""
        if session.starting:
            return "starting"
        lost = session.members.lost()
        if lost:
            return f"{label_of(lost)} lost"
        cells = [run.label for run in self.results.pending_cells(range(self.world_size))]
        return f"running {enumeration(cells)}" if cells else "idle"

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self._at_exit()

    # Cells

    @property
    def results(self) -> Runs:
        """Name -> the last cell of that name, running or ended."""
        return self._runner.results

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
        return self._runner.run(self.session, code, self._chosen(ranks), options, wait, self._view_of_run)

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Raises KeyboardInterrupt in the running cells, even inside a blocked collective; returns at once."""
        self.session.members.interrupt(ranks)

    def push(self, mapping: Mapping[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks (None: all): all of them everywhere, or none if one can't be sent or loaded.

        Arrays, tensors and models of the notebook's classes arrive unchanged; each rank has a copy of its own.

        Raises:
            TypeError: a value can't be sent; the message names it and the part that can't be.
        """
        chosen = self._chosen(ranks)
        variables.push(self.run, mapping, chosen, self.far_ranks.intersection(chosen))

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Returns rank -> value of a variable or expression (None: all ranks).

        Tensors are copied to the host, as tensors if this process has imported torch, else as numpy arrays (bfloat16
        and float8 as float32). For a model or an optimizer, its `state_dict()` is returned.
        """
        chosen = self._chosen(ranks)
        return variables.pull(self.run, name, chosen, self.far_ranks.intersection(chosen))

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
        return HangReport.made(session.members.examine, session.processes.conditions())

    def pids(self) -> dict[str, int]:
        """Name -> process id of every process of the cluster; empty when it is stopped."""
        return {} if self._session is None else self._session.processes.pids

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
    def far_ranks(self) -> frozenset[int]:
        """Ranks of other hosts: large objects are sent to and from them in messages, not through shared memory."""
        return self.session.processes.far_ranks

    @property
    def wire(self) -> Wire:
        """The channel for events and control."""
        return self.session.wire

    # Training models

    reconfigure = _of_training(TrainingControl.reconfigure)
    before_after = _of_training(TrainingControl.before_after)
    inject = _of_training(TrainingControl.inject)
    faults = _of_training(TrainingControl.faults)
    clear_faults = _of_training(TrainingControl.clear_faults)
    breakpoints = _of_training(TrainingControl.breakpoints)
    step_state = _of_training(TrainingControl.step_state)
    wait_paused = _of_training(TrainingControl.wait_paused)
    next_event = _of_training(TrainingControl.next_event)
    next_bucket = _of_training(TrainingControl.next_bucket)
    next_breakpoint = _of_training(TrainingControl.next_breakpoint)
    resume = _of_training(TrainingControl.resume)
    watch_gradients = _of_training(TrainingControl.watch_gradients)
    watch_drift = _of_training(TrainingControl.watch_drift)
    check_drift = _of_training(TrainingControl.check_drift)
    monitoring = _of_training(TrainingControl.monitoring)

    def measure_communication(self, sizes: Sequence[int] | None = None, repeats: int = 7) -> CommModel:
        """Measures all-reduces on the ranks (about a second on 2 CPU ranks) and fits a model of the interconnect.

        Args:
            sizes: bytes of the buffers; None: 1 KiB to 16 MiB.
            repeats: number of measurements of each size.
        """
        from ..control.tuning import measure_communication

        self.link = measure_communication(self, sizes, repeats)
        return self.link

    def simulate(self, link: CommModel | None = None, *, model: int | None = None, **what: Any) -> WhatIf[Timeline]:
        """Predicts the step of the model that trained last; see `Timeline.simulate`.

        Args:
            link: how long an all-reduce takes; None: as measured by `measure_communication`, which is called if it was
                not.
            model: which model; None for the most recently active.
            what: see `Timeline.simulate`.
        """
        from ..timeline.what_if import what_if

        if link is not None:
            return what_if(self.timeline, link, reducer=model, **what)
        own = self.link or self.measure_communication()
        return what_if(self.timeline, own, recorded_link=own, reducer=model, **what)

    def tune(
        self,
        step: str | None = None,
        *,
        model: int | None = None,
        lossy: bool = False,
        seconds: float = 300.0,
        steps: int | None = None,
        apply: bool = True,
        tell: Callable[[str], object] | None = None,
    ) -> Tuned:
        """Searches for bucket size limits (and comm hooks) with which the model trains faster, and applies the best.

        Candidates come from the simulator. They are A/B-tested against the current setting in alternating blocks of
        training steps. The best one is applied if it is faster by its 95 % bound, else nothing is changed. After an
        error, an interrupt, or if training ends too early, the model's original setting is restored.

        The steps are either those of a cell that trains meanwhile (``%%distributed --no-wait``), or tune runs `step`
        itself. Both are ordinary training steps and change the weights.

        Args:
            step: the code of one training step on each rank, such as ``"train_step()"``; None: a cell trains.
            model: which model; None for the most recently active of those that exist.
            lossy: whether to try also comm hooks that round gradients to 16 bits.
            seconds: time limit.
            steps: training steps per block; None: about 0.3 s of them.
            apply: False: the model keeps its setting; the result says what is faster.
            tell: called with a line on each round; None: the lines are printed to stderr.

        Returns:
            The result; printed, it shows what to write into the program.

        Raises:
            ClusterError: no model is training, or the ranks don't respond.
            CellError: `step` failed.

        Example:
            >>> lab.tune("step()")  # where a cell has defined model and step
        """
        from ..control import tuning

        return tuning.tune(
            self,
            step,
            reducer=model,
            steps=steps,
            lossy=lossy,
            seconds=seconds,
            apply=apply,
            tell=tell or (lambda line: print(line, file=sys.stderr)),
        )

    # Widgets

    def panel(self) -> ClusterPanel:
        """Returns the widget that shows each rank live, with buttons to interrupt, rejoin and restart.

        It shows state, device, memory, CPU and GPU use, newest step, and seconds since the rank was last heard from,
        also while a cell runs. A cluster that is the last expression of a notebook's cell shows it.
        """
        from ..dashboard.cluster_panel.panel import ClusterPanel

        if self._panel is None or self._panel.comm is None:  # it was closed
            self._panel = ClusterPanel(self)
        return self._panel

    def _ipython_display_(self) -> None:
        """Shows the panel in a notebook, the table of `status` elsewhere."""
        if kernel_shell() is not None:
            self.panel()._ipython_display_()
            return
        text = status_tables(self.status())[0] if self.running else "The cluster is not running: `.start()` starts it."
        write_line("stdout", text)

    def dashboard(self, *views: str) -> Dashboard:
        """Returns a widget that shows the timeline live.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"step"`` (through a backward), ``"fault_injection"``, ``"what_if"`` (sliders),
                ``"gradients"``, ``"groups"`` (every collective) and ``"collectives"``; none: all.
        """
        from ..dashboard.dashboard import Dashboard

        return Dashboard(self.timeline, views=views or None, **self.dashboard_means())

    def what_if(self) -> Dashboard:
        """Returns a widget that predicts the step for the values of its sliders, next to the recorded step.

        Sliders: world size, bandwidth and latency of the interconnect, bucket size limit, "without the straggler".
        "Run it" tests a bucket size limit against the current one on the training ranks and shows the prediction's
        error.
        """
        return self.dashboard("what_if")

    def animate_collective(
        self, collective: str = "all_reduce", algorithm: str | None = None, *, bytes: int = DEFAULT_BYTES
    ) -> Collectives:
        """Runs a collective step by step on the ranks, and returns a widget that animates it.

        The tensors are small and real: the numbers that arrived show which rank held which part after each step. Each
        step is timed (median of five runs). The widget runs other collectives on demand.

        Args:
            collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
                ``"gather"``, ``"scatter"`` or ``"all_to_all"``; the root is rank 0.
            algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"``, ``"doubling"`` or ``"direct"``, where the
                collective has it; None for its first one.
            bytes: size of the buffer on each rank, up to 64 MiB; rounded up so that each part holds whole numbers.

        Raises:
            ValueError: there is no such algorithm, or it does not support this number of ranks.
            ClusterError: the cluster is not running, a rank has failed, or the ranks are running a cell.

        Example:
            >>> lab.animate_collective("all_reduce", "ring", bytes=1_000_000)
            >>> lab.animate_collective("broadcast", "tree").shown.table()
        """
        from ..control.collectives import run_collective
        from ..dashboard.collectives import Collectives

        shown = run_collective(self, collective, algorithm, bytes)
        made = Collectives(self.timeline, **self.dashboard_means())
        made.show(shown)
        return made

    def dashboard_means(self) -> dict[str, Any]:
        """The questions that a dashboard can ask the ranks."""
        from .views import dashboard_means

        return dashboard_means(self)

    # Internals

    @property
    def session(self) -> Session:
        """The running session.

        Raises:
            ClusterError: the cluster is not running.
        """
        if self._session is None:
            raise _does_not_run()
        return self._session

    @property
    def _attached(self) -> bool:
        """Whether it is running and outlives this process."""
        return self._session is not None and self._session.processes.keeper is not None

    def _check_only_one(self, detached: bool = False) -> None:
        """Refuses the name of another cluster of this process; a detached one may be attached here already."""
        known = [one for one in _running if not (detached and one._attached)]
        if any(one.name == self.name for one in known if one.name is not None):
            raise ClusterError(
                f"a cluster {self.name!r} is already running in this process: choose another name, or stop it first"
            )

    def _begin(self, keeper: Keeper | None) -> Session:
        notes = {"watch_seconds": self.hang_seconds}
        session = Session(self._config, keeper, self.timeline, self.results.give_up, notes)
        atexit.register(self._at_exit)
        self._session, self._started = session, True
        return session

    def _is_up(self, session: Session) -> None:
        if session.processes.keeper is not None:
            session.processes.keeper.on_taken = self._taken
        _running.append(self)

    def _is_down(self) -> None:
        self._session = None
        atexit.unregister(self._at_exit)
        if self in _running:
            _running.remove(self)

    def _at_exit(self) -> None:
        if self._attached:
            self.detach()
        else:
            self.stop()

    def _taken(self, by: int) -> None:
        """On the keeper's reader thread: another client has the cluster now."""
        self._let_go(f"was taken over by process {by}")

    def _let_go(self, why: str) -> None:
        session = self._session
        self._is_down()
        if session is not None:
            session.let_go(why)

    def _view_of_run(self, waited: bool) -> RunView | None:
        """The view of a cell's progress; for a cell that is waited for, on pages opened meanwhile."""
        if kernel_shell() is None:
            return None
        from ..dashboard.background_cell import BackgroundCell

        after = "its ranks ended with it"
        if self._attached:
            after = f"its ranks keep running: `%cluster attach {self.name}` shows how it ended"
        return BackgroundCell(self.timeline, after, waited)

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        for rank in chosen:
            if not 0 <= rank < self.world_size:
                raise ValueError(f"there is no rank {rank}: the cluster has ranks 0 to {self.world_size - 1}")
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


def current_cluster() -> Cluster | None:
    """The running cluster that was started last or chosen by `%cluster use`; None if there is none."""
    return _running[-1] if _running else None


def running_clusters() -> list[Cluster]:
    """All clusters of this process that run, the current one first."""
    return _running[::-1]
