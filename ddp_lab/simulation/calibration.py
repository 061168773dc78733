"""How much computation and communication are in each other's way: read from steps whose time was measured.

The times of all-reduces alone don't tell what happens beside a backward. On a CPU the backend's threads take cores
from the computation, and wait for them; on a GPU a collective takes a few of the multiprocessors. A few measured
steps with different buckets do tell: the slowdowns are chosen so that the simulator reproduces them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .anchor import as_recorded
from .link_model import LinkModel
from .simulator import Configuration, simulate_many
from .workload import Workload

__all__ = ["Measured", "calibrated", "errors"]


@dataclass(frozen=True)
class Measured:
    """A workload, configurations that were tried with it, and the measured step of each in ns."""

    workload: Workload
    configurations: Sequence[Configuration]
    step_ns: Sequence[float]


def errors(runs: Sequence[Measured], link: LinkModel) -> npt.NDArray[np.float64]:
    """Predicted over measured step, minus 1, of every configuration of every run."""
    return np.concatenate([_predicted(run, link) / np.asarray(run.step_ns, np.float64) - 1 for run in runs])


def _predicted(run: Measured, link: LinkModel) -> npt.NDArray[np.float64]:
    """ns of each configuration; what the recorded one takes is known, and its error taken from all."""
    recorded = as_recorded(run.workload)
    if recorded is None or run.workload.step_ns is None:
        return simulate_many(run.workload, run.configurations, link).step_ns
    found = simulate_many(replace(run.workload, waits_ns=0.0), [recorded, *run.configurations], link).step_ns
    return np.asarray(np.maximum(found[1:] + run.workload.step_ns - found[0], 0.0))


def calibrated(runs: Sequence[Measured], link: LinkModel, rounds: int = 6) -> LinkModel:
    """The link with `compute_slowdown` and `comm_slowdown` fitted to measured steps.

    Searches a coarse grid, then around the best of it with ever smaller steps; the loss is the root mean square of the
    relative errors, plus a little for every slowdown, so that what makes no difference stays 0.

    Args:
        runs: what was measured.
        link: times of all-reduces alone.
        rounds: of refinement; each halves the steps.
    """

    def loss(values: tuple[float, ...]) -> float:
        found = errors(runs, _with(link, values))
        return float(np.sqrt(np.square(found).mean()) + 1e-4 * sum(values))

    starts = sorted(itertools.product(*_GRID.values()), key=loss)[:_STARTS]
    best = min((_descend(loss, start, rounds) for start in starts), key=loss)
    return _with(link, best)


def _descend(loss: Callable[[tuple[float, ...]], float], start: tuple[float, ...], rounds: int) -> tuple[float, ...]:
    """The best point that ever smaller steps in all directions lead to."""
    best, lowest, step = start, loss(start), 0.125
    for _ in range(rounds):
        for _ in range(_MOST_MOVES):  # a slowdown that explains nothing could grow for ever
            near = [
                tuple(max(0.0, value + step * change) for value, change in zip(best, changes, strict=True))
                for changes in itertools.product((-1, 0, 1), repeat=len(start))
            ]
            value, point = min((loss(one), one) for one in near)
            if value >= lowest - 1e-9:
                break
            lowest, best = value, point
        step /= 2
    return best


_GRID = {
    "compute_slowdown": (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    "comm_slowdown": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
}
_MOST_MOVES = 24  # with steps of one size
_STARTS = 4  # of the grid's best; there are several valleys


def _with(link: LinkModel, values: Sequence[float]) -> LinkModel:
    changes: dict[str, Any] = dict(zip(_GRID, values, strict=True))
    return replace(link, **changes)
