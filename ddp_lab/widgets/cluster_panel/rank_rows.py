"""The rows of the dashboard's table of ranks: what the cluster and the timeline know, merged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...timeline.timeline import RankStatus

__all__ = ["rank_rows"]

_LIVE = ("idle", "running", "unknown")
_FROM_RECORD = ("pid", "host", "device", "backend", "engine")


def rank_rows(
    heard: Sequence[RankStatus], records: Sequence[Any], *, stopped: bool = False, recorded: bool = False
) -> list[dict[str, Any]]:
    """Returns one JSON-able row per rank, in order.

    Args:
        heard: what the timeline knows (`Timeline.ranks`).
        records: what the cluster knows (`Cluster.status`): objects with a `rank` and any of state, pid, host, device.
        stopped: whether the cluster has ended: every rank's state is then "stopped".
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
