"""Were steps faster after a change than before it? Two medians, and how far to trust their difference.

[Note: steps before and after]
Steps that follow each other are alike (a machine is busy for a while, a batch is large), so steps are not drawn one by
one: the bootstrap draws blocks of neighbours, with replacement, from each side. The bounds are the 2.5th and 97.5th
percentile of the change of the median over the resamples. Both sides were measured one after the other, once: what else
changed on the machine meanwhile is in the difference, and no bound tells. To be sure, change back and look again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BeforeAfter", "before_after"]

_BLOCK = 5
_RESAMPLES = 2_000
_FEWEST = 2 * _BLOCK


@dataclass(frozen=True)
class BeforeAfter:
    """A time per step before and after a change.

    Attributes:
        before_ms: median before it.
        after_ms: median after it.
        percent: change of the median; negative is faster.
        low_percent: lower 95 % bound of it.
        high_percent: upper 95 % bound of it.
        steps_before: how many steps the first median is of.
        steps_after: how many the second.
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
        """``"faster"``, ``"slower"``, or ``"no clear difference"`` where the bounds hold 0."""
        if self.high_percent < 0:
            return "faster"
        return "slower" if self.low_percent > 0 else "no clear difference"

    def __str__(self) -> str:
        return (
            f"{self.before_ms:.2f} ms before, {self.after_ms:.2f} ms after: {self.percent:+.1f} % "
            f"({self.low_percent:+.1f} to {self.high_percent:+.1f} %), {self.verdict}; "
            f"medians of {self.steps_before} and {self.steps_after} steps"
        )


def before_after(before: npt.ArrayLike, after: npt.ArrayLike, seed: int = 0) -> BeforeAfter:
    """Compares times in milliseconds, step by step in their order.

    Args:
        before: shape [steps]; NaN is left out.
        after: the same for the steps after the change.
        seed: of the resampling.

    Raises:
        ValueError: there are fewer than 10 steps on a side.
    """
    sides = [_known(before), _known(after)]
    for name, side in zip(("before", "after"), sides, strict=True):
        if len(side) < _FEWEST:
            raise ValueError(f"{len(side)} steps {name} the change are too few to compare: let {_FEWEST} pass")
    rng = np.random.default_rng(seed)
    first, second = (_resampled_medians(side, rng) for side in sides)
    changes = 100 * (second / first - 1)
    low, high = np.percentile(changes, [2.5, 97.5])
    medians = [float(np.median(side)) for side in sides]
    return BeforeAfter(
        before_ms=medians[0],
        after_ms=medians[1],
        percent=100 * (medians[1] / medians[0] - 1),
        low_percent=float(low),
        high_percent=float(high),
        steps_before=len(sides[0]),
        steps_after=len(sides[1]),
    )


def _known(times: npt.ArrayLike) -> npt.NDArray[np.float64]:
    made = np.asarray(times, np.float64)
    return made[np.isfinite(made)]


def _resampled_medians(times: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """The median of each resample: blocks of neighbours (the end goes on at the beginning)."""
    count = len(times)
    blocks = -(-count // _BLOCK)
    begins = rng.integers(0, count, (_RESAMPLES, blocks))
    rows = (begins[:, :, None] + np.arange(_BLOCK)).reshape(_RESAMPLES, -1)[:, :count] % count
    return np.asarray(np.median(times[rows], axis=1), np.float64)
