"""Findings about ranks that are late."""

from __future__ import annotations

import numpy as np

from . import stragglers as late_ranks
from .facts import Facts, Finding
from .stragglers import ARRIVAL, DATA_DEPENDENT, EVERYWHERE, PERSISTENT, Late
from .words import ms

__all__ = ["cost_ns", "stragglers"]

_REMEDIES = {
    PERSISTENT: "Look at what that rank does there that the others don't, and at its device and host (clock, other "
    "processes, memory).",
    DATA_DEPENDENT: "Give the ranks batches of like cost: sort or bucket samples by length, pad less.",
    "random": "It comes and goes without the data: look for other processes on its host, garbage collection, I/O.",
}


def stragglers(facts: Facts) -> list[Finding]:
    """One finding for each place at which a rank falls behind."""
    return [_finding(facts, one) for one in facts.late]


def cost_ns(facts: Facts, one: Late) -> float:
    """What the steps had saved if the rank had not been late there; 0 or more."""
    excess = late_ranks.excess_times(facts.steps.begin, facts.steps.places())[one.rank]
    at_place = np.nansum(excess[:, 1:], axis=1) if one.place == EVERYWHERE else excess[:, one.place + 1]
    delay = np.where(one.late, np.maximum(np.nan_to_num(at_place), 0.0), 0.0)
    place = ARRIVAL if one.place < 0 else one.place
    return max(0.0, facts.replay.mean_saved_without(one.rank, place, delay))


def _finding(facts: Facts, one: Late) -> Finding:
    rank = facts.steps.ranks[one.rank]
    parameter = None if one.place < 0 or facts.steps.on_device else facts.names[one.place]
    bucket = None if one.place < 0 else one.place if facts.steps.on_device else facts.bucket_of(one.place)
    if one.place == ARRIVAL:
        where = "comes late to its backward"
    elif one.place == EVERYWHERE:
        where = "is slower than the others in its whole backward"
    elif parameter is not None:
        where = f"falls behind at the gradient of {parameter}"
    else:
        where = f"falls behind in bucket {bucket}"
    waits = f" (bucket {bucket})" if bucket is not None and parameter is not None else ""
    remedy = _REMEDIES[one.pattern]
    if one.place == ARRIVAL:
        remedy = "Look at its input data, its forward and what it does between the steps. " + remedy
    return Finding(
        kind="straggler",
        title=f"Rank {rank} {where}{waits}, and the others wait for it.",
        evidence=f"By {ms(one.delay_ns / 1e6)} (median) in {100 * one.share:.0f} % of the steps; {one.pattern}.",
        remedy=remedy,
        gain_percent=facts.percent(cost_ns(facts, one)),
        rank=rank,
        bucket=bucket,
        parameter=parameter,
    )
