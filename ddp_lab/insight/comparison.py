"""Two runs side by side: which times differ, by how much, and how sure that is.

[Note: how sure]
A run is a sample of steps. Steps are drawn from each run with replacement, in blocks of 5 neighbours (a slow moment
makes neighbours slow together), 1,000 times; each time the medians of both runs give a change. The middle 95 % of the
changes are the interval, and a difference is clear if it does not hold 0. Of 20 differences that are none, one will
look clear: what is small and alone is likely an accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "Key", "compare_series", "largest"]

_Values = npt.NDArray[np.float64]
Key = tuple[str, str, int | None, int | None]
"""What a series of times is about: scope, name, rank, bucket."""

_RESAMPLES, _BLOCK = 1_000, 5
_FEWEST_STEPS = 5
_NEGLIGIBLE_MS = 1e-3


@dataclass(frozen=True)
class Difference:
    """One time in both runs.

    Attributes:
        scope: ``"phase"``: all ranks together; ``"rank"``; or ``"bucket"``.
        name: which time: ``"step"``, ``"forward"``, ``"computation"``, ``"exposed"`` (waiting for gradients after the
            computation), ``"other"``; of a bucket ``"ready"``, ``"waiting"`` (from the first rank's launch
            to the last one's), ``"all-reduce"``.
        rank: which rank, None for all.
        bucket: which bucket, None for all.
        a_ms: median over the steps of the first run.
        b_ms: of the second.
        low_ms: lower end of the 95 % interval of ``b_ms - a_ms``; see [Note: how sure].
        high_ms: its upper end.
    """

    scope: str
    name: str
    rank: int | None
    bucket: int | None
    a_ms: float
    b_ms: float
    low_ms: float
    high_ms: float

    @property
    def change_ms(self) -> float:
        """By how much the second run is slower; negative: faster."""
        return self.b_ms - self.a_ms

    @property
    def change_percent(self) -> float:
        """The same in percent of the first run; infinite if that took no time."""
        return self._percent(self.change_ms)

    @property
    def low_percent(self) -> float:
        """Lower end of the interval in percent of the first run."""
        return self._percent(self.low_ms)

    @property
    def high_percent(self) -> float:
        """Upper end of the interval in percent of the first run."""
        return self._percent(self.high_ms)

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low_ms > 0 or self.high_ms < 0

    def _percent(self, value: float) -> float:
        if self.a_ms > _NEGLIGIBLE_MS:
            return 100 * value / self.a_ms
        return 0.0 if abs(value) <= _NEGLIGIBLE_MS else float(np.copysign(np.inf, value))


def compare_series(a: Mapping[Key, _Values], b: Mapping[Key, _Values], seed: int = 0) -> list[Difference]:
    """Compares each series that both runs have.

    Args:
        a: of the first run: milliseconds by step, NaN where unknown; all of equal length.
        b: of the second run, which may have another number of steps.
        seed: of the resampling.

    Raises:
        ValueError: a run has fewer than 5 steps.
    """
    keys = [key for key in a if key in b]
    if not keys:
        return []
    lengths = [len(a[keys[0]]), len(b[keys[0]])]
    if min(lengths) < _FEWEST_STEPS:
        raise ValueError(f"at least {_FEWEST_STEPS} steps of each run are needed to compare them; they have {lengths}")
    draws = np.random.default_rng(seed)
    chosen_a, chosen_b = (_blocks(length, draws) for length in lengths)
    made = []
    for key in keys:
        if not (np.isfinite(a[key]).any() and np.isfinite(b[key]).any()):
            continue
        changes = _medians(b[key], chosen_b) - _medians(a[key], chosen_a)
        low, high = np.nanquantile(changes, [0.025, 0.975])
        made.append(Difference(*key, float(np.nanmedian(a[key])), float(np.nanmedian(b[key])), float(low), float(high)))
    return made


def _blocks(length: int, draws: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices of `_RESAMPLES` samples of `length` steps, shape ``[resamples, steps]``."""
    block = min(_BLOCK, length)
    count = -(-length // block)
    starts = draws.integers(0, length - block + 1, (_RESAMPLES, count, 1))
    return np.asarray((starts + np.arange(block)).reshape(_RESAMPLES, -1)[:, :length])


def _medians(values: _Values, chosen: npt.NDArray[np.int64]) -> _Values:
    drawn = values[chosen]
    if np.isfinite(values).all():
        return np.asarray(np.median(drawn, axis=1))
    some = np.isfinite(drawn).any(axis=1)
    made = np.full(len(drawn), np.nan)
    made[some] = np.nanmedian(drawn[some], axis=1)
    return made


def largest(found: Sequence[Difference], scope: str, count: int) -> list[Difference]:
    """The clear differences of a scope that change most, in milliseconds."""
    clear = [one for one in found if one.scope == scope and one.is_clear]
    return sorted(clear, key=lambda one: -abs(one.change_ms))[:count]
