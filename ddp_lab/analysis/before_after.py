"""Were steps faster after a change than before it? Two medians, and how far to trust their difference.

[Note: steps before and after]
The bounds are those of [Note: how sure] (`comparison.py`), which knows that neighbouring steps are alike. Both sides
were measured one after the other, once: what else changed on the machine meanwhile is in the difference, and no bound
tells. To be sure, change back and look again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .comparison import median_change

__all__ = ["BeforeAfter", "before_after"]

_FEWEST = 10


@dataclass(frozen=True)
class BeforeAfter:
    """A time per step before and after a change.

    Attributes:
        before_ms: median before it.
        after_ms: median after it.
        percent: change of the median; negative is faster.
        low_percent: lower 99 % bound of it.
        high_percent: upper 99 % bound of it.
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


def before_after(before: npt.ArrayLike, after: npt.ArrayLike) -> BeforeAfter:
    """Compares times in milliseconds, step by step in their order.

    Args:
        before: shape [steps]; NaN is left out.
        after: the same for the steps after the change.

    Raises:
        ValueError: there are fewer than 10 steps on a side.
    """
    sides = [_known(before), _known(after)]
    for name, side in zip(("before", "after"), sides, strict=True):
        if len(side) < _FEWEST:
            raise ValueError(f"{len(side)} steps {name} the change are too few to compare: let {_FEWEST} pass")
    medians = [float(np.median(side)) for side in sides]
    percents = [100 * bound / medians[0] for bound in median_change(*sides)]
    return BeforeAfter(
        before_ms=medians[0],
        after_ms=medians[1],
        percent=100 * (medians[1] / medians[0] - 1),
        low_percent=percents[0],
        high_percent=percents[1],
        steps_before=len(sides[0]),
        steps_after=len(sides[1]),
    )


def _known(times: npt.ArrayLike) -> npt.NDArray[np.float64]:
    made = np.asarray(times, np.float64)
    return made[np.isfinite(made)]
