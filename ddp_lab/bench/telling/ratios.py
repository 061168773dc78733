"""Ratios of times that were measured in turns, and how far to trust them.

[Note: the median and its upper bound]
Two identical models that are compared within one set of processes differ by several per cent, and a build of both
in the same processes anew differs from the last one: what a set or a build happens to get (memory, the order of
construction) stays with it. So times come as sets of processes, each with several builds, each with several turns.
Within a build, the ratio is the median over its turns of (ours / mean of torch and torch again), both from the same
turn. A set's ratio is the median of its builds', and the figure the median of the sets'. The upper 95 % bound is the
95th percentile of that figure over 4000 resamples: sets drawn with replacement, then builds within each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Build", "by_set", "header", "medians", "ratios", "row", "upper_bound"]

Build = dict[str, list[float]]  # contestant -> its time in each turn
Values = Sequence[Sequence[float]]

_RESAMPLES = 4000


def _figure(values: Values) -> float:
    return float(np.median(np.median(np.asarray(values), axis=1)))


def upper_bound(values: Values) -> float:
    """One-sided 95 % bound of the median of medians; see [Note: the median and its upper bound].

    Args:
        values: for each set of processes the ratio of each of its builds, equally many.
    """
    table = np.asarray(values, dtype=np.float64)
    sets, builds = table.shape
    random = np.random.default_rng(0)
    chosen_sets = random.integers(sets, size=(_RESAMPLES, sets, 1))
    chosen_builds = random.integers(builds, size=(_RESAMPLES, sets, builds))
    resampled = np.median(np.median(table[chosen_sets, chosen_builds], axis=2), axis=1)
    return float(np.percentile(resampled, 95))


def by_set(sets: Sequence[Sequence[Build]]) -> list[float]:
    """Ours over torch's in each set of processes, the median of its builds'."""
    return [float(np.median(builds)) for builds in _ours(sets)]


def _ours(sets: Sequence[Sequence[Build]]) -> list[list[float]]:
    return [[_median_ratio(b["ours"], _means(b["torch"], b["torch again"])) for b in builds] for builds in sets]


def ratios(sets: Sequence[Sequence[Build]]) -> dict[str, float]:
    """``"ours / torch"`` and ``"torch again / torch"``, each with its ``"... upper"``.

    Args:
        sets: for each set of processes its builds.
    """
    ours = _ours(sets)
    again = [[_median_ratio(b["torch again"], b["torch"]) for b in builds] for builds in sets]
    return {
        "ours / torch": _figure(ours),
        "ours / torch upper": upper_bound(ours),
        "torch again / torch": _figure(again),
        "torch again / torch upper": upper_bound(again),
    }


def medians(sets: Sequence[Sequence[Build]]) -> dict[str, float]:
    """The median time of each contestant over everything, in the unit of the builds."""
    return {who: float(np.median([t for builds in sets for b in builds for t in b[who]])) for who in sets[0][0]}


def _means(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(one, other, strict=True)]


def _median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    return float(np.median([a / b for a, b in zip(times, reference, strict=True)]))


def header(first: str, unit: str) -> str:
    """The head of a table of `row`s."""
    return (
        f"{first} {'torch ' + unit:>9} {'ours ' + unit:>9} {'ours/torch':>11} {'(95 % <)':>9} "
        f"{'torch/torch':>12} {'(95 % <)':>9}"
    )


def row(first: str, ms: dict[str, float], found: dict[str, Any]) -> str:
    """One line: median times, and the ratios with their bounds."""
    return (
        f"{first} {ms['torch']:9.2f} {ms['ours']:9.2f} {found['ours / torch']:11.3f} "
        f"{found['ours / torch upper']:9.3f} {found['torch again / torch']:12.3f} "
        f"{found['torch again / torch upper']:9.3f}"
    )
