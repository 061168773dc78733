"""How long the simulator takes: `ddp-lab bench what-if --simulator`."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from ..simulation.link_model import LinkModel
from ..simulation.simulator import Configuration, simulate_many
from ..simulation.workload import Workload

__all__ = ["measure", "words"]

_MEBIBYTE = 1024 * 1024


def measure(configurations: int = 1000, buckets: int = 200, *, ranks: int = 2, repeats: int = 5) -> dict[str, Any]:
    """Times `simulate_many` on configurations that all have a bucket assignment of their own.

    Args:
        configurations: how many.
        buckets: of each; there are twice as many parameters.
        ranks: whose times are replayed.
        repeats: the median counts.

    Returns:
        ``seconds`` (median), ``configurations``, ``buckets``, ``ranks``.
    """
    made = Workload.made_up([_MEBIBYTE // 2] * (2 * buckets), forward_ns=1e8, backward_ns=2e8, other_ns=1e7)
    workload = replace(
        made,
        world_size=ranks,
        **{name: getattr(made, name).repeat(ranks, axis=0) for name in ("ready_ns", "busy_ns")},
        **{name: getattr(made, name).repeat(ranks) for name in ("computed_ns", "forward_ns", "other_ns")},
    )
    link = LinkModel(2e4, 0.1, lanes=2, compute_slowdown=0.3, comm_slowdown=0.3)
    # A cap a little below a mebibyte is reached by the same two parameters, but assigned by itself.
    tried = [Configuration(1 - 1e-6 * number) for number in range(configurations)]
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        found = simulate_many(workload, tried, link)
        times.append(time.perf_counter() - begin)
    if len(found.step_ns) != configurations:
        raise RuntimeError(f"{len(found.step_ns)} predictions of {configurations} configurations")
    return {
        "seconds": statistics.median(times),
        "configurations": configurations,
        "buckets": buckets,
        "ranks": ranks,
    }


def words(found: dict[str, Any]) -> str:
    """One line."""
    return (
        f"{found['configurations']} configurations of {found['buckets']} buckets on {found['ranks']} ranks: "
        f"{found['seconds']:.2f} s"
    )
