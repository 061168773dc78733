"""What an event costs where it is recorded, and when it is known in the notebook.

A cluster of Gloo ranks trains workloads of `ddp-lab bench step` while its events stream to this process, as in a
notebook. Reported for each model: events a step, nanoseconds an event (measured in C++), their share of a step, the
step with recording on over off and over on again (alternating blocks), and for every event the time from its
happening to its arrival in the timeline. Then: from the end of a cell to its last event, and what telemetry takes of
a CPU while nothing happens.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count

if TYPE_CHECKING:
    from ddp_lab.cluster.cluster import Cluster
    from ddp_lab.protocol.events import Batch

MODELS = ("conv_net", "small_tensors", "mlp")
_IDLE_S = 3.0


class _Arrivals:
    """How old each event is when it arrives here (all processes of a host share one clock)."""

    def __init__(self, lab: Cluster) -> None:
        self._ages: list[np.ndarray[Any, Any]] = []
        lab.wire.on_batch(self._add)

    def _add(self, batch: Batch) -> None:
        self._ages.append(time.monotonic_ns() - batch.events["host_ns"])

    def take(self) -> np.ndarray[Any, Any]:
        """Ages in ms of everything that arrived since the last call."""
        ages, self._ages = self._ages, []
        return np.concatenate([np.zeros(0), *ages]) / 1e6


def measure(ranks: int = 2, rounds: int = 9, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Measures on a cluster of its own.

    Args:
        ranks: ranks of the cluster, on CPUs.
        rounds: blocks of each kind and model.
        models: which models.

    Returns:
        ``models``: name -> figures; ``cell_end_ms``; ``idle_cpu_percent`` of one core for a rank and the client.
    """
    import ddp_lab

    with ddp_lab.Cluster(ranks) as lab:
        arrivals = _Arrivals(lab)
        lab.run(
            "from ddp_lab.bench.measuring import recording_cost\nfrom tests.benchmarks import events as _bench_events"
        )
        found = {name: _of_model(lab, arrivals, name, rounds) for name in models}
        return {
            "ranks": ranks,
            "rounds": rounds,
            "models": found,
            "cell_end_ms": _cell_ends(lab),
            "idle_cpu_percent": _idle(lab),
            "dropped": sum(rank.dropped for rank in lab.timeline.ranks()),
        }


def _of_model(lab: Cluster, arrivals: _Arrivals, name: str, rounds: int) -> dict[str, float]:
    arrivals.take()
    told = _value(lab, f"recording_cost.in_turns({name!r}, {rounds})")
    ages = arrivals.take()
    return {
        "step_ms": told["on"],
        "events": told["events"],
        "ns": told["ns"],
        "share": told["events"] * told["ns"] / (told["on"] * 1e6),
        "on / off": told["on"] / told["off"],
        "on / on again": told["on"] / told["on again"],
        "arrival_p50_ms": float(np.percentile(ages, 50)),
        "arrival_p95_ms": float(np.percentile(ages, 95)),
        "arrivals": len(ages),
    }


def _value(lab: Cluster, expression: str) -> Any:
    """Rank 0's value, without the cell's output."""
    lab.run(f"_bench_value = {expression}")
    return lab.pull("_bench_value")[0]


def _cell_ends(lab: Cluster) -> float:
    """Median age of a cell's last event when the cell has returned (ms): it is on the timeline by then."""
    ages = []
    for _ in range(30):
        lab.run("ddp_lab.recording.mark('end')")
        newest = max(rank.last_event_ns for rank in lab.timeline.ranks())
        ages.append((time.monotonic_ns() - newest) / 1e6)
    return statistics.median(ages)


def _idle(lab: Cluster) -> dict[str, float]:
    """CPU time of a rank's telemetry threads and of this process's receiver thread while no cell runs."""
    pid, threads = _value(lab, "_bench_events.own_threads('ddp_lab-flusher', 'ddp_lab-control')")
    tasks = {
        "rank": [f"/proc/{pid}/task/{thread}/schedstat" for thread in threads],
        "client": [f"/proc/self/task/{thread}/schedstat" for thread in own_threads("ddp_lab-wire")[1]],
    }
    before = {who: _cpu_seconds(paths) for who, paths in tasks.items()}
    time.sleep(_IDLE_S)
    return {who: 100 * (_cpu_seconds(paths) - before[who]) / _IDLE_S for who, paths in tasks.items()}


def own_threads(*names: str) -> tuple[int, list[int]]:
    """This process's id and the native ids of its threads with these names."""
    found = [one.native_id for one in threading.enumerate() if one.name in names]
    return os.getpid(), [number for number in found if number is not None]


def _cpu_seconds(paths: Sequence[str]) -> float:
    return sum(int(Path(path).read_text().split()[0]) for path in paths) / 1e9  # the first number is nanoseconds


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{found['ranks']} Gloo ranks, events streaming, {found['rounds']} blocks of each kind",
        f"{'model':14} {'step ms':>8} {'events':>7} {'ns each':>8} {'share':>8} {'on/off':>7} {'on/on':>7}"
        f" {'arrival ms p50':>15} {'p95':>6}",
    ]
    for name, one in found["models"].items():
        lines.append(
            f"{name:14} {one['step_ms']:8.2f} {one['events']:7.0f} {one['ns']:8.1f} {100 * one['share']:7.3f}%"
            f" {one['on / off']:7.3f} {one['on / on again']:7.3f} {one['arrival_p50_ms']:15.1f}"
            f" {one['arrival_p95_ms']:6.1f}"
        )
    idle = found["idle_cpu_percent"]
    lines += [
        f"age of a cell's last event when the cell has returned, on the timeline: {found['cell_end_ms']:.1f} ms",
        f"idle: {idle['rank']:.2f} % of a core on a rank, {idle['client']:.2f} % in the client",
        f"dropped: {found['dropped']}",
    ]
    return "\n".join(lines)


OPTIONS = (
    option("--ranks", type=count),
    option("--rounds", type=count, help="blocks of each kind and model"),
    option("--models", nargs="+", choices=MODELS),
)
