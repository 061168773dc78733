"""What the magics do and show: progress of a start, the table of ranks, one cell on the current cluster."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster.cells.failures import replaced_text
from ..control.records import CellText
from ..errors import ClusterError
from ..formatting import enumeration, label_of
from ..output.board import default_board
from ..output.display import kernel_shell, write_line
from ..output.progress import ProgressLine
from ..output.status_table import cells_of, html_table, status_tables, text_table
from ..protocol.entry_points import CLUSTER

if TYPE_CHECKING:
    from ..cluster.cells.run import CellRun
    from ..cluster.cluster import Cluster
    from ..output.run_view import FollowedCell

__all__ = [
    "attach",
    "detach",
    "doctor",
    "interrupt",
    "list_clusters",
    "pull",
    "push",
    "rejoin",
    "restart",
    "results",
    "run_cell",
    "start",
    "status",
    "stop",
    "stop_quietly",
    "use",
]

_VALUES = 60  # characters of a cell's values in the table of results


def start(
    n: int | None = None,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "auto",
    hosts: str | None = None,
    name: str | None = None,
    detached: Mapping[str, Any] | None = None,
    **placing: Any,
) -> Cluster:
    """Starts a cluster with a progress bar and makes it the current one.

    A cluster that runs already and fits what is asked is kept, so that a notebook can be run again from the top: also a
    detached one of the name that is given. One of another name is started beside it. `placing` are further arguments of
    `Cluster`.

    Args:
        n: as `Cluster`, and so are `devices`, `env`, `backend`, `hosts` and `name`.
        detached: ``lease_seconds``, where it is given, of one that is to outlive this process; None: it is not to.

    Raises:
        ClusterError: the start failed, or a cluster runs that does not fit.
    """
    bar = ProgressLine("starting the cluster")
    bar.show(0.0, "")
    from ..cluster.cluster import Cluster, current_cluster, running_clusters

    running = current_cluster()
    if name is not None:
        running = next((one for one in running_clusters() if one.name == name), None)
    if running is not None:
        fits = hosts is None or running.runs_on(hosts, n)
        if n not in (None, running.world_size) or devices is not None or env or not fits:
            bar.close("")
            raise ClusterError(
                f"a cluster with {label_of(range(running.world_size))} runs already: `%cluster stop` first"
            )
        running.use()
        bar.close(f"a cluster with {label_of(range(running.world_size))} runs already")
        return running
    if detached is not None and name in [one.name for one in Cluster.detached()]:
        bar.close("")
        return attach(name)
    begin = time.monotonic()
    try:
        given = {} if detached is None else {"detach": True, **detached}
        cluster = Cluster(n, backend=backend, devices=devices, env=env, hosts=hosts, name=name, **placing, **given)
        cluster.start(progress=bar.show)
    except BaseException:
        bar.fail()
        raise
    bar.close(f"{_ready(cluster)} in {time.monotonic() - begin:.1f} s")
    if detached is not None:
        write_line(
            "stdout", f"it outlives this notebook: `%cluster attach {cluster.name}` finds it again, {_lease(cluster)}"
        )
    return cluster


def attach(name: str | None = None, take_over: bool = False) -> Cluster:
    """Attaches to a detached cluster, makes it the current one, and says what has run meanwhile."""
    from ..cluster.cluster import Cluster, current_cluster, running_clusters

    running = current_cluster()
    if name is not None:
        running = next((one for one in running_clusters() if one.name == name), None)
    if running is not None:
        running.use()
        write_line("stdout", f"{label_of(range(running.world_size))} of {running.name}: attached")
        return running
    begin = time.monotonic()
    cluster = Cluster.find(name, take_over=take_over)
    ready = _ready(cluster).replace("cluster ready", f"attached to {cluster.name}")
    write_line("stdout", f"{ready} in {time.monotonic() - begin:.1f} s; variables kept")
    for cell in cluster.left:
        write_line("stdout", str(cell))
        if cell.running:
            write_line("stdout", "the next cell has to wait for its end, or interrupt it first (`%cluster interrupt`)")
    return cluster


def detach() -> None:
    """Lets go of the current cluster; its ranks go on."""
    cluster = _running("leave")
    if cluster is not None:
        cluster.detach()
        write_line("stdout", f"left {cluster.name}: `%cluster attach {cluster.name}` finds it again, {_lease(cluster)}")


def use(name: str) -> None:
    """Makes a running cluster of this notebook the current one."""
    cluster = _named(name)
    cluster.use()
    write_line("stdout", f"current: {cluster!r}")


def list_clusters() -> None:
    """Shows the clusters of this notebook, the current one marked, and this user's detached clusters."""
    from ..cluster.cluster import Cluster, running_clusters

    rows = []
    ours = running_clusters()
    for cluster in ours:
        rows.append(
            (
                "→" if cluster is ours[0] else "",
                cluster.name or "",
                repr(cluster).partition(": ")[2][:-1],
                "this notebook",
                "",
            )
        )
    for one in Cluster.detached():
        left = f"{one.lease_seconds:.0f} s" if one.left_seconds is None else f"{one.left_seconds:.0f} s left"
        if one.attached == os.getpid():
            rows = [(*row[:4], left) if row[1] == one.name else row for row in rows]
            continue
        who = "nobody" if one.attached is None else f"process {one.attached}"
        rows.append(("", one.name, f"{one.ranks[0]} of {one.ranks[1]} ranks", who, left))
    if not rows:
        write_line("stdout", "no cluster runs (%cluster start starts one)")
        return
    titles = ("", "name", "ranks", "attached", "lease")
    _show(text_table(titles, rows), html_table(titles, rows))


def _lease(cluster: Cluster) -> str:
    return f"for {cluster.lease_seconds:.0f} s after the last client has gone"


def stop() -> None:
    """Ends the current cluster."""
    cluster = _running("stop")
    if cluster is not None:
        cluster.stop()
        write_line("stdout", "cluster stopped")


def stop_quietly() -> None:
    """Ends the current cluster if there is one; leaves a detached one."""
    import sys

    module = sys.modules.get(CLUSTER)
    cluster = module.current_cluster() if module is not None else None
    if cluster is not None:
        cluster.__exit__()


def restart() -> None:
    """Replaces the processes of all ranks, with a progress bar."""
    cluster = _running("restart")
    if cluster is None:
        return
    bar = ProgressLine("restarting the ranks")
    begin = time.monotonic()
    try:
        cluster.restart(progress=bar.show)
    except BaseException:
        bar.fail()
        raise
    bar.close(f"{_ready(cluster)} in {time.monotonic() - begin:.1f} s; variables are gone")


def rejoin(replace: Sequence[int] = ()) -> None:
    """Gives the ranks new process groups; those in `replace`, and those that have ended, new processes."""
    cluster = _running("rejoin")
    if cluster is not None:
        begin = time.monotonic()
        replaced = cluster.rejoin(replace)
        if replaced:
            write_line("stdout", f"{label_of(replaced)}: {replaced_text(replaced, cluster.world_size)}")
        write_line(
            "stdout",
            f"{label_of(range(cluster.world_size))} rejoined in {time.monotonic() - begin:.2f} s; variables kept",
        )


def interrupt() -> None:
    """Interrupts whatever the ranks run."""
    cluster = _running("interrupt")
    if cluster is not None:
        cluster.interrupt()
        write_line("stdout", f"interrupted {label_of(range(cluster.world_size))}")


def doctor() -> None:
    """Says why the ranks do not come on."""
    cluster = _running("examine")
    if cluster is None:
        return
    report = cluster.doctor()
    _show(str(report), report._repr_html_())


def status() -> None:
    """Shows a table of the ranks."""
    cluster = _running("show")
    if cluster is None:
        return
    _show(*status_tables(cluster.status()))


def results() -> None:
    """Shows a table of the named cells."""
    cluster = _running("list")
    if cluster is None:
        return
    if not cluster.results:
        write_line("stdout", "no cell has been given a name: `%%distributed --name NAME` keeps its result")
        return
    titles = ("name", "state", "ranks", "seconds", "values")
    rows = [(name, *_outcome(cluster.results[name])) for name in cluster.results]
    _show(text_table(titles, rows), html_table(titles, rows))


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
    watch: bool,
    wait: bool,
    quiet: bool,
) -> None:
    """Runs a cell on the cluster of that name, or the current one, which is started with defaults if there is none.

    With `wait=False` it goes on in the background, and the notebook shows how far it is.
    """
    from ..cluster.cluster import current_cluster

    cluster = current_cluster() if cluster_name is None else _named(cluster_name)
    if cluster is None:
        write_line("stdout", "no cluster runs: starting one with defaults (see %cluster start --help)")
        cluster = start()
    dashboard = cluster.dashboard() if watch else None
    if dashboard is not None:
        display: Callable[[Any], Any] = importlib.import_module("IPython.display").display
        display(dashboard)
    chosen = list(range(cluster.world_size)) if ranks is None else list(ranks)
    board = default_board(chosen, quiet)
    view = _LineView() if kernel_shell() is None else None
    try:
        cluster.run(code, ranks=chosen, wait=wait, timeout=timeout, label=label, board=board, view=view)
    finally:
        if dashboard is not None and wait:
            dashboard.stop()  # it shows this cell; the next one that is watched has its own


class _LineView:
    """Lines that say that a cell runs in the background, and how it has ended: for terminals."""

    def __init__(self) -> None:
        self._state = ""

    def show(self, run: FollowedCell) -> None:
        """See `RunView`."""
        if run.state == self._state:
            return
        self._state = run.state
        write_line("stdout", f"{run.label}: {run.headline}" if run.done or run.waits_for else f"{run.label} runs …")
        for line in run.report.splitlines():
            write_line("stdout", line)

    def show_again(self) -> None:
        """See `RunView`."""


def push(mapping: Mapping[str, Any], ranks: Sequence[int] | None) -> None:
    """Sets variables on ranks of the current cluster."""
    _current().push(mapping, ranks)


def pull(name: str, ranks: Sequence[int] | None) -> Any:
    """rank -> value; the value itself if `ranks` names a single one."""
    values = _current().pull(name, ranks)
    return next(iter(values.values())) if ranks is not None and len(ranks) == 1 else values


def _named(name: str) -> Cluster:
    """The running cluster of this notebook that has this name."""
    from ..cluster.cluster import running_clusters

    clusters = running_clusters()
    for cluster in clusters:
        if cluster.name == name:
            return cluster
    known = f"there are {enumeration([one.name or '' for one in clusters])}" if clusters else "none runs"
    raise ClusterError(f"no cluster {name!r} runs in this notebook: {known} (`%cluster list` shows all)")


def _current() -> Cluster:
    from ..cluster.cluster import current_cluster

    cluster = current_cluster()
    if cluster is None:
        raise ClusterError("no cluster runs: start one with `%cluster start`")
    return cluster


def _running(what: str) -> Cluster | None:
    """The current cluster; says so if there is none to `what`."""
    from ..cluster.cluster import current_cluster

    cluster = current_cluster()
    if cluster is None:
        write_line("stdout", f"no cluster runs, nothing to {what} (%cluster start starts one)")
    return cluster


def _ready(cluster: Cluster) -> str:
    records = [cells_of(record) for record in cluster.status()]
    parts = [label_of(range(cluster.world_size))]
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
            write_line("stdout", line)
    else:
        shell.display_pub.publish(data={"text/plain": text, "text/html": page}, metadata={})
