"""How long `Timeline.to_perfetto` takes to write a run, and how large the file is.

The events are made up, as ranks record them: a second of them takes no training. Times are those of one process.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count
from ddp_lab.protocol.events import DTYPE, Batch, Kind
from ddp_lab.timeline.timeline import Timeline

_MS = 1_000_000
_STEP_MS = 20


def describe(ranks: int, buckets: int, parameters: int) -> dict[str, Any]:
    """What each rank says of such a model, with equal parameters spread over the buckets."""
    bucket_of = np.arange(parameters) * buckets // parameters
    names = [{"index": i, "name": f"layers.{i}.weight", "numel": 2500, "bytes": 10_000} for i in range(parameters)]
    held = [np.flatnonzero(bucket_of == bucket).tolist() for bucket in range(buckets)]
    return {
        "type": "assignment", "reducer": 0, "generation": 0, "first_step": 0, "process_group": 0, "session": 1,
        "group_ranks": list(range(ranks)), "backend": "gloo", "module": "Net", "parameters": names, "rebuilt": True,
        "buckets": [{"bucket": b, "bytes": 10_000 * len(of), "parameters": of} for b, of in enumerate(held)],
    }  # fmt: skip


def make_timeline(ranks: int, steps: int, buckets: int, parameters: int) -> Timeline:
    """A timeline of equal steps.

    Args:
        ranks: how many.
        steps: of each rank.
        buckets: of the model.
        parameters: in all, spread over the buckets.
    """
    timeline = Timeline(max_steps=steps, max_events=1 << 40)
    bucket_of = np.arange(parameters) * buckets // parameters
    described = describe(ranks, buckets, parameters)
    for rank in range(ranks):
        timeline.describe(rank, described)
        one = one_step(bucket_of, rank)
        events = np.tile(one, steps)
        number = np.repeat(np.arange(steps), len(one))
        events["step"] = number
        events["host_ns"] += number * _STEP_MS * _MS
        events["sequence"] = np.arange(len(events))
        timeline.extend(Batch(rank, 1, 0, 0, events))
    return timeline


def one_step(bucket_of: npt.NDArray[np.int64], rank: int) -> npt.NDArray[np.void]:
    """Events of one step in the order of time: gradients over 10 ms, each bucket reduced 3 ms after its last one."""
    arrived = (1 + 10 * (np.arange(len(bucket_of)) + 1) / len(bucket_of)) * _MS + rank * 1_000
    facts = [(0.0, Kind.FORWARD_BEGIN, -1, -1), (0.9 * _MS, Kind.FORWARD_END, -1, -1)]
    facts += [(1.0 * _MS, Kind.BACKWARD_BEGIN, -1, -1), (11.5 * _MS, Kind.FINALIZE_BEGIN, -1, -1)]
    facts += [(at, Kind.GRAD_READY, int(bucket_of[i]), i) for i, at in enumerate(arrived.tolist())]
    for bucket in np.unique(bucket_of).tolist():
        last = float(arrived[bucket_of == bucket].max())
        facts += [(last + 500, Kind.BUCKET_READY, bucket, -1), (last + 900, Kind.BUCKET_LAUNCHED, bucket, -1)]
        facts += [(last + 3 * _MS, Kind.BUCKET_REDUCED, bucket, -1)]
    facts.append((15.0 * _MS, Kind.BACKWARD_END, -1, -1))
    events = np.zeros(len(facts), DTYPE)
    for row, (at, kind, bucket, parameter) in enumerate(sorted(facts, key=lambda fact: fact[0])):
        values = (row, _MS + round(at), 0, 0, 10_000, 0, 0, 0, bucket, parameter, int(kind), 0, 0, 0)
        events[row] = values
    return events


def measure(ranks: int = 8, steps: int = 1_000, buckets: int = 10, parameters: int = 100) -> dict[str, Any]:
    """Writes the trace once.

    Returns:
        What was asked for, ``seconds`` (wall time), ``cpu_seconds``, ``megabytes`` and ``events`` of the file.
    """
    timeline = make_timeline(ranks, steps, buckets, parameters)
    with tempfile.TemporaryDirectory() as folder:
        began, cpu = time.perf_counter(), time.process_time()
        path = timeline.to_perfetto(Path(folder) / "trace.json")
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        size = path.stat().st_size
        count = len(json.loads(path.read_text())["traceEvents"])
    asked = {"ranks": ranks, "steps": steps, "buckets": buckets, "parameters": parameters}
    return asked | {"seconds": seconds, "cpu_seconds": cpu, "megabytes": size / 1e6, "events": count}


def table(found: dict[str, Any]) -> str:
    """The figures as a line."""
    return (
        f"{found['ranks']} ranks, {found['steps']} steps, {found['buckets']} buckets, {found['parameters']} parameters"
        f": {found['events']:,} trace events, {found['megabytes']:.0f} MB, written in {found['seconds']:.1f} s "
        f"(CPU {found['cpu_seconds']:.1f} s)"
    )


OPTIONS = [option(f"--{name}", type=count) for name in ("ranks", "steps", "buckets", "parameters")]
