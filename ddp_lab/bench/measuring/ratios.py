"""Ratios and differences of times that were measured in turns, and how far to trust them.

[Note: the median and its upper bound]
Two identical models that are compared within one set of processes differ by several percent, and building both again in
the same processes gives another difference: random properties of a set or a build (memory, the order of construction)
persist. So times come from several sets of processes, each with several builds, each with several turns.
Within a build, the ratio is the median over its turns of (ours / mean of torch and torch again), both from the same
turn. A set's ratio is the median of its builds', and the figure the median of the sets'. The upper 95 % bound is the
95th percentile of that figure over 4000 resamples: sets drawn with replacement, then builds within each.

[Note: exposed communication]
The time that communication adds to a step. Under ``no_sync`` a wrapped model computes the same gradients and sends
nothing: that step is the no-communication baseline (floor). Both are timed with the same wrapper object in the same
turn, so that random properties of a build or a turn cancel out. A build's exposed communication is the median over its
turns of the difference, a set's the median of its builds', the result the median of the sets'. A difference can be
about 0 or below, so its uncertainty is compared with the largest one that was found for this model, usually that of
torch's class on Gloo.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import noise

__all__ = [
    "CLASSES",
    "LIMIT",
    "Build",
    "Sets",
    "by_set",
    "exposed",
    "exposed_left",
    "medians",
    "ratios",
    "upper_bound",
]

Build = dict[str, list[float]]  # contestant -> its time in each turn
Sets = Sequence[Sequence[Build]]
"""For each set of processes its builds."""

CLASSES = ("torch", "ours")
"""Contestants that have a floor."""
LIMIT = "limit"
"""A step without communication, after whose backward the ranks meet and each touches its gradients once."""
_RESAMPLES = 4000


def upper_bound(values: Sequence[Sequence[float]]) -> float:
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


def by_set(sets: Sets) -> list[float]:
    """Ours over torch's in each set of processes, the median of its builds'."""
    return [statistics.median(builds) for builds in _ours(sets)]


def _ours(sets: Sets) -> list[list[float]]:
    return [[_ratio(b["ours"], np.mean([b["torch"], b["torch again"]], axis=0)) for b in builds] for builds in sets]


def _ratio(times: Sequence[float], reference: Any) -> float:
    return float(np.median(np.divide(times, reference)))


def ratios(sets: Sets) -> dict[str, float]:
    """``"ours / torch"`` and ``"torch again / torch"``, each with its ``"... upper"``.

    Args:
        sets: for each set of processes its builds.
    """
    again = [[_ratio(b["torch again"], b["torch"]) for b in builds] for builds in sets]
    found: dict[str, float] = {}
    for name, values in {"ours / torch": _ours(sets), "torch again / torch": again}.items():
        found |= {name: float(np.median(np.median(values, axis=1))), f"{name} upper": upper_bound(values)}
    return found


def medians(sets: Sets) -> dict[str, float]:
    """The median time of each contestant over everything, in the unit of the builds."""
    return {who: statistics.median(t for builds in sets for b in builds for t in b[who]) for who in sets[0][0]}


def _times(sets: Sets, who: str) -> list[float]:
    """The median time of a contestant in each set, over its builds' medians."""
    return [statistics.median(statistics.median(build[who]) for build in builds) for builds in sets]


def _exposed(sets: Sets, floors: Sets, who: str, floor: str = "") -> list[list[float]]:
    """What is above the floor (default: its own) in each set's builds."""
    return [
        [float(np.median(np.subtract(build[who], below[floor or who]))) for build, below in zip(*pair, strict=True)]
        for pair in zip(sets, floors, strict=True)
    ]


def _least(floors: Sets) -> list[list[float]] | None:
    """What `LIMIT` exposes in each set's builds; None if it was not measured."""
    return _exposed(floors, floors, LIMIT, "ours") if LIMIT in floors[0][0] else None


def exposed(
    of_backends: Mapping[str, tuple[Sets, Sets]], judge: noise.Judge
) -> dict[str, dict[str, dict[str, noise.Figure]]]:
    """Step, floor and exposed communication of one model, in the unit of the builds.

    Args:
        of_backends: backend -> what was measured on it, with communication (of all contestants) and without (of
            `CLASSES`).
        judge: makes figures of sets.

    Returns:
        backend -> class -> ``"step"``, ``"floor"``, ``"exposed"`` -> figure; also ``"exposed"`` of `LIMIT` where it was
        measured.
    """
    found = {
        (backend, who): [statistics.median(builds) for builds in _exposed(*measured, who)]
        for backend, measured in of_backends.items()
        for who in CLASSES
    }
    largest = max(abs(statistics.median(values)) for values in found.values())
    figures = {
        backend: {
            who: {
                "step": judge(_times(sets, who)),
                "floor": judge(_times(floors, who)),
                "exposed": judge(found[backend, who], scale=largest),
            }
            for who in CLASSES
        }
        for backend, (sets, floors) in of_backends.items()
    }
    for backend, (_, floors) in of_backends.items():
        if least := _least(floors):
            figures[backend][LIMIT] = {"exposed": judge([statistics.median(one) for one in least], scale=largest)}
    return figures


def exposed_left(
    ours: tuple[Sets, Sets], torchs: tuple[Sets, Sets], parts: tuple[noise.Figure, noise.Figure]
) -> dict[str, Any]:
    """How much of the exposed communication of torch's class is left with ours, each on a backend of its own.

    Args:
        ours: sets and floors on the one backend.
        torchs: sets and floors on the other.
        parts: the figures of both exposed communications; too noisy if one of them is.

    Returns:
        ``ratio``, ``upper`` (95 %), ``noisy`` and ``why``; no numbers where torch's is not above 0 in every build.
        ``limit``: the ratio that `LIMIT` would have; None if it was not measured.
    """
    mine, theirs = _exposed(*ours, "ours"), _exposed(*torchs, "torch")
    why = next((part["why"] for part in parts if part["noisy"]), "")
    if min(map(min, theirs)) <= 0:
        return {"ratio": None, "upper": None, "limit": None, "noisy": True, "why": why or "torch's is about 0"}
    values = np.divide(mine, theirs)
    least = _least(ours[1])
    limit = None if least is None else _middle(np.divide(least, theirs))
    upper = upper_bound(values.tolist())
    return {"ratio": _middle(values), "upper": upper, "limit": limit, "noisy": bool(why), "why": why}


def _middle(values: Any) -> float:
    """The median over sets of their medians."""
    return float(np.median(np.median(values, axis=1)))
