"""Comparison of two series of step times: which times differ, by how much, and with which confidence.

[Note: how sure]
Neighbouring steps are correlated, because a machine is busy for a while or a batch is large. So 100 steps carry less
information than 100 independent ones. The autocorrelation time, the sum of the autocorrelation over all lags, is the
number of steps that count as one (Sokal, "Monte Carlo Methods in Statistical Mechanics", 1996, section 3). Each side
is divided into 5 to 20 batches of that length. The error of the side's median follows from the spread of the batches'
medians ("batch means": Schmeiser, "Batch Size Effects in the Analysis of Simulation Output", Operations Research 30,
1982). Neighbouring batches are still correlated; the error is corrected for that, assuming exponential decay. The
interval is Welch's, with Student's t for 99 %, and a difference is clear if the interval does not contain 0. In
percent, the interval is that of the ratio of the medians (Fieller, "Some Problems in Interval Estimation", Journal of
the Royal Statistical Society B 16, 1954): the ratios r for which b - r a is not clearly different from 0. So it
contains 0 % if and only if the other one contains 0 ms. Times are not negative, so it ends at -100 %; it has no upper
end if the first run's time can't be told from 0. Of 100
differences that do not exist, about one looks clear, so a single small difference is probably an accident. An effect
that lasts longer than a whole side (a machine that is slower today) is not covered by the interval of one run.

[Note: steps before and after]
The bounds are those of [Note: how sure], with correlated neighbouring steps. Both sides were measured once, one after
the other: anything else that changed on the machine meanwhile is part of the difference, and not covered by the bounds.
To be sure, change back and compare again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LEVEL", "BeforeAfter", "Difference", "Key", "before_after", "compare_series", "largest", "student_t"]

_Values = npt.NDArray[np.float64]
Key = tuple[str, str, int | None, int | None]
"""The key of a series of times: scope, name, rank, bucket."""

LEVEL = 99
"""Confidence level of the intervals, in percent."""

_FEWEST_STEPS, _FEWEST_ON_A_SIDE = 5, 10
_BATCHES = (5, 20)  # the fewest and the most
_UNCORRELATED = 0.05  # an autocorrelation below it ends the sum
_TOO_LOW = 1.5  # factor for safety: the sum ends early, and is too low for few steps
_ALIKE = 40.0  # of n steps, at least 1 + 40 / n count as one, because few steps give a poor autocorrelation
_NEGLIGIBLE_MS = 1e-3


@dataclass(frozen=True)
class Difference:
    """One time in both runs.

    Attributes:
        scope: ``"phase"``: all ranks together; ``"rank"``; or ``"bucket"``.
        name: which time: ``"step"``, ``"forward"``, ``"computation"``, ``"exposed"`` (communication after the
            computation), ``"other"``; for a bucket ``"ready"``, ``"waiting"`` (from the first rank's launch to the
            last one's), ``"all-reduce"``.
        rank: which rank, None for all.
        bucket: which bucket, None for all.
        a_ms: median over the steps of the first run.
        b_ms: median over the steps of the second run.
        low_ms: lower end of the 99 % interval of ``b_ms - a_ms``; see [Note: how sure].
        high_ms: its upper end.
        low_percent: lower end of the 99 % interval of the change in percent of the first run, at least -100.
        high_percent: its upper end; infinite if the first run's time can't be told from 0.
    """

    scope: str
    name: str
    rank: int | None
    bucket: int | None
    a_ms: float
    b_ms: float
    low_ms: float
    high_ms: float
    low_percent: float
    high_percent: float

    @property
    def change_ms(self) -> float:
        """By how much the second run is slower; negative if it is faster."""
        return self.b_ms - self.a_ms

    @property
    def change_percent(self) -> float:
        """The change in percent of the first run; infinite if that took no time."""
        if self.a_ms > _NEGLIGIBLE_MS:
            return 100 * self.change_ms / self.a_ms
        return 0.0 if abs(self.change_ms) <= _NEGLIGIBLE_MS else float(np.copysign(np.inf, self.change_ms))

    @property
    def is_clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low_ms > 0 or self.high_ms < 0


def compare_series(a: Mapping[Key, _Values], b: Mapping[Key, _Values]) -> list[Difference]:
    """Compares each series that both runs have.

    Args:
        a: of the first run: milliseconds by step, NaN where unknown; all of equal length.
        b: of the second run, which may have another number of steps.

    Raises:
        ValueError: a run has fewer than 5 steps.
    """
    keys = [key for key in a if key in b]
    if not keys:
        return []
    lengths = [len(a[keys[0]]), len(b[keys[0]])]
    if min(lengths) < _FEWEST_STEPS:
        raise ValueError(f"a comparison needs at least {_FEWEST_STEPS} steps of each run; they have {lengths}")
    made = []
    for key in keys:
        first, second = (values[np.isfinite(values)] for values in (a[key], b[key]))
        if len(first) and len(second):
            medians = float(np.median(first)), float(np.median(second))
            made.append(Difference(*key, *medians, *median_change(first, second)))
    return made


def median_change(a: _Values, b: _Values) -> tuple[float, float, float, float]:
    """The 99 % interval of the change of the median from `a` to `b`, see [Note: how sure].

    Args:
        a: times in order, all finite, at least one.
        b: the same.

    Returns:
        Lower and upper end, and both in percent of `a`; unbounded if there are fewer than 5 values on a side.
    """
    if min(len(a), len(b)) < _BATCHES[0]:
        return -np.inf, np.inf, -100.0, np.inf
    first, second = float(np.median(a)), float(np.median(b))
    together = _autocorrelation_time(a, b)
    sides = [_squared_error(side, together) for side in (a, b)]
    total, quantile = sum(error for error, _ in sides), 0.0
    if total > 0:
        freedom = total**2 / sum(error**2 / degrees for error, degrees in sides)
        quantile = student_t((1 + LEVEL / 100) / 2, round(freedom, 1))
    reach = quantile * math.sqrt(total)
    low, high = _ratios(max(first, 0.0), max(second, 0.0), *(quantile**2 * error for error, _ in sides))
    return second - first - reach, second - first + reach, 100 * (low - 1), 100 * (high - 1)


def _ratios(a: float, b: float, reach_a: float, reach_b: float) -> tuple[float, float]:
    """The least and the largest r >= 0 with ``(b - r * a) ** 2 <= reach_b + r ** 2 * reach_a``."""
    above_a, above_b = a * a - reach_a, b * b - reach_b  # each positive if the time is clearly above 0
    middle = a * b + math.sqrt(max((a * b) ** 2 - above_a * above_b, 0.0))
    low = 0.0 if above_b <= 0 else above_b / middle if middle > 0 else math.inf
    return low, middle / above_a if above_a > 0 else math.inf


@functools.lru_cache(maxsize=1_000)
def student_t(probability: float, degrees: float) -> float:
    """The quantile of Student's t distribution.

    With t = sqrt(degrees) tan(a) the density of a is proportional to cos(a) ** (degrees - 1), which is summed.

    Args:
        probability: above 0.5 and below 1.
        degrees: of freedom, at least 1.
    """
    angle = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (degrees - 1)
    if degrees == 1:
        density[:] = 1.0
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    found = np.interp(2 * probability - 1, below / below[-1], angle)
    return math.sqrt(degrees) * math.tan(float(found))


def _squared_error(values: _Values, together: float) -> tuple[float, int]:
    """Variance of the median if `together` neighbours count as one value, and its degrees of freedom."""
    batches = int(np.clip(len(values) // together, *_BATCHES))
    medians = np.array([np.median(part) for part in np.array_split(values, batches)])
    length = len(values) / batches / together
    # Of batches of a process with exponentially decaying correlation: their variance over what it is for long ones.
    understated = 1 - (1 - np.exp(-2 * length)) / (2 * length)
    return float(medians.var(ddof=1) / batches / understated), batches - 1


def _autocorrelation_time(a: _Values, b: _Values) -> float:
    """How many neighbours count as one value, from both sides; uses ranks, so that a single long step has no weight."""
    shortest = min(len(a), len(b))
    correlation = (_autocorrelation(a)[:shortest] + _autocorrelation(b)[:shortest]) / 2
    total = 1.0
    for value in correlation[1 : shortest // 2]:
        unbiased = value + total / shortest  # the mean that was taken off is the sample's
        if unbiased <= _UNCORRELATED:
            break
        total += 2 * unbiased
    return max(1 + _TOO_LOW * (total - 1), 1 + _ALIKE / shortest)


def _autocorrelation(values: _Values) -> _Values:
    """The autocorrelation of the values' ranks, by lag; 0 if all are equal."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count + 1) / 2)[place]
    ranks = ranks - ranks.mean()
    scale = float((ranks**2).sum())
    if scale == 0:
        return np.zeros(len(values))
    spectrum = np.fft.rfft(ranks, 2 * len(values))
    return np.asarray(np.fft.irfft(np.abs(spectrum) ** 2)[: len(values)] / scale)


def largest(found: Sequence[Difference], scope: str, count: int) -> list[Difference]:
    """The clear differences of a scope that change most, in milliseconds."""
    clear = [one for one in found if one.scope == scope and one.is_clear]
    return sorted(clear, key=lambda one: -abs(one.change_ms))[:count]


@dataclass(frozen=True)
class BeforeAfter:
    """A time per step before and after a change.

    Attributes:
        before_ms: median before the change.
        after_ms: median after it.
        percent: change of the median; negative is faster.
        low_percent: lower 99 % bound of `percent`.
        high_percent: upper 99 % bound of `percent`.
        steps_before: number of steps before the change.
        steps_after: number of steps after it.
    """

    before_ms: float
    after_ms: float
    percent: float
    low_percent: float
    high_percent: float
    steps_before: int
    steps_after: int

    @property
    def verdict(self) -> str:
        """``"faster"``, ``"slower"``, or ``"no clear difference"`` if the bounds contain 0."""
        if self.high_percent < 0:
            return "faster"
        return "slower" if self.low_percent > 0 else "no clear difference"

    def __str__(self) -> str:
        return (
            f"{self.before_ms:.2f} ms before, {self.after_ms:.2f} ms after: {self.percent:+.1f} % "
            f"({self.low_percent:+.1f} to {self.high_percent:+.1f} %), {self.verdict}; "
            f"medians of {self.steps_before} and {self.steps_after} steps"
        )


def before_after(before: npt.ArrayLike, after: npt.ArrayLike) -> BeforeAfter:
    """Compares step times in milliseconds before and after a change.

    Args:
        before: in order of time, shape [steps]; NaN is ignored.
        after: the same for the steps after the change.

    Raises:
        ValueError: there are fewer than 10 steps on a side.
    """
    sides = [made[np.isfinite(made)] for made in (np.asarray(before, np.float64), np.asarray(after, np.float64))]
    for name, side in zip(("before", "after"), sides, strict=True):
        if len(side) < _FEWEST_ON_A_SIDE:
            raise ValueError(
                f"{len(side)} steps {name} the change are too few for a comparison; at least {_FEWEST_ON_A_SIDE} "
                "are needed"
            )
    medians = [float(np.median(side)) for side in sides]
    _, _, low, high = median_change(*sides)
    return BeforeAfter(
        before_ms=medians[0],
        after_ms=medians[1],
        percent=100 * (medians[1] / medians[0] - 1),
        low_percent=low,
        high_percent=high,
        steps_before=len(sides[0]),
        steps_after=len(sides[1]),
    )
