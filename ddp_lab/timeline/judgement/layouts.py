"""Which steps are judged together: those that all ranks have completed with one layout of the buckets.

[Note: the layout that is judged]
Every rebuild, every change and every rejoin gives the assignment of buckets another number (its generation). After a
rejoin the first assignment is back until the next step, and has no steps at all. So the newest number says little.
Assignments with the same buckets, options and ranks are one layout, whatever lies between them. What is judged is the
newest layout with at least 5 complete steps; if there is none, the newest with any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FEWEST_STEPS", "Layout", "alike", "layouts", "newest"]

_Numbers = npt.NDArray[np.int64]

FEWEST_STEPS = 5  # fewer say nothing: the first ones after a rebuild are not like the others
_FIELDS = ("parameters", "buckets", "options", "group_ranks", "backend")


@dataclass(frozen=True)
class Layout:
    """One layout of a model's buckets, and its steps.

    Attributes:
        description: of its newest assignment, None if no rank has described it.
        step: steps that all ranks have completed with it, ascending.
        generation: shape of `step`: the number of the assignment that each of them had.
    """

    description: dict[str, Any] | None
    step: _Numbers
    generation: _Numbers

    def only(self, chosen: npt.NDArray[np.bool_]) -> Layout:
        """The same with some of its steps."""
        return replace(self, step=self.step[chosen], generation=self.generation[chosen])

    def warm(self, warm_up: int, last_steps: int | None = None) -> _Numbers:
        """The steps without the first `warm_up` of each assignment, where that leaves as many; the newest `last_steps`.

        Memory is new after buckets were assigned, so these take longer than others.
        """
        first = np.zeros(len(self.step), bool)
        for number in np.unique(self.generation):
            first[np.flatnonzero(self.generation == number)[:warm_up]] = True
        kept = self.step[~first] if (~first).sum() >= warm_up else self.step
        return kept if last_steps is None else kept[max(0, len(kept) - last_steps) :]


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two assignments are one layout: equal buckets of equal parameters, options and ranks."""
    return all(one.get(name) == other.get(name) for name in _FIELDS)


def layouts(done: Sequence[tuple[_Numbers, _Numbers]], described: Mapping[int, dict[str, Any]]) -> list[Layout]:
    """The layouts that have steps, in the order of their newest step.

    Args:
        done: of each rank the steps that it has completed, ascending, and the generation of each.
        described: generation -> description of the assignment. Steps of others are left out, if there are any.
    """
    step, generation = _common(done)
    if not described:
        return [Layout(None, step, generation)] if len(step) else []
    of_layout: dict[int, int] = {}  # generation -> the first one that is alike
    for number in np.unique(generation).tolist():
        if number in described:
            same = (known for known in of_layout.values() if alike(described[known], described[number]))
            of_layout[number] = next(same, number)
    made = []
    for first in sorted(set(of_layout.values())):
        members = [number for number, of in of_layout.items() if of == first]
        rows = np.isin(generation, members)
        made.append(Layout(described[max(members)], step[rows], generation[rows]))
    return sorted(made, key=lambda one: int(one.step[-1]))


def newest(known: Sequence[Layout]) -> Layout | None:
    """The layout that is judged: see [Note: the layout that is judged]; None if there is none."""
    enough = [one for one in known if len(one.step) >= FEWEST_STEPS]
    return next(reversed(enough or known), None)


def _common(done: Sequence[tuple[_Numbers, _Numbers]]) -> tuple[_Numbers, _Numbers]:
    """The steps that are in all lists with the same generation, and that generation."""
    if not done:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    step, generation = done[0]
    for other, of_other in done[1:]:
        step, here, there = np.intersect1d(step, other, assume_unique=True, return_indices=True)
        generation = generation[here]
        same = generation == of_other[there]
        step, generation = step[same], generation[same]
    return step, generation
