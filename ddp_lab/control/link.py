"""The link between the ranks, measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..output.board import SilentBoard
from ..protocol.entry_points import MEASURE_LINK
from ..simulation.link_model import LinkModel
from ..timeline.what_if import LANES
from .ranks import Ranks
from .records import CellText

__all__ = ["measure_link"]


def measure_link(cluster: Ranks, sizes: Sequence[int] | None, repeats: int) -> LinkModel:
    """See `Cluster.measure_link`."""
    arguments = f"sizes={None if sizes is None else list(map(int, sizes))}, repeats={int(repeats)}, device=device"
    code = CellText(f"{MEASURE_LINK.expression}({arguments})")
    found: dict[int, Any] = cluster.run(code, label="measure the link", board=SilentBoard()).values
    measured = found[min(found)]
    points = [(size, ns, measured["ranks"]) for size, ns in measured["points"]]
    made = LinkModel.fitted(points, lanes=LANES.get(measured["backend"], 1))
    return replace(made, launch_ns=measured["launch_ns"], sharing=measured["sharing"] if made.lanes > 1 else 1.0)
