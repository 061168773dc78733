"""When is a rank late at a place, and not merely disturbed? Rules on excess times; pure functions.

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

import numpy as np
import numpy.typing as npt

__all__ = ["follows", "never_absent", "repeated", "steady", "usual", "waited_for"]

_Values = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

_SPREADS, _NEGATIVE, _ACCIDENTS = 3.0, 1.5, 3.0
_NEVER_BELOW_NS = 1.5e6  # what a system that is overloaded for the whole run may add to one place of one rank
_FEW_ACCIDENTS = 0.005  # share of all other times; below it they set no threshold
_CHANCE = 1e-5
_CORRELATED = 0.7
_USUAL, _HALF, _CHANCE_OF_WAITS, _FEWEST_WAITS = 0.7, 0.5, 1e-3, 15
_FEWEST_STEPS = 8  # for a correlation, and for a share of nine in ten


def steady(excess: _Values, minimum: float) -> bool:
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


def never_absent(excess: _Values, minimum: float) -> bool:
    """Whether a rank is late by `minimum`, and by 1.5 ms, in nine of ten steps; arguments as for `steady`, in ns."""
    known = excess[np.isfinite(excess)]
    return len(known) >= _FEWEST_STEPS and float(np.quantile(known, 0.1)) >= max(minimum, _NEVER_BELOW_NS)


def usual(excess: _Values, elsewhere: _Values, minimum: float) -> bool:
    """Whether a rank is late by `minimum` in most steps, and far less often elsewhere; arguments as for `repeated`."""
    known, others = excess[np.isfinite(excess)], elsewhere[np.isfinite(elsewhere)]
    hits = int((known >= minimum).sum())
    if len(known) < _FEWEST_WAITS or hits < _USUAL * len(known) or not len(others):
        return False
    by_chance = max(float((others >= minimum).mean()), 1 / (len(others) + 2))
    return by_chance < _USUAL and _tail(hits, len(known), by_chance) < _CHANCE


def repeated(excess: _Values, elsewhere: _Values, minimum: float) -> _Flags:
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


def follows(excess: _Values, forward: _Values) -> bool:
    """Whether a rank's excess goes with the excess of its forward in the same step: the batch decides both."""
    known = np.isfinite(excess) & np.isfinite(forward)
    if known.sum() < _FEWEST_STEPS:
        return False
    one, other = excess[known], forward[known]
    if one.std() == 0 or other.std() == 0:
        return False
    return float(np.corrcoef(one, other)[0, 1]) >= _CORRELATED


def waited_for(waited: _Values, minimum: float) -> int | None:
    """The position of the rank that all others wait for, None if there is none: [Note: the rank that is waited for].

    Args:
        waited: how long all others waited for each rank alone, shape ``[ranks, steps]``, ≥ 0.
        minimum: smaller medians don't count.
    """
    ranks, steps = waited.shape
    if ranks < 2 or steps < _FEWEST_WAITS:
        return None
    was = waited.argmax(axis=0)[waited.max(axis=0) > 0]
    often = np.bincount(was, minlength=ranks)
    rank = int(often.argmax())
    steadily = often[rank] >= _HALF * steps and _tail(int(often[rank]), steps, 1 / ranks) < _CHANCE_OF_WAITS
    return rank if steadily and float(np.median(waited[rank])) >= minimum else None
