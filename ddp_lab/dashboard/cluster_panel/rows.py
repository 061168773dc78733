"""The rows of the tables of ranks, in the cluster's panel and the dashboard: what is known about each rank, as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...control.records import RankHealth
from ...formatting import exit_words, size
from ...timeline.timeline import RankStatus
from .processes import ProcessUse

__all__ = ["SILENT_SECONDS", "cluster_rows", "rank_rows", "row_texts"]

SILENT_SECONDS = 1.5  # a rank that has sent nothing for longer than this is called silent
_STATES = ("idle", "running", "unblocked")
_LIVE = ("idle", "running", "unknown")
_FROM_RECORD = ("pid", "host", "device", "backend", "engine")
_HINTS = {
    "starting": "its process is being started",
    "failed": "its cell raised an error; its process groups were destroyed, so that no rank waits for it",
    "interrupted": "its cell was interrupted; its process groups were destroyed",
    "unblocked": "its process groups were destroyed, so that its pending collectives return",
    "stopped": "a signal has suspended its process; collectives wait for it",
    "silent": "no message from it: a long C call may hold the GIL, or its machine is overloaded",
}
TITLES = ("rank", "state", "device", "memory", "CPU", "GPU memory", "GPU", "step", "in flight", "heartbeat")


def cluster_rows(
    health: Sequence[RankHealth], heard: Sequence[RankStatus], processes: Mapping[int, ProcessUse]
) -> list[dict[str, Any]]:
    """Returns one JSON-able row per rank, in order.

    Args:
        health: of `Cluster.health`.
        heard: what the timeline knows (`Timeline.ranks`): steps, and the states that the ranks reported.
        processes: rank -> CPU and memory of its process.
    """
    told = {one.rank: one for one in heard}
    return [_row(one, told.get(one.record.rank), processes.get(one.record.rank)) for one in health]


def _row(one: RankHealth, told: RankStatus | None, process: ProcessUse | None) -> dict[str, Any]:
    record, stopped = one.record, process is not None and process.stopped
    state = _state(one, told, stopped)
    return {
        "rank": record.rank,
        "state": state,
        "words": _words(state, one),
        "hint": _HINTS.get(state, ""),
        "seconds": one.cell_seconds if state == "running" else None,
        "where": _where(one),
        "device": record.device,
        "memory": process.memory if process is not None else None,
        "cpu": process.cpu_percent if process is not None else None,
        "gpuUsed": one.gpu_used,
        "gpuTotal": one.gpu_total,
        "gpu": one.gpu_percent,
        "inFlight": one.in_flight,
        "step": told.step if told is not None and told.events and told.step >= 0 else None,
        "silent": one.silent_seconds if state not in ("lost", "starting") else None,
    }


def _state(one: RankHealth, told: RankStatus | None, stopped: bool) -> str:
    """As in `RankRecord`, or ``"failed"`` or ``"interrupted"`` (its own cell broke its groups), ``"stopped"`` (a signal
    suspended the process) or ``"starting"``."""
    record = one.record
    if record.state == "lost":
        return "lost"
    if stopped:
        return "stopped"
    if record.state != "silent":
        return record.word
    if record.pid == 0:
        return "starting"
    late = one.silent_seconds is None or one.silent_seconds > SILENT_SECONDS
    return "silent" if late or told is None or told.state not in _STATES else told.state


def _words(state: str, one: RankHealth) -> str:
    record = one.record
    if state == "lost":
        return exit_words(record.exit_code).removeprefix("was ") if record.exit_code is not None else "failed"
    if state == "running":
        return f"runs {one.label}" if one.label else "runs a cell"
    if state == "stopped":
        return f"stopped by SIGSTOP; continue with kill -CONT {record.pid}"
    if state in ("failed", "interrupted", "unblocked"):
        unblocked = f"unblocked because {record.broken_by} failed" if record.broken_by else "unblocked"
        what = unblocked if state == "unblocked" else state
        return f"{what}; the next cell rejoins"
    return state


def _where(one: RankHealth) -> str:
    """How to find the process."""
    record = one.record
    parts = [f"process {record.pid}" if record.pid else "", f"on {record.host}" if record.host else ""]
    engine = f"; ipyparallel engine {record.engine}" if record.engine is not None else ""
    return " ".join(part for part in parts if part) + engine


def row_texts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns titles and texts of a static table, without columns that are empty for all ranks."""
    found = [
        [
            str(row["rank"]),
            row["words"] + (f" for {row['seconds']:.0f} s" if row["seconds"] is not None else ""),
            row["device"],
            size(row["memory"]) if row["memory"] is not None else "",
            f"{row['cpu']:.0f} %" if row["cpu"] is not None else "",
            _of(row["gpuUsed"], row["gpuTotal"]),
            f"{row['gpu']} %" if row["gpu"] is not None else "",
            str(row["step"]) if row["step"] is not None else "",
            row["inFlight"],
            f"{row['silent']:.0f} s ago" if row["silent"] is not None else "",
        ]
        for row in rows
    ]
    filled = [column for column in range(len(TITLES)) if any(texts[column] for texts in found)]
    return [TITLES[column] for column in filled], [[texts[column] for column in filled] for texts in found]


def _of(used: int | None, total: int | None) -> str:
    if used is None:
        return ""
    return size(used) + (f" of {size(total)}" if total is not None else "")


def rank_rows(
    heard: Sequence[RankStatus], records: Sequence[Any], *, stopped: bool = False, recorded: bool = False
) -> list[dict[str, Any]]:
    """Returns the rows of the dashboard's table: one JSON-able row per rank, in order.

    Args:
        heard: what the timeline knows (`Timeline.ranks`).
        records: what the cluster knows (`Cluster.status`): objects with a `rank` and any of state, pid, host, device.
        stopped: whether the cluster has stopped: every rank's state is then "stopped".
        recorded: whether `heard` is of another time: a rank that trained then is not "running" now, and how long ago
            its last event was is not known.
    """
    rows: dict[int, dict[str, Any]] = {}
    # Host times become wall times, which the browser can subtract from its own; they change only with an event.
    shift = time.time() - time.monotonic_ns() / 1e9
    for one in heard:
        live = one.events > 0  # what a former process of the rank has sent is none of its own
        rows[one.rank] = {
            "rank": one.rank,
            "state": "stopped" if stopped else "recorded" if recorded and one.state in _LIVE else one.state,
            "step": one.step if live else -1,
            "lastEvent": round(one.last_event_ns / 1e9 + shift, 1) if live and not recorded else None,
            "recorded": one.events,
            "dropped": one.dropped,
            "pid": one.pid,
            "past": recorded,
        }
    for record in records:
        row = rows.setdefault(record.rank, {"rank": record.rank, "step": -1, "dropped": 0})
        row["state"] = getattr(record, "word", None) or getattr(record, "state", row.get("state"))
        for name in _FROM_RECORD:
            value = getattr(record, name, None)
            if value is not None:
                row[name] = value if isinstance(value, int) else str(value)
    return [rows[rank] for rank in sorted(rows)]
