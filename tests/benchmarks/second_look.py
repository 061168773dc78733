"""The comparison of a choice with the best of many settings.

[Note: the second look]
The fastest measured setting is partly the luckiest one: if all are equal, its time is still below all others, and any
choice looks bad in comparison. So the choice and that best setting take new turns, in pairs, and only these count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_lab.analysis.comparison import student_t

NOT_NEEDED = {"cost": 0.0, "low": 0.0, "high": 0.0, "pairs": 0}
"""The second look at a choice that is the best that was measured."""


def second_look(chosen: Sequence[float], best: Sequence[float]) -> dict[str, Any]:
    """Compares turns that were taken in pairs.

    Args:
        chosen: time of a step in each turn of the choice, shape ``[pairs]``.
        best: the same of the best that was measured.

    Returns:
        ``cost``: how much longer the choice takes, as a fraction of the best's step; ``low`` and ``high``: its 95 %
        bounds (Student's t); ``pairs``.
    """
    logs = np.log(np.divide(chosen, best))
    reach = math.inf
    if len(logs) > 1:
        reach = student_t(0.975, len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    mean = float(logs.mean())
    low, cost, high = (math.exp(value) - 1 for value in (mean - reach, mean, min(mean + reach, 700.0)))
    return {"cost": cost, "low": low, "high": high, "pairs": len(logs)}


def words(found: dict[str, Any]) -> str:
    """Returns what `second_look` found, in percent."""
    if not found["pairs"]:
        return "it is the best that was measured"
    low, high = 100 * found["low"], 100 * found["high"]
    return f"{100 * found['cost']:+.1f} % ({low:+.1f} to {high:+.1f} %) in {found['pairs']} new pairs of turns"
