"""From a timeline's tables to what analysis says of them: late places and findings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...analysis import stragglers
from ...analysis.findings import ranks
from ...analysis.findings.facts import Facts
from ...analysis.stragglers import ARRIVAL, EVERYWHERE, VARYING
from ..records import LatePlace
from ..tables.span_columns import TableView
from .aligned import aligned
from .layouts import Layout

__all__ = ["WARM_UP", "facts", "late_places"]

WARM_UP = 3
"""First steps with an assignment of buckets that are left out where as many others are left."""


def facts(
    views: Sequence[TableView],
    layout: Layout,
    steps: npt.NDArray[np.int64],
    *,
    newer: int = 0,
    minimum_ms: float = 1.0,
    minimum_share: float = 0.25,
) -> Facts:
    """What steps with one layout of the buckets show.

    Args:
        views: tables of the ranks of one model, with these steps.
        layout: of the buckets; without a description there are no names and no buckets.
        steps: some of its steps.
        newer: how many complete steps there are after these, with other buckets.
        minimum_ms: smaller delays of a rank are taken for noise.
        minimum_share: fraction of the steps in which a rank has to be late at one place.
    """
    described = layout.description or {"parameters": (), "buckets": (), "group_ranks": ()}
    parameters, buckets = described["parameters"], described["buckets"]
    shown = aligned(views, steps, len(buckets) if layout.description else None)
    late = stragglers.find_late(
        shown.begin, shown.places(), shown.forward_ns(), minimum_ns=minimum_ms * 1e6, minimum_share=minimum_share
    )
    found = Facts(
        steps=shown,
        names=[one["name"] for one in parameters],
        sizes=[one["bytes"] for one in parameters],
        keys=[(one.get("dtype", "?"), one.get("device", "?")) for one in parameters],
        buckets=[one["parameters"] for one in buckets],
        options=described.get("options", {}),
        late=late,
        missing_ranks=len(set(described["group_ranks"]) - {one.rank for one in views}),
        newer=newer,
    )
    return ranks.with_varying(found, minimum_ms * 1e6)


def late_places(found: Facts) -> list[LatePlace]:
    """The late places of a model, the most costly first."""
    made = []
    for one in found.late:
        on_device, at_place = found.steps.on_device, one.place >= 0
        cost = ranks.cost_ns(found, one) if found.buckets else one.delay_ns * one.share
        made.append(
            LatePlace(
                rank=found.steps.ranks[one.rank],
                bucket=None if not at_place else one.place if on_device else found.bucket_of(one.place),
                parameter=found.names[one.place] if at_place and not on_device and found.names else None,
                delay_ms=one.delay_ns / 1e6,
                share=one.share,
                where={ARRIVAL: "arrival", EVERYWHERE: "everywhere", VARYING: "varying"}.get(one.place, "place"),
                pattern=one.pattern,
                cost_percent=float(np.clip(found.percent(cost), 0.0, 100.0)),
            )
        )
    return sorted(made, key=lambda one: -one.cost_percent)
