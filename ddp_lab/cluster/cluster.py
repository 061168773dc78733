"""Cluster: ranks that cells run on.

A cluster is a controller, a fork server and one engine per rank on this machine, an ipyparallel client, and a wire
for events and control. What the ranks do is in `ddp_lab.engine`; this side reaches it by name only, and never
imports torch.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ..control.collectives import DEFAULT_BYTES
from ..control.records import CellText, RankRecord, RankVitals
from ..control.training import TrainingControl
from ..control.wire import Wire
from ..errors import ClusterError
from ..formatting import enumeration, label_of
from ..output.board import Board
from ..output.display import RunView, kernel_shell, write_line
from ..output.status_table import status_tables
from ..protocol.entry_points import RankFunction
from ..timeline.timeline import Timeline
from .cells import variables
from .cells.doctor import Report
from .cells.run import CellOptions, CellResult
from .config import ClusterConfig
from .processes.hosts import parse_hosts
from .processes.keeper import DetachedCluster, Keeper, detached_clusters, free_name
from .processes.remote_launchers import Starting
from .processes.startup import Progress, ignore
from .runner import CellRunner, Runs
from .session import LeftCell, Session

if TYPE_CHECKING:
    from ..simulation.link_model import LinkModel
    from ..simulation.settings import Tuned
    from ..timeline.what_if import WhatIf
    from ..widgets.cluster_panel.panel import ClusterPanel
    from ..widgets.dashboard import Dashboard
    from ..widgets.view_widgets import Collectives, WhatIfSliders


_P = ParamSpec("_P")
_R = TypeVar("_R")
_running: list[Cluster] = []  # in this process, the current one at the end
_numbers = itertools.count(1)  # of clusters without a name of their own


def _of_training(method: Callable[Concatenate[TrainingControl, _P], _R]) -> Callable[Concatenate[Cluster, _P], _R]:
    """What `Cluster.training` does, as a method of the cluster."""

    @functools.wraps(method)
    def forwarded(self: Cluster, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(self.training, *args, **kwargs)

    forwarded.__qualname__ = f"Cluster.{method.__name__}"
    return forwarded


class Cluster:
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
        timeline: `Timeline` of what the ranks record; it stays when the cluster stops.
        training: `TrainingControl`, which acts on models while they train.
        link: `LinkModel` that `measure_link` has fitted; None before.

    Raises:
        ValueError: an argument makes no sense here.

    Example:
        with ddp_lab.Cluster(2) as lab:
            lab.run("t = torch.ones(1); dist.all_reduce(t); t.item()").values    # {0: 2.0, 1: 2.0}
    """

    takes_cells = True

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
        if watch_seconds is not None and watch_seconds <= 0:
            raise ValueError(f"watch_seconds={watch_seconds}: give a time in seconds, or None for never")
        starting = Starting(engines, python, address, host_seconds)
        config = ClusterConfig.of(
            n,
            backend=backend,
            devices=devices,
            env=env,
            hosts=hosts,
            starting=starting,
            detach=detach,
            name=name,
            lease_seconds=lease_seconds,
        )
        self._set_up(config, name)
        self.watch_seconds: float | None = watch_seconds

    def _set_up(self, config: ClusterConfig, name: str | None) -> None:
        self._config = config
        self._session: Session | None = None
        self._started = False
        self._runner = CellRunner(config.placement.world_size, shared=config.detach)
        self._panel: ClusterPanel | None = None
        self.name = name if name is not None or config.detach else _automatic_name()
        self.timeline = Timeline()
        self.training = TrainingControl(self)
        self.link: LinkModel | None = None

    # Life

    @property
    def running(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._session is not None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.placement.world_size

    @property
    def lease_seconds(self) -> float:
        """How long a detached cluster lives while no client is attached."""
        return self._config.lease_seconds

    def start(self, progress: Progress | None = None) -> Cluster:
        """Starts the processes and joins the ranks; returns once every rank has finished an all-reduce.

        Args:
            progress: called with a fraction from 0 to 1 and what is being waited for, in the calling thread.

        Raises:
            ClusterError: it runs already, another one of its name does, or a rank failed to start; the message holds
                the end of its log.
        """
        if self._session is not None:
            raise ClusterError("the cluster runs already")
        self._check_only_one()
        show = progress or ignore
        keeper = None
        if self._config.detach:
            self.name = self.name or free_name()
            keeper = Keeper.start(self.name, self.lease_seconds, self._config.placement.environment)
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
        """Ends every process of the cluster and waits for them; without effect on a stopped one."""
        session = self._session
        if session is None or session.owner != os.getpid():
            return
        self._runner.give_up("ended when the cluster was stopped")
        try:
            session.close()
        finally:
            self._is_down()

    def restart(self, progress: Progress | None = None) -> None:
        """Replaces every rank's process by a new one: variables are gone, groups are new."""
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
        """Gives the ranks new process groups; variables are kept, and models and names follow to the new groups.

        A rank whose process has ended gets a new one, without variables: `ddp_lab.restore_from` copies them.

        Args:
            replace: ranks whose processes are ended first, whatever they do.

        Returns:
            rank -> how its former process ended, for those that have a new one.

        Raises:
            ClusterError: a rank still runs a cell, or could not be started.
        """
        return self.session.members.rejoin(replace=[] if not replace else self._chosen(replace))

    def use(self) -> None:
        """Makes it the current cluster of this process: `%%distributed` cells without ``--cluster`` run on it.

        Raises:
            ClusterError: it does not run.
        """
        if not self.running:
            raise _does_not_run()
        _running.remove(self)
        _running.append(self)

    @classmethod
    def find(cls, name: str | None = None, *, take_over: bool = False) -> Cluster:
        """Attaches to a detached cluster of this user on this machine; the ranks, their variables and cells are as
        they were.

        `left` then says what has run meanwhile. A cell that still runs can be interrupted; the next cell has to wait
        for its end.

        Args:
            name: which; None for the only one.
            take_over: send a client away that is attached: its cells go on, but it hears nothing of them any more.

        Raises:
            ClusterError: there is no such cluster, a client is attached, or this process runs another one of its name.

        Example:
            lab = ddp_lab.Cluster.find("train")
            lab.pull("loss")
        """
        keeper = Keeper.find(name, take_over)
        try:
            cluster = cls.__new__(cls)
            cluster._set_up(ClusterConfig.noted(keeper.notes, keeper.lease_seconds), keeper.name)
            cluster.watch_seconds = keeper.notes["watch_seconds"]
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

    @staticmethod
    def detached() -> list[DetachedCluster]:
        """This user's detached clusters on this machine: name, ranks, who is attached, how long they live."""
        return detached_clusters()

    def detach(self) -> None:
        """Lets go of a cluster that was started with ``detach=True``: its ranks and their cells go on without us.

        Cells that are waited for here end with an error; on the ranks they run on.

        Raises:
            ClusterError: it does not run, or was not started so.
        """
        session = self._session
        if session is None:
            raise ClusterError("the cluster does not run")
        if session.processes.keeper is None:
            raise ClusterError(
                "only a cluster started with detach=True (`%cluster start --detach`) outlives this process"
            )
        if session.owner == os.getpid():
            self._let_go(f"went on without this process (`%cluster attach {self.name}` finds the cluster again)")

    @property
    def left(self) -> tuple[LeftCell, ...]:
        """The cells that ran on while nobody was attached, as they are now; empty but for a cluster that was found."""
        return () if self._session is None else self._session.ask_left()

    def successor(self) -> Cluster | None:
        """The cluster that this process uses now that this one does not run; None if there is none."""
        return None if self.running else current_cluster()

    def runs_on(self, hosts: str, n: int | None) -> bool:
        """Whether its ranks are on these hosts, named as for the constructor."""
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
        cells = [run.label for run in self.results.ahead(range(self.world_size))]
        return f"runs {enumeration(cells)}" if cells else "idle"

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
        """Of the last cell that was waited for and did not fail."""
        return self._runner.last_result

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
        options = CellOptions(
            label=label, args=args, kwargs=kwargs, board=board, timeout=timeout, watch_seconds=self.watch_seconds
        )
        return self._runner.run(
            self.session,
            code,
            self._chosen(ranks),
            options,
            wait=wait,
            view=view,
            new_view=self._view_of_run,
            tick=tick,
        )

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Raises KeyboardInterrupt in the cells that run, also in a collective that waits; returns at once."""
        self.session.members.interrupt(ranks)

    def push(self, mapping: Mapping[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks (None: all): all of them everywhere, or, if one can't travel or be loaded, none.

        Arrays and tensors arrive as they are, each rank with a copy of its own, and models of the notebook's classes.

        Raises:
            TypeError: a value can't be sent; the message names it and its part.
        """
        chosen = self._chosen(ranks)
        variables.push(self.run, mapping, chosen, self.far_ranks.intersection(chosen))

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Returns rank -> value of a variable or expression (None: all ranks).

        Tensors come to the host, as tensors if this process has imported torch, else as numpy arrays (bfloat16 and
        float8 as float32); of a model or an optimizer comes the `state_dict()`.
        """
        chosen = self._chosen(ranks)
        return variables.pull(self.run, name, chosen, self.far_ranks.intersection(chosen))

    # Looks

    def status(self) -> tuple[RankRecord, ...]:
        """Every rank as it is now."""
        return self.session.members.records()

    def vitals(self, seconds: float = 1.0) -> tuple[RankVitals, ...]:
        """Every rank as it is now, what it runs for how long, when it was last heard of, and its GPU.

        Args:
            seconds: to wait for answers at most; a rank without one is ``"silent"``.
        """
        return self.session.members.vitals(seconds)

    def doctor(self) -> Report:
        """Says why the ranks do not come on, and what each of them does; also while a cell runs, without stopping it.

        Example:
            lab.doctor()
            # rank 0 waits in all_reduce #2 of 4 B (float32 [1]); rank 1 is in `time.sleep(60)` at cell 3 line 2.
        """
        session = self.session
        return Report.made(session.members.examine, session.processes.conditions())

    def pids(self) -> dict[str, int]:
        """Name -> process id of every process of the cluster; empty when it is stopped."""
        return {} if self._session is None else self._session.processes.pids

    def busy_ranks(self) -> set[int]:
        """Ranks that were given a cell that has not ended."""
        return self.session.members.busy()

    def lost(self) -> Mapping[int, str]:
        """rank -> how its process ended, for those that have none."""
        return self.session.members.lost()

    @property
    def client(self) -> Any:
        """The connected `ipyparallel.Client`."""
        return self.session.processes.client

    @property
    def engine_of_rank(self) -> dict[int, int]:
        """rank -> ipyparallel engine id."""
        return dict(self.session.processes.engine_of_rank)

    @property
    def far_ranks(self) -> frozenset[int]:
        """Ranks of other hosts: large objects travel to and from them in messages, not through shared memory."""
        return self.session.processes.far_ranks

    @property
    def wire(self) -> Wire:
        """The channel for events and control."""
        return self.session.wire

    # Models that train

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
    looks = _of_training(TrainingControl.looks)

    def measure_link(self, sizes: Sequence[int] | None = None, repeats: int = 7) -> LinkModel:
        """Measures all-reduces on the ranks (about a second on 2 CPU ranks) and fits a model of the link to them.

        Args:
            sizes: bytes of the buffers; None: 1 KiB to 16 MiB.
            repeats: measurements of each size.
        """
        from ..control.tuning import measure_link

        self.link = measure_link(self, sizes, repeats)
        return self.link

    def simulate(self, link: LinkModel | None = None, **what: Any) -> WhatIf[Timeline]:
        """Predicts the step of the model that trained last, see `Timeline.simulate`.

        Args:
            link: how long an all-reduce takes; None: as measured on the ranks, now if `measure_link` was not called.
            what: see `Timeline.simulate`.
        """
        from ..timeline.what_if import what_if

        own = link or self.link or self.measure_link()
        return what_if(self.timeline, own, recorded_link=None if link is not None else own, **what)

    def tune(
        self,
        step: str | None = None,
        *,
        reducer: int | None = None,
        lossy: bool = False,
        seconds: float = 300.0,
        steps: int | None = None,
        apply: bool = True,
        tell: Callable[[str], object] | None = None,
    ) -> Tuned:
        """Looks for bucket caps (and comm hooks) with which the model trains faster, and gives it those.

        Candidates come from the simulator. They and what the model has take turns of some training steps each; the
        best one is taken if its 95 % bound leaves no doubt that it is faster, else nothing is changed. After an error,
        an interrupt, or when training ends too early, the model has what it had.

        Either the steps are those of a cell that trains meanwhile (``%%distributed --no-wait``), or `step` says what
        one training step is and tune trains them itself; both are steps like others, and move the weights.

        Args:
            step: the code of one training step on each rank, such as ``"train_step()"``; None: a cell trains.
            reducer: which model; None for the most recently active of those that exist.
            lossy: try comm hooks, too, that round gradients to 16 bits.
            seconds: how long it may take.
            steps: of a turn; None: about 0.3 s of them.
            apply: False: the model keeps what it has; the result says what is faster.
            tell: is called with a line on each round; None: prints them to stderr.

        Returns:
            What was found; printed, it says what to write into the program.

        Raises:
            ClusterError: nothing trains, or the ranks don't answer.
            CellError: `step` failed.

        Example:
            lab.tune("step()")          # where a cell has defined model and step
        """
        from ..control import tuning

        return tuning.tune(
            self.training,
            step,
            self.link,
            self.measure_link,
            reducer=reducer,
            steps=steps,
            lossy=lossy,
            seconds=seconds,
            apply=apply,
            tell=tell or (lambda line: print(line, file=sys.stderr)),
        )

    # Widgets

    def panel(self) -> ClusterPanel:
        """Returns a widget that shows each rank live, with buttons to interrupt, rejoin and restart; always the same.

        State, device, memory, processor and GPU, newest step, seconds since the rank was last heard of. It works while
        a cell runs. A cluster that is the last expression of a notebook's cell shows it.
        """
        from ..widgets.cluster_panel.panel import ClusterPanel

        if self._panel is None or self._panel.comm is None:  # it was closed
            self._panel = ClusterPanel(self)
        return self._panel

    def _ipython_display_(self) -> None:
        """Shows the panel in a notebook, the table of `status` elsewhere."""
        if kernel_shell() is not None:
            self.panel()._ipython_display_()
            return
        text = status_tables(self.status())[0] if self.running else "The cluster does not run: `.start()` starts it."
        write_line("stdout", text)

    def dashboard(self, *views: str) -> Dashboard:
        """Returns a widget that shows the timeline live.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"step"`` (through a backward), ``"rehearsal"`` (faults on purpose), ``"what_if"`` (sliders),
                ``"gradients"`` and ``"collectives"``; none: all.
        """
        from ..widgets.dashboard import Dashboard

        return Dashboard(self.timeline, views=views or None, **self.dashboard_means())

    def what_if(self) -> WhatIfSliders:
        """Returns a widget that predicts the step for what its sliders say, beside what was recorded.

        World size, bandwidth and latency of the link, bucket cap, "without the straggler"; "Run it" has the ranks that
        train take turns with a cap and with what they have, and tells the prediction's error.
        """
        from ..widgets.view_widgets import WhatIfSliders

        return WhatIfSliders(self.timeline, **self.dashboard_means())

    def show_collective(
        self, collective: str = "all_reduce", algorithm: str | None = None, *, bytes: int = DEFAULT_BYTES
    ) -> Collectives:
        """Runs a collective step by step on the ranks, and returns a widget that plays what happened.

        The tensors are real, small and the algorithm's own: who held which part after each step is read off the numbers
        that arrived, and each step is timed (median of five runs). The widget runs others on demand.

        Args:
            collective: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
                ``"gather"``, ``"scatter"`` or ``"all_to_all"``; the root is rank 0.
            algorithm: ``"ring"``, ``"tree"``, ``"chain"``, ``"halving"``, ``"doubling"`` or ``"direct"``, where the
                collective has it; None for its first one.
            bytes: of the buffer on each rank, up to 64 MiB; rounded up to whole numbers in as many parts as ranks.

        Raises:
            ValueError: there is no such algorithm, or it can't run on so many ranks.
            ClusterError: the cluster does not run, a rank is dead, or the ranks run a cell.

        Example:
            lab.show_collective("all_reduce", "ring", bytes=1_000_000)
            lab.show_collective("broadcast", "tree").shown.table()
        """
        from ..control.collectives import run_collective
        from ..widgets.view_widgets import Collectives

        shown = run_collective(self, collective, algorithm, bytes)
        made = Collectives(self.timeline, **self.dashboard_means())
        made.show(shown)
        return made

    def dashboard_means(self) -> dict[str, Any]:
        """What a dashboard can ask of the ranks."""
        from .views import dashboard_means

        return dashboard_means(self)

    # Behind the scenes

    @property
    def session(self) -> Session:
        """What runs.

        Raises:
            ClusterError: nothing does.
        """
        if self._session is None:
            raise _does_not_run()
        return self._session

    @property
    def _attached(self) -> bool:
        """Whether it runs and outlives this process."""
        return self._session is not None and self._session.processes.keeper is not None

    def _check_only_one(self, detached: bool = False) -> None:
        """Refuses the name of another cluster that runs here; a detached one may be attached here already."""
        known = [one for one in _running if not (detached and one._attached)]
        if any(one.name == self.name for one in known if one.name is not None):
            raise ClusterError(
                f"a cluster {self.name!r} runs in this process already: choose another name, or stop that one first"
            )

    def _begin(self, keeper: Keeper | None) -> Session:
        notes = {"watch_seconds": self.watch_seconds}
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
        self._let_go(f"passed to process {by}, which took the cluster over")

    def _let_go(self, why: str) -> None:
        session = self._session
        self._is_down()
        if session is not None:
            session.let_go(why)

    def _view_of_run(self, waited: bool) -> RunView | None:
        """What shows how far a cell is; if it is waited for, on pages that were opened meanwhile."""
        if kernel_shell() is None:
            return None
        from ..widgets.background_cell import BackgroundCell

        after = "its ranks ended with it"
        if self._attached:
            after = f"its ranks go on: `%cluster attach {self.name}` says what became of it"
        return BackgroundCell(self.timeline, after, waited)

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        for rank in chosen:
            if not 0 <= rank < self.world_size:
                raise ValueError(f"there is no rank {rank}: the cluster has ranks 0 to {self.world_size - 1}")
        if not chosen:
            raise ValueError("no rank was chosen")
        return chosen


def _does_not_run() -> ClusterError:
    others = f"; {_running[-1]!r} runs: `lab = ddp_lab.current_cluster()`" if _running else ""
    return ClusterError(f"the cluster does not run: start it with `%cluster start` or `.start()`{others}")


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
