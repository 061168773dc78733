"""What the magics do and show: progress of a start, the table of ranks, one cell on the current cluster."""

from __future__ import annotations

import dataclasses
import html
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from .displays import kernel_shell, write_line
from .outputs import default_board
from .progress import ProgressLine
from .rank_sets import label_of

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["interrupt", "pull", "push", "rejoin", "restart", "run_cell", "start", "status", "stop", "stop_quietly"]

_COLUMNS = ("rank", "state", "device", "backend", "step", "cell", "pid", "host", "engine", "exit_code")


def start(
    n: int | None = None,
    devices: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    backend: str = "auto",
) -> Cluster:
    """Starts a cluster with a progress bar and makes it the current one.

    A cluster that runs already and fits what is asked is kept, so that a notebook can be run again from the top.

    Raises:
        ClusterError: the start failed, or a cluster runs that does not fit.
    """
    bar = ProgressLine("starting the cluster")
    bar.show(0.0, "")
    from .cluster import Cluster, current_cluster

    running = current_cluster()
    if running is not None:
        if n not in (None, running.world_size) or devices is not None or env:
            bar.close("")
            raise ClusterError(
                f"a cluster with {label_of(range(running.world_size))} runs already: `%cluster stop` first"
            )
        bar.close(f"a cluster with {label_of(range(running.world_size))} runs already")
        return running
    begin = time.monotonic()
    try:
        cluster = Cluster(n, backend=backend, devices=devices, env=env)
        cluster.start(progress=bar.show)
    except BaseException:
        bar.fail()
        raise
    bar.close(f"{_ready(cluster)} in {time.monotonic() - begin:.1f} s")
    return cluster


def stop() -> None:
    """Ends the current cluster."""
    cluster = _running("stop")
    if cluster is not None:
        cluster.stop()
        write_line("stdout", "cluster stopped")


def stop_quietly() -> None:
    """Ends the current cluster if there is one."""
    import sys

    module = sys.modules.get("ddp_lab.client.cluster")
    cluster = module.current_cluster() if module is not None else None
    if cluster is not None:
        cluster.stop()


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


def rejoin() -> None:
    """Gives the ranks new process groups."""
    cluster = _running("rejoin")
    if cluster is not None:
        begin = time.monotonic()
        cluster.rejoin()
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


def status() -> None:
    """Shows a table of the ranks."""
    cluster = _running("show")
    if cluster is None:
        return
    records = [_cells_of(record) for record in cluster.status()]
    columns = [name for name in _COLUMNS if any(record.get(name) not in (None, "") for record in records)]
    rows = [["" if record.get(name) is None else str(record.get(name)) for name in columns] for record in records]
    titles = [name.replace("_", " ") for name in columns]
    text = _text_table(titles, rows)
    shell = kernel_shell()
    if shell is None:
        for line in text.splitlines():
            write_line("stdout", line)
    else:
        shell.display_pub.publish(data={"text/plain": text, "text/html": _html_table(titles, rows)}, metadata={})


def run_cell(
    code: str,
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
    if not wait:
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
    records = [_cells_of(record) for record in cluster.status()]
    parts = [label_of(range(cluster.world_size))]
    for name in ("device", "backend"):
        found = list(dict.fromkeys(str(record[name]) for record in records if record.get(name)))
        if found:
            parts.append(", ".join(found) if len(found) <= 4 else f"{found[0]} … {found[-1]}")
    return "cluster ready: " + " · ".join(parts)


def _cells_of(record: Any) -> dict[str, Any]:
    cells = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    kinds = {part.partition(":")[2] for part in str(cells.get("backend", "")).split(",")}
    if len(kinds) == 1 and kinds != {""}:
        cells["backend"] = kinds.pop()  # cpu:gloo,cuda:gloo
    return cells


def _text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(text) for text in column) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (titles, *rows)]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th style='text-align:left'>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
