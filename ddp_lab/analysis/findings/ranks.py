"""Findings about ranks that are late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...formatting import counted, ms
from .. import stragglers as late_ranks
from ..stragglers import ARRIVAL, DATA_DEPENDENT, EVERYWHERE, PERSISTENT, VARYING, Late
from . import program
from .facts import Facts, Finding

__all__ = ["cost_ns", "disturbances", "last_most_often", "least_of_collectives", "stragglers", "varying_rank"]
__all__ += ["with_varying"]

_TWICE = 2.0  # least ratio of a rank's whole delay to what its late places explain
_DISTURBED_PERCENT, _FEWEST_STEPS = 10.0, 15
_MOSTLY = 0.75  # share of the steps in which the others wait for the same rank
_LONGEST = 3.0  # times the median delay: longer delays, e.g. at the start of a cell, are not typical of the rank

_REMEDIES = {
    PERSISTENT: "Look for work that only this rank does there; then check its GPU or host (clock speed, other "
    "processes, memory).",
    DATA_DEPENDENT: "Balance the work per batch across ranks: bucket samples by length, reduce padding.",
    "random": "The delay does not depend on the data: look for other processes on its host, garbage collection, I/O.",
}
_AFTERWARDS = "The cost of communication can be estimated once that is fixed."


def stragglers(facts: Facts) -> Iterator[Finding]:
    """One finding for each place at which a rank falls behind."""
    yield from (_finding(facts, one) for one in facts.late)


def disturbances(facts: Facts) -> Iterator[Finding]:
    """Ranks that wait long for each other, but without one rank that counts as a straggler."""
    if facts.late or len(facts.steps) < _FEWEST_STEPS or program.shares_cores(facts):  # which has a finding
        return
    waited = facts.replay.waited
    gained = facts.percent_of_mean(float(waited.sum(axis=0).mean()))
    if gained < _DISTURBED_PERCENT:
        return
    most = facts.last.most
    if most is None:
        return
    rank, share = facts.steps.ranks[most], facts.last.share[most]
    whom = f"and rank {rank} is last in most steps" if share >= _MOSTLY else "but no single rank is to blame"
    yield Finding(
        kind="ranks-disturbed",
        title=f"The ranks are out of balance, {whom}.",
        evidence=f"On average {ms(float(waited.sum(axis=0).mean()) / 1e6)} of each step are spent waiting for the last "
        f"rank. {last_most_often(facts)}",
        remedy="Look for the cause: more ranks than cores, other processes on the hosts, batches of "
        f"different cost. {_AFTERWARDS}",
        gain_percent=gained,
    )


def least_of_collectives(facts: Facts) -> float:
    """Returns the least saving (percent of the step) that a finding about collectives must have to be reported.

    Where ranks disturb each other, their collectives take long for the same reason. So a finding about communication
    is reported only if it saves more than these waits, and more than twice the cost of a rank that is late at no
    particular place.
    """
    varying = [2 * facts.percent(cost_ns(facts, one)) for one in facts.late if one.place == VARYING]
    return max([0.0, *varying, *(one.gain_percent for one in disturbances(facts))]) if facts.together else 0.0


def cost_ns(facts: Facts, one: Late) -> float:
    """Returns what the steps would save if the rank were not late there; 0 or more. Single long delays are capped."""
    longest = _LONGEST * one.delay_ns
    if one.place == VARYING:
        return float(np.minimum(facts.replay.waited[one.rank], longest).mean())
    excess = late_ranks.excess_times(facts.steps.begin, facts.steps.places())[one.rank]
    at_place = np.nansum(excess[:, 1:], axis=1) if one.place == EVERYWHERE else excess[:, one.place + 1]
    delay = np.where(one.late, np.clip(np.nan_to_num(at_place), 0.0, longest), 0.0)
    place = ARRIVAL if one.place < 0 else one.place
    return max(0.0, facts.replay.mean_saved_without(one.rank, place, delay))


def with_varying(facts: Facts, minimum_ns: float) -> Facts:
    """Adds the rank that the others wait for in most steps, unless the late places that were found explain it."""
    if not facts.together or not len(facts.steps):
        return facts
    for one in late_ranks.find_varying(facts.replay.waited, facts.step_ns, minimum_ns=minimum_ns):
        explained = sum(cost_ns(facts, place) for place in facts.late if place.rank == one.rank)
        if cost_ns(facts, one) >= _TWICE * explained:
            return replace(facts, late=[*facts.late, one])
    return facts


def last_most_often(facts: Facts) -> str:
    """Returns the sentence for the rank that was last most often; "" if none was, or with a single rank."""
    most = facts.last.most
    if most is None:
        return ""
    return (
        f"Rank {facts.steps.ranks[most]} was last most often: in {100 * facts.last.share[most]:.0f} % of "
        f"{counted(facts.last.steps, 'step')}; the others then waited {ms(facts.last.delay_ns[most] / 1e6)} for it "
        "(median)."
    )


def varying_rank(rank: int, share: float, delay_ms: float) -> str:
    """Returns the sentence for a rank whose delay has no place."""
    return (
        f"Rank {rank} is last in {100 * share:.0f} % of the steps, and the others wait {ms(delay_ms)} for it (median). "
        "The delay varies too much to name a layer."
    )


def _finding(facts: Facts, one: Late) -> Finding:
    rank = facts.steps.ranks[one.rank]
    why, fix = program.cause(facts, rank, one.delay_ns) if one.place in (VARYING, ARRIVAL) else ("", "")
    if one.place == VARYING:
        return Finding(
            kind="straggler",
            title=f"The others wait for rank {rank} in most steps.",
            evidence=f"{varying_rank(rank, one.share, one.delay_ns / 1e6)} {why}".strip(),
            remedy=fix
            or "Look for work that only this rank does; then check its host for other processes and for more ranks "
            f"than cores. {_AFTERWARDS}",
            gain_percent=facts.percent(cost_ns(facts, one)),
            rank=rank,
        )
    bucket, parameter = facts.place_of(one)
    if one.place == ARRIVAL:
        where = "starts its backward late"
    elif one.place == EVERYWHERE:
        where = "is slower than the others throughout its backward"
    elif parameter is not None:
        where = f"falls behind at the gradient of {parameter}"
    else:
        where = f"falls behind in bucket {bucket}"
    waits = f" (bucket {bucket})" if bucket is not None and parameter is not None else ""
    remedy = fix or _REMEDIES[one.pattern]
    if one.place == ARRIVAL and not why:
        remedy = "Check its input data, its forward and what it does between the steps. " + remedy
    return Finding(
        kind="straggler",
        title=f"Rank {rank} {where}{waits}, and the others wait for it.",
        evidence=f"It is late by {ms(one.delay_ns / 1e6)} (median) in {100 * one.share:.0f} % of the steps; "
        f"pattern: {one.pattern}. {why}".rstrip(),
        remedy=remedy,
        gain_percent=facts.percent(cost_ns(facts, one)),
        rank=rank,
        bucket=bucket,
        parameter=parameter,
    )
