"""The questions that a cluster's widgets can ask its ranks."""

from __future__ import annotations

from typing import Any

from ..control.collectives import choices, run_collective
from ..control.ranks import Ranks
from ..dashboard.controls.collectives import CollectiveStage
from ..errors import ClusterError
from ..formatting import label_of
from ..protocol.messages import InspectGradients, MeasureEventCost


def dashboard_means(cluster: Ranks) -> dict[str, Any]:
    """Arguments of `Dashboard` for a cluster."""

    def request_inspection(reducer: int, step: int) -> None:
        for rank, own in cluster.timeline.own_numbers(reducer).items():
            cluster.wire.send([rank], InspectGradients(own, step))

    def event_cost() -> float | None:
        replies = cluster.wire.request([0], MeasureEventCost(), 0.5) if cluster.running else {}
        return replies[0].ns if 0 in replies else None

    return {
        "status": cluster.status,
        "request_inspection": request_inspection,
        "link": lambda: cluster.link,
        "event_cost": event_cost,
        "lost": cluster.lost,
        "cluster": cluster,
        "collectives": CollectiveStage(
            lambda *asked: run_collective(cluster, *asked),
            lambda: choices(cluster.world_size),
            lambda: _why_busy(cluster),
        ),
    }


def _why_busy(cluster: Ranks) -> str:
    """Why no collective can be run on the ranks now; "" if one can, or if there are no ranks."""
    try:
        busy = cluster.busy_ranks()
    except ClusterError:
        return ""
    if not busy:
        return ""
    are = "is" if len(busy) == 1 else "are"
    return f"{label_of(busy).capitalize()} {are} running a cell: wait until it ends, or interrupt it."
