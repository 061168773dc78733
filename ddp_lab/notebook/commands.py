"""The magics' actions and displays: progress of a start, the table of ranks, one cell on the current cluster."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.core.error import UsageError

from ..cluster.cells.failures import replaced_text
from ..errors import ClusterError, DdpLabError
from ..formatting import enumeration, label_of
from ..output.board import Board, OutputBoard, default_board
from ..output.by_rank import VIEWS, KeptCells, OutputByRank, SwitchableBoard
from ..output.display import FollowedCell, KernelDisplay, ProgressLine, kernel_shell, write_line
from ..output.status_table import cells_of, status_tables, tables
from ..protocol.entry_points import ASSISTANTS, CLUSTER
from ..protocol.messages import CellText
from . import debugger
from .scripts import export_executed, export_notebook
from .scripts import import_script as write_notebook_of

if TYPE_CHECKING:
    from ..cluster.cells.run import CellRun
    from ..cluster.cluster import Cluster
    from ..dashboard.output_views import OutputViews

__all__ = [
    "attach",
    "current",
    "debug",
    "detach",
    "doctor",
    "export",
    "import_script",
    "interrupt",
    "list_clusters",
    "mcp",
    "on_current",
    "pull",
    "rejoin",
    "restart",
    "results",
    "run_cell",
    "start",
    "status",
    "stop",
    "stop_quietly",
    "use",
    "view",
]

_VIEW_WORDS = {"merged": "merged", "tabs": "in tabs", "side-by-side": "side by side"}
_VALUES = 60  # characters of a cell's values in the table of results
_kept_cells = KeptCells()
_view_switch: OutputViews | None = None
_making_switch = threading.Lock()


def start(
    n: int | None = None,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "auto",
    hosts: str | None = None,
    name: str | None = None,
    detach: bool = False,
    **further: Any,
) -> Cluster:
    """Starts a cluster with a progress bar and makes it the current one.

    A running cluster that matches the arguments is kept, so that a notebook can be run again from the top; also a
    detached one of the given name. A cluster of another name is started beside it.

    Args:
        n: as in `Cluster`, like all others.

    Raises:
        ClusterError: the start failed, or a running cluster does not match.
    """
    bar = ProgressLine("starting the cluster")
    bar.show(0.0, "")
    from ..cluster.cluster import Cluster, uses_hosts

    running = _found(name)
    if running is not None:
        fits = hosts is None or uses_hosts(running, hosts, n)
        if n not in (None, running.world_size) or devices is not None or env or not fits:
            bar.close("")
            raise ClusterError(f"a cluster with {_all_of(running)} is already running: run `%cluster stop` first")
        running.use()
        bar.close(f"a cluster with {_all_of(running)} is already running")
        _bind(running)
        return running
    if detach and name in [one.name for one in Cluster.detached()]:
        bar.close("")
        return attach(name)
    begin = time.monotonic()
    try:
        placed: dict[str, Any] = {"devices": devices, "hosts": hosts, "name": name, "detach": detach}
        cluster = Cluster(n, backend=backend, env=env, **placed, **further)
        cluster.start(progress=bar.show)
    except BaseException:
        bar.fail()
        raise
    bar.close(f"{_ready(cluster)} in {time.monotonic() - begin:.1f} s")
    _bind(cluster)
    if detach:
        _say(f"it outlives this notebook: {_found_again(cluster)}")
    return cluster


def attach(name: str | None = None, take_over: bool = False) -> Cluster:
    """Attaches to a detached cluster, makes it the current one, and lists the cells that ran meanwhile."""
    from ..cluster.cluster import Cluster

    running = _found(name)
    if running is not None:
        running.use()
        _say(f"{_all_of(running)} of {running.name}: attached")
        _bind(running)
        return running
    begin = time.monotonic()
    cluster = Cluster.attach(name, take_over=take_over)
    ready = _ready(cluster).replace("cluster ready", f"attached to {cluster.name}")
    _say(f"{ready} in {time.monotonic() - begin:.1f} s; variables kept")
    _bind(cluster)
    for cell in cluster.missed_cells:
        _say(str(cell))
        if cell.running:
            _say("the next cell must wait until it ends, or interrupt it first (`%cluster interrupt`)")
    return cluster


def _bind(cluster: Cluster) -> None:
    """Makes the cluster `lab` in the notebook if that name is free, or held by a cluster that has stopped."""
    names = getattr(get_ipython(), "user_ns", None)
    if names is None or names.get("lab") is cluster:
        return
    held = names.get("lab")
    if "lab" not in names or (isinstance(held, type(cluster)) and not held.running):
        names["lab"] = cluster
        _say("`lab` is the cluster: try `lab.dashboard()`")


def on_current(verb: str, do: Callable[..., object], *args: Any) -> None:
    """Does something with the current cluster, or reports that there is none.

    Args:
        verb: the action, for that report.
        do: called with the cluster and `args`.
    """
    cluster = _found(None)
    if cluster is None:
        _say(f"no cluster is running, nothing to {verb} (%cluster start starts one)")
    else:
        do(cluster, *args)


def detach(cluster: Cluster) -> None:
    """Detaches from a cluster; its ranks keep running."""
    debugger.leave(cluster)
    cluster.detach()
    _say(f"detached from {cluster.name}: {_found_again(cluster)}")


def use(name: str) -> None:
    """Makes a running cluster of this notebook the current one."""
    cluster = _named(name)
    cluster.use()
    _say(f"current: {cluster!r}")


def export(script: Path, notebook: Path | None, *, every_run: bool, force: bool) -> None:
    """Writes the cells that have run here, or those of a notebook's file, as a script, and reports it.

    Raises:
        UsageError: it can't be written, and why.
    """
    try:
        if notebook is None:
            cluster = _found(None)
            ranks = None if cluster is None else cluster.world_size
            lines = export_executed(script, world_size=ranks, every_run=every_run, force=force)
        else:
            lines = export_notebook(notebook, script, force=force)
    except DdpLabError as error:
        raise UsageError(f"%cluster export: {error}") from error
    for line in lines:
        _say(line)


def import_script(script: Path, notebook: Path | None, *, n: int | None, force: bool) -> None:
    """Writes the cells of a script as a notebook, and reports it.

    Raises:
        UsageError: it can't be written, and why.
    """
    try:
        lines = write_notebook_of(script, notebook, n=n, force=force)
    except DdpLabError as error:
        raise UsageError(f"%cluster import: {error}") from error
    for line in lines:
        _say(line)


def list_clusters() -> None:
    """Shows the clusters of this notebook, the current one marked, and this user's detached clusters."""
    from ..cluster.cluster import Cluster, running_clusters

    rows = []
    ours = running_clusters()
    for cluster in ours:
        mark, ranks = "→" if cluster is ours[0] else "", repr(cluster).partition(": ")[2][:-1]
        rows.append((mark, cluster.name or "", ranks, "this notebook", ""))
    for one in Cluster.detached():
        left = f"{one.idle_timeout:.0f} s" if one.left_seconds is None else f"{one.left_seconds:.0f} s left"
        if one.attached == os.getpid():
            rows = [(*row[:4], left) if row[1] == one.name else row for row in rows]
            continue
        who = "nobody" if one.attached is None else f"process {one.attached}"
        rows.append(("", one.name, f"{one.ranks[0]} of {one.ranks[1]} ranks", who, left))
    if not rows:
        _say("no cluster is running (%cluster start starts one)")
        return
    _show(*tables(("", "name", "ranks", "attached", "idle timeout"), rows))


def _found_again(cluster: Cluster) -> str:
    how_long = f"for {cluster.idle_timeout:.0f} s after the last client disconnects"
    return f"`%cluster attach {cluster.name}` re-attaches, {how_long}"


def stop(cluster: Cluster) -> None:
    """Ends a cluster."""
    debugger.leave(cluster)
    cluster.stop()
    _say("cluster stopped")


def stop_quietly() -> None:
    """Ends the current cluster if there is one; leaves a detached one. Assistants are no longer served."""
    served = sys.modules.get(ASSISTANTS)
    if served is not None:
        served.stop_mcp()
    module = sys.modules.get(CLUSTER)
    cluster = module.current_cluster() if module is not None else None
    if cluster is not None:
        cluster.__exit__()


def restart(cluster: Cluster) -> None:
    """Restarts the processes of all ranks, with a progress bar."""
    bar = ProgressLine("restarting the ranks")
    begin = time.monotonic()
    try:
        cluster.restart(progress=bar.show)
    except BaseException:
        bar.fail()
        raise
    bar.close(f"{_ready(cluster)} in {time.monotonic() - begin:.1f} s; variables are lost")


def rejoin(cluster: Cluster, replace: Sequence[int]) -> None:
    """Rebuilds the process groups; restarts the processes of failed ranks and of those in `replace`."""
    begin = time.monotonic()
    replaced = cluster.rejoin(replace)
    if replaced:
        _say(f"{label_of(replaced)}: {replaced_text(replaced, cluster.world_size)}")
    _say(f"{_all_of(cluster)} rejoined in {time.monotonic() - begin:.2f} s; variables kept")


def interrupt(cluster: Cluster) -> None:
    """Interrupts the running cells."""
    cluster.interrupt()
    _say(f"interrupted {_all_of(cluster)}")


def debug(cluster: Cluster, rank: int | str | None) -> None:
    """Points the notebook's debugger at a rank, with "off" at the notebook; None shows where it is."""
    if rank is not None:
        debugger.debug(cluster, None if rank == "off" else int(rank))
    at = debugger.chosen()
    if at is None:
        _say("the debugger is at the notebook's own cells (`%cluster debug 0` points it at rank 0)")
    else:
        _say(f"the debugger is at rank {at} (`%cluster debug off` points it at the notebook again)")
        _say("turn it on with the bug in the toolbar, and set breakpoints in %%distributed cells")


def view(name: str | None) -> None:
    """Chooses the view with which the next cells begin; None shows which one it is."""
    if kernel_shell() is None:
        _say("outside a notebook there is one view: lines with their rank")
        return
    if name is not None:
        _choose_view(name)
    _say(f"cells show the ranks' output {_VIEW_WORDS[_chosen_view()]}")


def doctor(cluster: Cluster) -> None:
    """Shows the diagnosis of a hang."""
    report = cluster.doctor()
    _show(str(report), report._repr_html_())


def mcp(allow_run: bool, stop: bool) -> None:
    """Lets assistants read the clusters of this notebook, or stops that.

    Args:
        allow_run: whether they may run cells.
        stop: whether to stop it.

    Raises:
        DdpLabError: the `mcp` library is missing, or the server can't be started.
    """
    from ..assistants import kernel_server

    if stop:
        stopped = kernel_server.stop_mcp()
        _say("assistants can no longer read this notebook's clusters" if stopped else "no assistant was served")
        return
    kernel_server.serve_mcp(allow_run)
    may = "read this notebook's clusters and run cells on them" if allow_run else "read this notebook's clusters"
    command = "ddp-lab mcp --allow-run" if allow_run else "ddp-lab mcp"
    _say(f"assistants may {may}: let yours start `{command}` (process {os.getpid()}; `%cluster mcp --stop` ends it)")


def status(cluster: Cluster) -> None:
    """Shows a table of the ranks."""
    _show(*status_tables(cluster.status()))


def results(cluster: Cluster) -> None:
    """Shows a table of the named cells."""
    if not cluster.results:
        _say("no cell has a name: `%%distributed --name NAME` keeps a cell's result")
        return
    rows = [(name, *_outcome(cluster.results[name])) for name in cluster.results]
    _show(*tables(("name", "state", "ranks", "seconds", "values"), rows))


def _outcome(run: CellRun) -> tuple[str, str, str, str]:
    """State, ranks, seconds and values of a named cell, in words."""
    state = run.state
    if state == "queued":
        state = f"waits for {enumeration(run.waits_for)}"
    elif state == "failed":
        state = f"failed on {label_of(run.failures)}"
    values = "; ".join(f"{rank}: {value!r}" for rank, value in run.values.items() if value is not None)
    short = values if len(values) <= _VALUES else values[: _VALUES - 1] + "…"
    return state, label_of(run.ranks), f"{run.seconds:.1f}", short


def run_cell(
    code: CellText,
    *,
    cluster_name: str | None = None,
    ranks: Sequence[int] | None,
    label: str,
    timeout: float | None,
    dashboard: bool,
    wait: bool,
    quiet: bool,
    view: str | None,
) -> None:
    """Runs a cell on the cluster of that name, or the current one, which is started with defaults if there is none.

    With `wait=False` it runs in the background, and the notebook shows its progress.
    """
    cluster = _found(None) if cluster_name is None else _named(cluster_name)
    if cluster is None:
        _say("no cluster is running: starting one with defaults (see %cluster start --help)")
        cluster = start()
    if dashboard:
        _watch(cluster)
    chosen = list(range(cluster.world_size)) if ranks is None else list(ranks)
    board = _board_of(chosen, quiet, view)
    progress = _LineView() if kernel_shell() is None else None
    cluster.run(code, ranks=chosen, wait=wait, timeout=timeout, label=label, board=board, view=progress)


_watched: list[Any] = []  # the dashboard of the newest watched cell


def _watch(cluster: Cluster) -> None:
    """Displays a dashboard, which stays live after its cell until the next watched one has its own."""
    while _watched:
        _watched.pop().stop()
    _watched.append(cluster.dashboard())
    display: Callable[[Any], Any] = importlib.import_module("IPython.display").display
    display(_watched[-1])


class _LineView:
    """Lines on a cell that runs in the background and on how it ended: for terminals."""

    def __init__(self) -> None:
        self._state = ""

    def show(self, run: FollowedCell) -> None:
        """See `RunView`."""
        if run.state == self._state:
            return
        self._state = run.state
        _say(f"{run.label}: {run.headline}" if run.done or run.waits_for else f"{run.label} is running …")
        for line in run.report.splitlines():
            _say(line)

    def show_again(self) -> None:
        """See `RunView`."""


def pull(name: str, ranks: Sequence[int] | None) -> Any:
    """rank -> value; the value itself if `ranks` names a single one."""
    values = current().pull(name, ranks)
    return next(iter(values.values())) if ranks is not None and len(ranks) == 1 else values


def _found(name: str | None) -> Cluster | None:
    """The running cluster of this notebook that has this name, or the current one; None if there is none."""
    from ..cluster.cluster import current_cluster, running_clusters

    if name is None:
        return current_cluster()
    return next((one for one in running_clusters() if one.name == name), None)


def _named(name: str) -> Cluster:
    from ..cluster.cluster import running_clusters

    cluster = _found(name)
    if cluster is None:
        names = [one.name or "" for one in running_clusters()]
        known = f"there are {enumeration(names)}" if names else "none is running"
        raise ClusterError(f"no cluster {name!r} is running in this notebook: {known} (`%cluster list` shows all)")
    return cluster


def current() -> Cluster:
    """The current cluster; raises `ClusterError` if there is none."""
    cluster = _found(None)
    if cluster is None:
        raise ClusterError("no cluster is running: start one with `%cluster start`")
    return cluster


def _all_of(cluster: Cluster) -> str:
    return label_of(range(cluster.world_size))


def _ready(cluster: Cluster) -> str:
    records = [cells_of(record) for record in cluster.status()]
    parts = [_all_of(cluster)]
    for name in ("host", "device", "backend"):
        found = list(dict.fromkeys(str(record[name]) for record in records if record.get(name)))
        if found and (name != "host" or len(found) > 1):
            parts.append(", ".join(found) if len(found) <= 4 else f"{found[0]} … {found[-1]}")
    return "cluster ready: " + " · ".join(parts)


def _show(text: str, page: str) -> None:
    """Displays HTML in a notebook, the text elsewhere."""
    shell = kernel_shell()
    if shell is None:
        for line in text.splitlines():
            _say(line)
    else:
        shell.display_pub.publish(data={"text/plain": text, "text/html": page}, metadata={})


def _say(line: str) -> None:
    write_line("stdout", line)


def _board_of(ranks: Sequence[int], quiet: bool, view: str | None) -> Board:
    """The board of a cell, with the switch where it makes sense.

    Args:
        ranks: where the cell runs.
        quiet: show nothing.
        view: one of `VIEWS`; None for the view that was chosen last.
    """
    shell = kernel_shell()
    if quiet or shell is None or len(ranks) < 2:
        return default_board(ranks, quiet)
    display = KernelDisplay(shell)

    def place(cell: OutputByRank) -> None:
        name = _kept_cells.add(cell)
        named = {"kernel": _kept_cells.token, "cell": name, "view": view or _chosen_view()}
        attributes = "".join(f' data-{key}="{value}"' for key, value in named.items())
        element = f"<ddp-lab-output{attributes}></ddp-lab-output>"
        display.publish(f"ddp_lab-{name}", {"text/html": element, "text/plain": ""}, {}, False)
        if _view_switch is None:  # 0.2 s for its libraries, for which no cell waits
            threading.Thread(target=_the_view_switch, name="ddp_lab output views", daemon=True).start()

    return SwitchableBoard(OutputBoard(display), OutputByRank(ranks), place)


def _chosen_view() -> str:
    """The view with which further cells begin."""
    return VIEWS[0] if _view_switch is None else str(_view_switch.view)


def _choose_view(view: str) -> None:
    """Begins further cells with this view."""
    _the_view_switch().view = view


def _the_view_switch() -> OutputViews:
    """The widget, made at the first call."""
    global _view_switch
    with _making_switch:
        if _view_switch is None:
            from ..dashboard.output_views import OutputViews

            _view_switch = OutputViews(_kept_cells)
        return _view_switch
