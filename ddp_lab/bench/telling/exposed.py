"""What communication adds to a step: the step less the same step under ``no_sync``, by class and backend.

[Note: exposed communication]
Under ``no_sync`` a wrapped model computes the same gradients and sends nothing: that step is the floor. Both are timed
with the same wrapper object in the same turn, so that what a build or a turn happens to get cancels out. A build's
exposed communication is the median over its turns of the difference, a set's the median of its builds', the figure the
median of the sets' (as in [Note: the median and its upper bound]). A difference can be about 0 or below, so its
uncertainty is compared with the largest one that was found for this model, usually that of torch's class on Gloo.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import noise, ratios

__all__ = ["CLASSES", "Floors", "Sets", "against", "by_set", "figures"]

CLASSES = ("torch", "ours")

Sets = Sequence[Sequence[ratios.Build]]
"""For each set of processes its builds, ms."""
Floors = Sets
"""The same under ``no_sync``, of `CLASSES` alone."""


def _of_builds(sets: Sets, floors: Floors, who: str) -> list[list[float]]:
    """Exposed ms of each set's builds."""
    return [
        [float(np.median(np.subtract(build[who], floor[who]))) for build, floor in zip(builds, floors_, strict=True)]
        for builds, floors_ in zip(sets, floors, strict=True)
    ]


def by_set(sets: Sets, who: str) -> list[float]:
    """The median time of a contestant in each set, over its builds' medians, ms."""
    return [statistics.median(statistics.median(build[who]) for build in builds) for builds in sets]


def figures(
    of_backends: Mapping[str, tuple[Sets, Floors]], others: Sequence[float | None], tolerance: float
) -> dict[str, dict[str, dict[str, noise.Figure]]]:
    """Step, floor and exposed communication of one model, in ms.

    Args:
        of_backends: backend -> what was measured on it, both with and without communication.
        others: of each set what other programs took.
        tolerance: see `noise.figure`.

    Returns:
        backend -> class -> ``"step"``, ``"floor"``, ``"exposed"`` -> figure.
    """
    exposed = {
        (backend, who): [statistics.median(builds) for builds in _of_builds(sets, floors, who)]
        for backend, (sets, floors) in of_backends.items()
        for who in CLASSES
    }
    largest = max(abs(statistics.median(values)) for values in exposed.values())
    return {
        backend: {
            who: {
                "step": noise.figure(by_set(sets, who), others, tolerance=tolerance),
                "floor": noise.figure(by_set(floors, who), others, tolerance=tolerance),
                "exposed": noise.figure(exposed[backend, who], others, tolerance=tolerance, scale=largest),
            }
            for who in CLASSES
        }
        for backend, (sets, floors) in of_backends.items()
    }


def against(
    ours: tuple[Sets, Floors], torchs: tuple[Sets, Floors], parts: tuple[noise.Figure, noise.Figure]
) -> dict[str, Any]:
    """How much of the exposed communication of torch's class is left with ours, each on a backend of its own.

    Args:
        ours: sets and floors on the one backend.
        torchs: sets and floors on the other.
        parts: the figures of both exposed communications; too noisy if one of them is.

    Returns:
        ``ratio``, ``upper`` (95 %), ``noisy`` and ``why``; no numbers where torch's is not above 0 in every build.
    """
    mine, theirs = _of_builds(*ours, "ours"), _of_builds(*torchs, "torch")
    why = next((part["why"] for part in parts if part["noisy"]), "")
    if min(map(min, theirs)) <= 0:
        return {"ratio": None, "upper": None, "noisy": True, "why": why or "torch's is about 0"}
    values = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(mine, theirs, strict=True)]
    middle = statistics.median(statistics.median(builds) for builds in values)
    return {"ratio": middle, "upper": ratios.upper_bound(values), "noisy": bool(why), "why": why}
