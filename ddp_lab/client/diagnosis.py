"""From a timeline's tables to what insight/ says about them: late places and findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..insight import findings_ranks, stragglers
from ..insight.facts import Facts
from ..insight.stragglers import ARRIVAL, EVERYWHERE
from .aligned import aligned
from .span_columns import TableView
from .timeline_records import LatePlace

__all__ = ["facts", "late_places"]

_WARM_UP = 3  # steps left out where there are at least twice as many
_MINIMUM_MS, _MINIMUM_SHARE = 1.0, 0.25


def facts(
    views: Sequence[TableView],
    assignment: dict[str, Any] | None,
    *,
    last_steps: int | None = None,
    minimum_ms: float = _MINIMUM_MS,
    minimum_share: float = _MINIMUM_SHARE,
    warm_up: int = _WARM_UP,
) -> Facts:
    """What the steps of one assignment of buckets show.

    Args:
        views: tables of the ranks of one reducer.
        assignment: the description of its buckets; steps under another assignment are left out. None if no
            description has come: then there are no names and no buckets.
        last_steps: only so many newest ones.
        minimum_ms: smaller delays of a rank are taken for noise.
        minimum_share: fraction of the steps in which a rank has to be late at one place.
        warm_up: first steps to leave out.
    """
    described = assignment or {"parameters": (), "buckets": (), "group_ranks": ()}
    steps = aligned(views, last_steps, generation=described.get("generation"), warm_up=warm_up)
    parameters = described["parameters"]
    late = stragglers.find_late(
        steps.begin, steps.places(), steps.forward_ns(), minimum_ns=minimum_ms * 1e6, minimum_share=minimum_share
    )
    return Facts(
        steps=steps,
        names=[one["name"] for one in parameters],
        sizes=[one["bytes"] for one in parameters],
        keys=[(one.get("dtype", "?"), one.get("device", "?")) for one in parameters],
        buckets=[one["parameters"] for one in described["buckets"]],
        options=described.get("options", {}),
        late=late,
        missing_ranks=len(set(described["group_ranks"]) - {one.rank for one in views}),
    )


def late_places(found: Facts) -> list[LatePlace]:
    """The late places of a model, the most costly first."""
    made = []
    for one in found.late:
        on_device, at_place = found.steps.on_device, one.place >= 0
        cost = findings_ranks.cost_ns(found, one) if found.buckets else one.delay_ns * one.share
        made.append(
            LatePlace(
                rank=found.steps.ranks[one.rank],
                bucket=None if not at_place else one.place if on_device else found.bucket_of(one.place),
                parameter=found.names[one.place] if at_place and not on_device and found.names else None,
                delay_ms=one.delay_ns / 1e6,
                share=one.share,
                where={ARRIVAL: "arrival", EVERYWHERE: "everywhere"}.get(one.place, "place"),
                pattern=one.pattern,
                cost_percent=float(np.clip(found.percent(cost), 0.0, 100.0)),
            )
        )
    return sorted(made, key=lambda one: -one.cost_percent)
