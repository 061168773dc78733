"""Stragglers: which rank is late, and in which bucket, from the times at which gradients became ready.

Wall time can't name a straggler: in a synchronised backward every rank waits for the last one, so all of them take
equally long. What differs is when each rank had a bucket's gradients: the late rank's own computation reached them
late, and from that bucket on it is behind. The *first* place where it falls behind names the layer.

All times are in nanoseconds on one axis (one host's monotonic clock, or aligned clocks); 0 means missing.

[Note: late or disturbed]
On a busy machine every rank is interrupted now and then, for as long as the system's scheduler lets another process
run: some milliseconds, at any place. Four rules tell a cause from such accidents; one of them has to hold.

- Steady: the excess is positive in nine of ten steps and hardly varies. Its lower quartile is at least the threshold,
  and at least three times its spread (the median absolute deviation, scaled to a standard deviation). Accidents spread
  as widely as they are long.
- Never absent: the excess is at least the threshold, and at least 1.5 ms, in nine of ten steps, however it varies
  beyond that. Not for the arrival at the backward, before which a whole forward may be disturbed.
- Usual: the excess is at least the threshold in seven of ten steps; were it there as often as elsewhere, that would
  have a probability below 10⁻⁵. Accidents come at all places, so each sees few. Not for the arrival, either.
- Repeated: in some steps the excess is larger than what is usual elsewhere: than 1.5 times the place's own negative
  excess (accidents of the other ranks), and than 3 times the 90th percentile of all accidents at other places, if
  there are any to speak of. That so many steps were hit by chance has a probability below 10⁻⁵.

[Note: the rank that is waited for]
Where more ranks than cores compute, each of them is disturbed in each step, at some place. A delay that is there in
each step, too, is no longer than these accidents, and no single place shows it. Then it counts for whom all the others
waited in each step, and how long. Three things must hold: in half of the steps it was this rank; so often by chance,
were all ranks alike, with a probability below 10⁻³; and the median over all steps is at least the threshold, which an
accident that comes in fewer than half of them does not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .step_metrics import median

__all__ = ["ARRIVAL", "DATA_DEPENDENT", "EVERYWHERE", "PERSISTENT", "RANDOM", "VARYING", "LastRanks", "Late"]
__all__ += ["LatePlace", "excess_times", "find_stragglers", "find_varying", "last_ranks"]

ARRIVAL, EVERYWHERE, VARYING = -1, -2, -3
PERSISTENT, DATA_DEPENDENT, RANDOM = "persistent", "data-dependent", "random"

_Times = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

_ENOUGH = 50_000  # values that tell what is usual
# What counts at all, as a share of the step: at a place; before the backward, where ranks that share cores begin one
# after the other; and of the backward, for a rank that is slower everywhere.
_PLACE_SHARE, _ARRIVAL_SHARE, _SLOW_SHARE, _WAIT_SHARE = 0.01, 0.05, 0.05, 0.01

_SPREADS, _NEGATIVE, _ACCIDENTS = 3.0, 1.5, 3.0
_NEVER_BELOW_NS = 1.5e6  # what a system that is overloaded for the whole run may add to one place of one rank
_FEW_ACCIDENTS = 0.005  # share of all other times; below it they set no threshold
_CHANCE = 1e-5
_CORRELATED = 0.7
_USUAL, _HALF, _CHANCE_OF_WAITS, _FEWEST_WAITS = 0.7, 0.5, 1e-3, 15
_FEWEST_STEPS = 8  # for a correlation, and for a share of nine in ten


@dataclass(frozen=True)
class Late:
    """One place where one rank falls behind the others.

    Attributes:
        rank: position of the rank in the arrays.
        place: position of the bucket (or parameter) whose computation is late; `ARRIVAL`: the rank starts its backward
            late (input data, forward, or code between the steps); `EVERYWHERE`: its backward is slower than the
            others', at no single place; `VARYING`: the others wait for it in most steps, and where it falls behind
            varies too much to name a place.
        delay_ns: how much it falls behind there; median over the steps in which it does.
        share: fraction of the steps in which it does, 0 to 1.
        pattern: ``"persistent"``: in most steps; ``"data-dependent"``: in the steps in which its forward takes longer,
            too; ``"random"``: in some steps.
        late: shape ``[steps]``: whether it falls behind in each step.
    """

    rank: int
    place: int
    delay_ns: float
    share: float
    pattern: str
    late: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LatePlace:
    """One straggler location: where a rank's own computation falls behind the other ranks'.

    Attributes:
        rank: the rank.
        bucket: the bucket whose gradients are late; None: see `where`.
        parameter: qualified name of the parameter at whose gradient it falls behind, None if unknown.
        delay_ms: by how much, median over the steps in which it does.
        share: fraction of the steps in which it does, 0 to 1.
        where: ``"place"``: at that bucket and parameter; ``"arrival"``: it starts its backward late (input data,
            forward, code between the steps); ``"everywhere"``: its whole backward is slower; ``"varying"``: the
            others wait for it in most steps, and where it falls behind varies too much to name a place.
        pattern: ``"persistent"``: in most steps; ``"data-dependent"``: in the steps in which its forward takes
            longer, too; ``"random"``: in some steps.
        cost_percent: what the steps would save without it, in percent of the step.
        words: where, for a reader, in a model with `fully_shard` or `replicate` (`bucket` is its parameter group); else
            "".
    """

    rank: int
    bucket: int | None
    parameter: str | None
    delay_ms: float
    share: float
    where: str = "place"
    pattern: str = "persistent"
    cost_percent: float = 0.0
    words: str = ""


@dataclass(frozen=True)
class LastRanks:
    """How often each rank was last: the one for which all others waited longest in a step.

    Attributes:
        steps: how many steps were looked at; in some all ranks may have come together.
        share: of these steps, by position of the rank, 0 to 1.
        delay_ns: how long the others waited for it then; median by position, NaN if it was never last.
    """

    steps: int
    share: _Values
    delay_ns: _Values

    @property
    def most(self) -> int | None:
        """The position of the rank that was last most often; None if none was."""
        return int(self.share.argmax()) if len(self.share) and self.share.max() > 0 else None


def last_ranks(waited: _Values) -> LastRanks:
    """Returns how often each rank was last, and how long the others then waited for it.

    Args:
        waited: how long all others waited for each rank alone, shape ``[ranks, steps]``, ≥ 0.
    """
    ranks, steps = waited.shape
    longest = waited.max(axis=0, initial=0.0)
    last = np.where(longest > 0, waited.argmax(axis=0), -1) if ranks else np.full(steps, -1)
    share = np.array([(last == rank).sum() for rank in range(ranks)]) / max(1, steps)
    delay = [float(np.median(longest[last == rank])) if (last == rank).any() else np.nan for rank in range(ranks)]
    return LastRanks(steps, share, np.array(delay))


def find_stragglers(
    begin: _Times,
    ready: _Times,
    forward: _Values | None = None,
    *,
    minimum_ns: float = 1e6,
    minimum_share: float = 0.25,
) -> list[Late]:
    """Finds where a rank's own computation falls behind that of the other ranks.

    For every rank and step, the time from one place to the next is compared with the median of the other ranks'
    (with two ranks: with the other's). So a delay counts once, at the place that caused it, though every later
    bucket of that rank is late as well. [Note: late or disturbed] defines what counts as late.

    Args:
        begin: when each rank's backward began, shape ``[ranks, steps]``.
        ready: when each bucket (or each parameter's gradient) became ready, shape ``[ranks, steps, places]``.
        forward: how long each rank's forward took, shape ``[ranks, steps]``, NaN where unknown: tells delays that
            depend on the data from others.
        minimum_ns: smaller delays count as noise; so do delays of less than 1 % of a step (5 % before the backward).
        minimum_share: fraction of the steps in which a rank must be late at one place.

    Returns:
        The late places, longest total delay first; empty for a single rank.
    """
    ranks, steps, places = ready.shape
    if ranks < 2 or steps == 0:
        return []
    excess = excess_times(begin, ready)
    minimum = np.full(places + 1, max(minimum_ns, _PLACE_SHARE * _interval(begin)))
    minimum[0] = max(minimum_ns, _ARRIVAL_SHARE * _interval(begin))
    # A first look that costs little: most places are never late.
    candidates = (np.nan_to_num(excess, nan=0.0) >= minimum).mean(axis=1) >= minimum_share
    found = []
    by_cell = np.moveaxis(excess, 1, 2).reshape(ranks * (places + 1), steps)
    thinned = by_cell[:, :: 1 + by_cell.size // _ENOUGH]
    for rank, place in np.argwhere(candidates):
        if place == 0:  # as much may go wrong before a backward as in the whole of one
            whole = np.nansum(excess[:, :, 1:], axis=2)
            elsewhere = np.concatenate([np.delete(excess[:, :, 0], rank, axis=0), whole])
        else:
            elsewhere = np.delete(thinned, rank * (places + 1) + place, axis=0)
        one = _late(excess[rank, :, place], elsewhere.ravel(), float(minimum[place]), is_arrival=place == 0)
        if one is not None and one.share >= minimum_share:
            found.append(replace(one, rank=int(rank), place=int(place) - 1))
    found += _slow_everywhere(excess, begin, ready, found, minimum_ns)
    if forward is not None:
        slower = _excess(forward)
        found = [_with_pattern(one, excess, slower) for one in found]
    return sorted(found, key=lambda one: -one.delay_ns * one.share)


def find_varying(waited: _Values, step_ns: float, *, minimum_ns: float = 1e6) -> list[Late]:
    """Finds a rank that all others wait for in most steps, wherever it falls behind.

    See [Note: the rank that is waited for] for what counts, and why.

    Args:
        waited: how long all others waited for each rank alone, shape ``[ranks, steps]``, ≥ 0.
        step_ns: usual time of a step.
        minimum_ns: shorter waits don't count.

    Returns:
        At most one, with `VARYING` for a place.
    """
    minimum = max(minimum_ns, _WAIT_SHARE * step_ns)
    rank = _waited_for(waited, minimum)
    if rank is None:
        return []
    late = np.asarray(waited.argmax(axis=0) == rank) & (waited[rank] > 0)
    return [Late(rank, VARYING, float(np.median(waited[rank][late])), float(late.mean()), PERSISTENT, late)]


def _interval(begin: _Times) -> float:
    """Usual time from step to step; 0 for a single one."""
    apart = np.diff(begin, axis=1)[(begin[:, 1:] > 0) & (begin[:, :-1] > 0)]
    return float(np.median(apart)) if apart.size else 0.0


def excess_times(begin: _Times, ready: _Times) -> _Values:
    """How much longer than the other ranks (their median) each rank took to each place.

    Args:
        begin: shape ``[ranks, steps]``.
        ready: shape ``[ranks, steps, places]``.

    Returns:
        Shape ``[ranks, steps, 1 + places]``, the arrival at the backward first; negative where a rank was faster, NaN
        where a time is missing.
    """
    excess = np.empty((*begin.shape, ready.shape[2] + 1))
    excess[:, :, 0] = _excess(np.where(begin > 0, begin.astype(np.float64), np.nan))
    if ready.shape[2]:
        excess[:, :, 1:] = _excess(_own_time(begin, ready))
    return excess


def _late(excess: _Values, elsewhere: _Values, minimum: float, *, is_arrival: bool) -> Late | None:
    """A late place without its position, or None."""
    known = max(int(np.isfinite(excess).sum()), 1)
    always = not is_arrival and (_never_absent(excess, minimum) or _usual(excess, elsewhere, minimum))
    if always or _steady(excess, minimum):
        late = np.nan_to_num(excess, nan=0.0) >= minimum
    else:
        late = _repeated(excess, elsewhere, minimum)
    if not late.any():
        return None
    share = float(late.sum()) / known
    pattern = PERSISTENT if share >= 0.75 else RANDOM
    return Late(0, 0, float(np.median(excess[late])), share, pattern, late)


def _with_pattern(one: Late, excess: _Values, slower: _Values) -> Late:
    """Checks whether intermittent delays occur together with long forwards of the rank."""
    if one.pattern != RANDOM or one.place < 0:
        return one
    follows = _follows(excess[one.rank, :, one.place + 1], slower[one.rank])
    return replace(one, pattern=DATA_DEPENDENT) if follows else one


def _slow_everywhere(excess: _Values, begin: _Times, ready: _Times, found: list[Late], minimum_ns: float) -> list[Late]:
    """Ranks whose whole backward is steadily slower, beyond what named places explain."""
    if not ready.shape[2]:
        return []
    took = np.where(begin > 0, ready.max(axis=2) - begin, 0).astype(np.float64)
    minimum = max(minimum_ns, _SLOW_SHARE * float(np.median(took)))
    rest = np.nansum(excess[:, :, 1:], axis=2)
    for one in found:
        if one.place >= 0:
            rest[one.rank] -= np.nan_to_num(excess[one.rank, :, one.place + 1])
    made = []
    for rank, of_rank in enumerate(rest):
        if _steady(of_rank, minimum):
            late = of_rank >= minimum
            made.append(Late(rank, EVERYWHERE, float(np.median(of_rank[late])), float(late.mean()), PERSISTENT, late))
    return made


def _own_time(begin: _Times, ready: _Times) -> npt.NDArray[np.float64]:
    """Time from one place to the next, in the usual order of readiness; NaN where one of them is missing."""
    since_begin = np.where((ready > 0) & (begin > 0)[:, :, None], ready - begin[:, :, None], np.nan)
    usual = median(since_begin.reshape(-1, ready.shape[2]).T)
    order = np.argsort(usual, kind="stable")  # NaN comes last
    ordered = since_begin[:, :, order]
    # A rank may have reached some places in another order: it can't be late before it was there.
    before = np.maximum.accumulate(np.nan_to_num(ordered), axis=2)[:, :, :-1]
    before[np.isnan(ordered[:, :, :-1])] = np.nan  # unknown how long this place alone took
    alone = ordered.copy()
    alone[:, :, 1:] -= before
    own: npt.NDArray[np.float64] = np.empty_like(since_begin)
    own[:, :, order] = np.maximum(alone, 0.0)  # NaN stays NaN
    return own


def _excess(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """values[r] minus the median over the other ranks, along the first axis; NaN where there is no other."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    others = np.isfinite(values).sum(axis=0) - 1
    low, high, last = np.maximum(others - 1, 0) // 2, np.maximum(others, 0) // 2, len(values) - 1
    places = [np.minimum(one, last) for one in (low, low + 1, high, high + 1)]
    if np.isnan(ordered[-1]).any():
        planes = [np.take_along_axis(ordered, one[None], 0)[0] for one in places]
    else:  # nothing is missing, as a rule: the same planes everywhere
        planes = [ordered[int(one.flat[0])] if one.size else ordered[0] for one in places]
    # Without a rank's own value, those from it on move up by one.
    below = np.where(values <= planes[0], planes[1], planes[0])
    above = np.where(values <= planes[2], planes[3], planes[2])
    return np.where(others > 0, values - (below + above) / 2, np.nan)


# ---- late, or disturbed? ---------------------------------------------------------------------------------


def _steady(excess: _Values, minimum: float) -> bool:
    """Whether a rank is late by much the same time in most steps.

    Args:
        excess: of one rank at one place, by step; NaN where unknown.
        minimum: smaller delays don't count, in the unit of `excess`.
    """
    known = excess[np.isfinite(excess)]
    if not len(known):
        return False
    lowest, lower = (float(value) for value in np.quantile(known, [0.1, 0.25]))
    spread = 1.4826 * float(np.median(np.abs(known - np.median(known))))
    return lowest > 0 and lower >= max(minimum, _SPREADS * spread)


def _never_absent(excess: _Values, minimum: float) -> bool:
    """Whether a rank is late by `minimum`, and by 1.5 ms, in nine of ten steps; arguments as for `_steady`, in ns."""
    known = excess[np.isfinite(excess)]
    return len(known) >= _FEWEST_STEPS and float(np.quantile(known, 0.1)) >= max(minimum, _NEVER_BELOW_NS)


def _usual(excess: _Values, elsewhere: _Values, minimum: float) -> bool:
    """Whether a rank is late by `minimum` in most steps, and far less often elsewhere; arguments as for `_repeated`."""
    known, others = excess[np.isfinite(excess)], elsewhere[np.isfinite(elsewhere)]
    hits = int((known >= minimum).sum())
    if len(known) < _FEWEST_WAITS or hits < _USUAL * len(known) or not len(others):
        return False
    by_chance = max(float((others >= minimum).mean()), 1 / (len(others) + 2))
    return by_chance < _USUAL and _tail(hits, len(known), by_chance) < _CHANCE


def _repeated(excess: _Values, elsewhere: _Values, minimum: float) -> _Flags:
    """In which steps a rank is later than by accident; all False if they may have been hit by chance.

    Args:
        excess: of one rank at one place, by step; NaN where unknown.
        elsewhere: all excess times of other places and ranks, in any order; NaN where unknown.
        minimum: smaller delays don't count.
    """
    none = np.zeros(len(excess), bool)
    known = np.sort(excess[np.isfinite(excess)])
    others = elsewhere[np.isfinite(elsewhere)]
    if not len(known):
        return none
    negative = max(0.0, -float(known[min(1, len(known) - 1)]))  # the second lowest: one accident is forgiven
    accidents = others[others >= minimum]
    usual = float(np.quantile(accidents, 0.9)) if len(accidents) > _FEW_ACCIDENTS * len(others) else 0.0
    threshold = max(minimum, _NEGATIVE * negative, _ACCIDENTS * usual)
    late: _Flags = np.nan_to_num(excess, nan=-np.inf) >= threshold
    by_chance = max(float((others >= threshold).mean()) if len(others) else 0.0, 1 / (len(others) + 2))
    return late if _tail(int(late.sum()), len(known), by_chance) < _CHANCE else none


def _tail(hits: int, trials: int, chance: float) -> float:
    """Probability of at least so many hits."""
    if hits == 0:
        return 1.0
    counts = np.arange(hits, trials + 1)
    ways = np.array([math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1) for i in counts])
    return float(np.exp(ways + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)).sum())


def _follows(excess: _Values, forward: _Values) -> bool:
    """Whether a rank's excess goes with the excess of its forward in the same step: the batch decides both."""
    known = np.isfinite(excess) & np.isfinite(forward)
    if known.sum() < _FEWEST_STEPS:
        return False
    one, other = excess[known], forward[known]
    if one.std() == 0 or other.std() == 0:
        return False
    return float(np.corrcoef(one, other)[0, 1]) >= _CORRELATED


def _waited_for(waited: _Values, minimum: float) -> int | None:
    """The position of the rank that all others wait for, None if there is none: [Note: the rank that is waited for].

    Args:
        waited: how long all others waited for each rank alone, shape ``[ranks, steps]``, ≥ 0.
        minimum: smaller medians don't count.
    """
    ranks, steps = waited.shape
    if ranks < 2 or steps < _FEWEST_WAITS:
        return None
    found = last_ranks(waited)
    rank = found.most
    if rank is None:
        return None
    often = round(float(found.share[rank]) * steps)
    steadily = often >= _HALF * steps and _tail(often, steps, 1 / ranks) < _CHANCE_OF_WAITS
    return rank if steadily and float(np.median(waited[rank])) >= minimum else None
