"""The time of every step of a model since its start, compact: what a strip of a whole run needs.

[Note: a bounded history]
A row holds the same number of neighbouring steps as every other, at first one. When the rows are full, that number
doubles: so a history of any length has at most 16,384 rows, whose smallest and largest times are exact. The median of a
row of several steps is the median of those of the rows that were joined.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import Breakdown

__all__ = ["COLUMNS", "StepHistory"]

COLUMNS = ("first", "last", "began", "low", "median", "high", "exposed")
"""First and last step; seconds when the first began; smallest, median and largest ms of a step, median ms exposed."""
_MOST_ROWS = 1 << 14
_FIRST, _LAST, _BEGAN, _LOW, _MEDIAN, _HIGH, _EXPOSED = range(len(COLUMNS))
_Rows = npt.NDArray[np.float64]


class StepHistory:
    """The steps of one model that all its ranks have completed.

    Args:
        most_rows: how many rows it may have.
    """

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self._most, self._every = most_rows, 1
        self._rows: _Rows = np.zeros((0, len(COLUMNS)))

    @property
    def last(self) -> int:
        """The newest step, -1 if there is none."""
        return int(self._rows[-1, _LAST]) if len(self._rows) else -1

    def extend(self, steps: Breakdown, began_ns: npt.NDArray[np.int64]) -> None:
        """Appends steps later than `last`.

        Args:
            steps: their times.
            began_ns: when each began.
        """
        total = steps.total
        parts = (steps.step, steps.step, began_ns / 1e9, total, total, total, steps.exposed)
        added = np.concatenate([self._rows[-1:], np.stack(parts, axis=1)])
        self._rows = np.concatenate([self._rows[:-1], _joined(added, self._every)])
        while len(self._rows) > self._most:
            self._every *= 2
            self._rows = _joined(self._rows, self._every)

    def blocks(self, most: int) -> _Rows:
        """Returns the history in at most so many blocks of neighbouring steps.

        Returns:
            Shape ``[blocks, len(COLUMNS)]``.
        """
        rows = self._rows  # another thread may replace them
        if len(rows) <= most:
            return rows
        begin, end = rows[0, _FIRST], rows[-1, _LAST] + 1
        return _joined(rows, -(-(end - begin) // most), begin)


def _joined(rows: _Rows, every: float, begin: float = 0.0) -> _Rows:
    """Joins neighbours whose first steps are in the same piece of so many steps, counted from `begin`."""
    cuts = np.flatnonzero(np.diff((rows[:, _FIRST] - begin) // every)) + 1
    if len(cuts) + 1 >= len(rows):
        return rows
    firsts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
    made: _Rows = rows[firsts]
    made[:, _LAST] = rows[ends - 1, _LAST]
    group = np.repeat(np.arange(len(firsts)), ends - firsts)
    for column in (_MEDIAN, _EXPOSED):
        ordered = rows[np.lexsort((rows[:, column], group)), column]
        made[:, column] = (ordered[(firsts + ends - 1) // 2] + ordered[(firsts + ends) // 2]) / 2
    made[:, _LOW] = np.minimum.reduceat(rows[:, _LOW], firsts)
    made[:, _HIGH] = np.maximum.reduceat(rows[:, _HIGH], firsts)
    return made
