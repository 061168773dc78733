"""What the magics do and show: progress of a start, the table of ranks, one cell on the current cluster."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..insight.words import enumeration
from .displays import kernel_shell, write_line
from .failures import replaced_text
from .outputs import default_board
from .progress import ProgressLine
from .rank_sets import label_of
from .results import CellResult, CellText
from .status_table import cells_of, html_table, status_tables, text_table

if TYPE_CHECKING:
    from .cell_run import CellRun
    from .cluster import Cluster

__all__ = [
    "attach",
    "detach",
    "doctor",
    "interrupt",
    "list_detached",
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
]

_VALUES = 60  # characters of a cell's values in the table of results


def start(
    n: int | None = None,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "auto",
    hosts: str | None = None,
    detached: Mapping[str, Any] | None = None,
    **placing: Any,
) -> Cluster:
    """Starts a cluster with a progress bar and makes it the current one.

    A cluster that runs already and fits what is asked is kept, so that a notebook can be run again from the top: also a
    detached one of the name that is given. `placing` are further arguments of `Cluster`.

    Args:
        n: as `Cluster`, and so are `devices`, `env`, `backend` and `hosts`.
        detached: ``name`` and ``lease_seconds`` of one that is to outlive this process, where they are given.

    Raises:
        ClusterError: the start failed, or a cluster runs that does not fit.
    """
    bar = ProgressLine("starting the cluster")
    bar.show(0.0, "")
    from .cluster import Cluster, current_cluster

    running = current_cluster()
    if running is not None:
        fits = hosts is None or running.runs_on(hosts, n)
        if n not in (None, running.world_size) or devices is not None or env or not fits:
            bar.close("")
            raise ClusterError(
                f"a cluster with {label_of(range(running.world_size))} runs already: `%cluster stop` first"
            )
        bar.close(f"a cluster with {label_of(range(running.world_size))} runs already")
        return running
    if detached is not None and detached.get("name") in [one.name for one in Cluster.detached()]:
        bar.close("")
        return attach(str(detached["name"]))
    begin = time.monotonic()
    try:
        given = {} if detached is None else {"detach": True, **detached}
        cluster = Cluster(n, backend=backend, devices=devices, env=env, hosts=hosts, **placing, **given)
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
    from .cluster import Cluster, current_cluster

    running = current_cluster()
    if running is not None and (name is None or running.name == name):
        write_line("stdout", f"{label_of(range(running.world_size))} of {running.name or 'this notebook'}: attached")
        return running
    if running is not None:
        raise ClusterError("another cluster runs here: `%cluster stop` (or `%cluster detach`) first")
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


def list_detached() -> None:
    """Shows this user's detached clusters."""
    from .cluster import Cluster

    found = Cluster.detached()
    if not found:
        write_line("stdout", "no detached cluster runs here (`%cluster start --detach --name NAME` starts one)")
        return
    rows = []
    for one in found:
        who = "nobody" if one.attached is None else f"process {one.attached}"
        who += " (this notebook)" if one.attached == os.getpid() else ""
        left = f"{one.lease_seconds:.0f} s" if one.left_seconds is None else f"{one.left_seconds:.0f} s left"
        rows.append((one.name, f"{one.ranks[0]} of {one.ranks[1]}", who, left))
    titles = ("name", "ranks", "attached", "lease")
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

    module = sys.modules.get("ddp_lab.client.cluster")
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


def _outcome(found: CellResult | CellRun) -> tuple[str, str, str, str]:
    """State, ranks, seconds and values of a named cell, in words."""
    if not isinstance(found, CellResult):
        ahead = found.waits_for
        state = f"waits for {enumeration(ahead)}" if ahead else "runs"
        return state, label_of(found.ranks), f"{found.status().seconds:.1f}", ""
    state = f"failed on {label_of(found.failures)}" if found.failures else "done"
    values = "; ".join(f"{rank}: {value!r}" for rank, value in found.values.items() if value is not None)
    short = values if len(values) <= _VALUES else values[: _VALUES - 1] + "…"
    return state, label_of(found.outputs), f"{found.seconds:.1f}", short


def run_cell(
    code: CellText,
    *,
    ranks: Sequence[int] | None,
    label: str,
    timeout: float | None,
    watch: bool,
    wait: bool,
    quiet: bool,
) -> Any:
    """Runs a cell on the current cluster, started with defaults if there is none.

    Returns:
        None; with `wait=False` the `CellRun`.
    """
    from .cluster import current_cluster

    cluster = current_cluster()
    if cluster is None:
        write_line("stdout", "no cluster runs: starting one with defaults (see %cluster start --help)")
        cluster = start()
    dashboard = cluster.dashboard() if watch else None
    if dashboard is not None:
        display: Callable[[Any], Any] = importlib.import_module("IPython.display").display
        display(dashboard)
    chosen = list(range(cluster.world_size)) if ranks is None else list(ranks)
    board = default_board(chosen, quiet)
    if not wait and not cluster.ahead(chosen):
        board.announce(chosen, f"{label} runs …")
    try:
        result = cluster.run(code, ranks=chosen, wait=wait, timeout=timeout, label=label, board=board)
    finally:
        if dashboard is not None and wait:
            dashboard.stop()  # it shows this cell; the next one that is watched has its own
    return None if wait else result


def push(mapping: Mapping[str, Any], ranks: Sequence[int] | None) -> None:
    """Sets variables on ranks of the current cluster."""
    _current().push(mapping, ranks)


def pull(name: str, ranks: Sequence[int] | None) -> Any:
    """rank -> value; the value itself if `ranks` names a single one."""
    values = _current().pull(name, ranks)
    return next(iter(values.values())) if ranks is not None and len(ranks) == 1 else values


def _current() -> Cluster:
    from .cluster import current_cluster

    cluster = current_cluster()
    if cluster is None:
        raise ClusterError("no cluster runs: start one with `%cluster start`")
    return cluster


def _running(what: str) -> Cluster | None:
    """The current cluster; says so if there is none to `what`."""
    from .cluster import current_cluster

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
