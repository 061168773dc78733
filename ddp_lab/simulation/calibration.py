"""Calibration of the simulation with measurements: with the recorded steps, and with steps that were tried.

[Note: the anchor]
A replay of medians is faster than the recorded steps, because in each step a different rank is slow and all others
wait for it. That hardly depends on the buckets. So the recorded configuration is simulated, too, and the time by which
its recorded steps were longer is added to every prediction from this recording. A prediction is thus the simulated
effect of a change plus a measured part that does not change. If the simulation is slower than the recorded steps, the
link may be faster than assumed (it was measured at a bad time, or apart from computation): it is made up to eight times
as fast, until both agree. If they don't even then, the link is not to blame (medians of the computation's parts can add
up to more than the median step): it stays as measured, and the difference is subtracted from every prediction.

The times of all-reduces alone don't show the contention with a backward. On a CPU the backend's threads compete with
the computation for cores; on a GPU a collective uses some of the multiprocessors. A few measured steps with different
buckets show it: the slowdowns are chosen so that the simulator reproduces them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .link_model import CommModel
from .simulator import Configuration, simulate_many
from .workload import Workload

__all__ = ["Measured", "anchored", "as_recorded", "calibrated", "errors"]

_FASTEST, _TRIED = 1 / 8, 17
_GRID = {
    "compute_slowdown": (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    "comm_slowdown": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
}
_MOST_MOVES = 24  # with steps of one size
_STARTS = 4  # of the grid's best; there are several valleys


def as_recorded(workload: Workload) -> Configuration | None:
    """The configuration of the recorded workload; None if it is not known."""
    return Configuration(workload.caps_mb) if workload.caps else None


def anchored(workload: Workload, link: CommModel) -> tuple[Workload, CommModel]:
    """Workload and link with which a simulation of the recorded configuration takes `step_ns`.

    Args:
        workload: as recorded; returned unchanged, with its link, if its size limits or steps are unknown.
        link: the link of the recording.

    Returns:
        The workload with its `waits_ns`, and the link, made faster (down to 1/8 of its times) where that explains them.
    """
    recorded = as_recorded(workload)
    if recorded is None or workload.step_ns is None:
        return workload, link
    bare = replace(workload, waits_ns=0.0)
    low, high = 0.0, 1.0  # powers of _FASTEST
    simulated, fastest = _steps(bare, recorded, [link, link.scaled(_FASTEST)])
    if fastest <= workload.step_ns < simulated:
        for _ in range(2):
            powers = np.linspace(low, high, _TRIED)
            found = _steps(bare, recorded, [link.scaled(_FASTEST**power) for power in powers])
            enough = np.flatnonzero(found <= workload.step_ns)
            last = int(enough[0]) if len(enough) else _TRIED - 1
            low, high = float(powers[max(last - 1, 0)]), float(powers[last])
        link = link.scaled(_FASTEST**high)
    return replace(bare, waits_ns=workload.step_ns - float(_steps(bare, recorded, [link])[0])), link


def _steps(workload: Workload, configuration: Configuration, links: Sequence[CommModel]) -> npt.NDArray[np.float64]:
    return simulate_many(workload, [configuration] * len(links), links).step_ns


@dataclass(frozen=True)
class Measured:
    """A workload, configurations that were tried with it, and the measured step of each in ns."""

    workload: Workload
    configurations: Sequence[Configuration]
    step_ns: Sequence[float]


def errors(runs: Sequence[Measured], link: CommModel) -> npt.NDArray[np.float64]:
    """Predicted over measured step, minus 1, of every configuration of every run."""
    return np.concatenate([_predicted(run, link) / np.asarray(run.step_ns, np.float64) - 1 for run in runs])


def _predicted(run: Measured, link: CommModel) -> npt.NDArray[np.float64]:
    """ns of each configuration; what the recorded one takes is known, and its error taken from all."""
    recorded = as_recorded(run.workload)
    if recorded is None or run.workload.step_ns is None:
        return simulate_many(run.workload, run.configurations, link).step_ns
    found = simulate_many(replace(run.workload, waits_ns=0.0), [recorded, *run.configurations], link).step_ns
    return np.asarray(np.maximum(found[1:] + run.workload.step_ns - found[0], 0.0))


def calibrated(runs: Sequence[Measured], link: CommModel, rounds: int = 6) -> CommModel:
    """The link with `compute_slowdown` and `comm_slowdown` fitted to measured steps.

    Searches a coarse grid, then around its best points with decreasing steps; the loss is the root mean square of the
    relative errors, plus a small penalty for every slowdown, so that slowdowns without an effect stay 0.

    Args:
        runs: the measurements.
        link: times of all-reduces alone.
        rounds: rounds of refinement; each halves the steps.
    """

    def loss(values: tuple[float, ...]) -> float:
        found = errors(runs, _with(link, values))
        return float(np.sqrt(np.square(found).mean()) + 1e-4 * sum(values))

    starts = sorted(itertools.product(*_GRID.values()), key=loss)[:_STARTS]
    best = min((_descend(loss, start, rounds) for start in starts), key=loss)
    return _with(link, best)


def _descend(loss: Callable[[tuple[float, ...]], float], start: tuple[float, ...], rounds: int) -> tuple[float, ...]:
    """The best point that is found with decreasing steps in all directions."""
    best, lowest, step = start, loss(start), 0.125
    for _ in range(rounds):
        for _ in range(_MOST_MOVES):  # a slowdown without an effect could grow without limit
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


def _with(link: CommModel, values: Sequence[float]) -> CommModel:
    changes: dict[str, Any] = dict(zip(_GRID, values, strict=True))
    return replace(link, **changes)
