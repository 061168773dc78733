"""How much computation and communication are in each other's way: read from steps whose time was measured.

The times of all-reduces alone don't tell what happens beside a backward. On a CPU the backend's threads take cores
from the computation, and wait for them; on a GPU a collective takes a few of the multiprocessors. A few measured
steps with different buckets do tell: the slowdowns are chosen so that the simulator reproduces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .link_model import LinkModel
from .simulate import Configuration, simulate_many
from .workload import Workload

__all__ = ["Measured", "calibrated", "errors"]


@dataclass(frozen=True)
class Measured:
    """A workload, configurations that were tried with it, and the measured step of each in ns."""

    workload: Workload
    configurations: Sequence[Configuration]
    step_ns: Sequence[float]


def errors(runs: Sequence[Measured], link: LinkModel) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Predicted over measured step, minus 1, of every configuration of every run."""
    parts = [
        simulate_many(run.workload, run.configurations, link).step_ns / np.asarray(run.step_ns, np.float64) - 1
        for run in runs
    ]
    return np.concatenate(parts)


def calibrated(runs: Sequence[Measured], link: LinkModel, rounds: int = 3) -> LinkModel:
    """The link with `compute_slowdown`, `comm_slowdown` and (with several lanes) `sharing` fitted to measured steps.

    Searches a grid and then finer ones around the best; the loss is the mean absolute relative error, plus a little
    for every slowdown, so that what makes no difference stays 0.

    Args:
        runs: what was measured.
        link: times of all-reduces alone.
        rounds: of refinement; each has a third of the last one's step.
    """
    names = ["compute_slowdown", "comm_slowdown", *(["sharing"] if link.lanes > 1 else [])]
    best = {name: float(getattr(link, name)) for name in names}
    step = {"compute_slowdown": 0.4, "comm_slowdown": 1.0, "sharing": 0.5}
    top = {"compute_slowdown": 3.0, "comm_slowdown": 5.0, "sharing": 1.0}

    def loss(values: dict[str, float]) -> float:
        found = errors(runs, replace(link, **values))
        return float(np.abs(found).mean()) + 1e-4 * sum(values[name] / top[name] for name in names)

    lowest = loss(best)
    for _ in range(rounds):
        improved = True
        while improved:
            improved = False
            for name in names:
                for sign in (1, -1):
                    tried = dict(best)
                    tried[name] = float(np.clip(tried[name] + sign * step[name], 0.0, top[name]))
                    value = loss(tried)
                    if value < lowest - 1e-9:
                        best, lowest, improved = tried, value, True
        step = {name: size / 3 for name, size in step.items()}
    return replace(link, **best)
