"""How long a timeline of a million events takes to answer.

The events are made up, as ranks record and send them: one batch for each rank and step. Before each question one more
step arrives, as in a live view; the first question after everything arrived at once is told apart.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ddp_lab.bench.measuring.command import option
from ddp_lab.command_line import count
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.timeline.timeline import Timeline
from tests.benchmarks.trace import describe, one_step

_STEP_NS = 20_000_000
_JITTER_NS = 20_000  # less than what lies between two gradients: their order stays

_Question = Callable[[Timeline], object]
_QUESTIONS: dict[str, _Question] = {
    "spans()": lambda timeline: timeline.spans(),
    "spans(last_steps=100)": lambda timeline: timeline.spans(last_steps=100),
    "steps()": lambda timeline: timeline.steps(),
    "all_reduces()": lambda timeline: timeline.all_reduces(),
    "summary()": lambda timeline: timeline.summary(),
    "stragglers()": lambda timeline: timeline.stragglers(),
    "findings()": lambda timeline: timeline.findings(),
    "views()": lambda timeline: timeline.views(),
    "columns()": lambda timeline: timeline.columns(),
    "marks()": lambda timeline: timeline.marks(),
    "reducers(), ranks()": lambda timeline: (timeline.reducers(), timeline.ranks()),
}


def batches(ranks: int, buckets: int, parameters: int, first: int, steps: int, seed: int = 0) -> Iterator[Batch]:
    """One batch for each rank and step, step by step.

    Args:
        ranks: how many.
        buckets: of the model.
        parameters: in all, spread over the buckets.
        first: the first step.
        steps: how many.
        seed: of the jitter of the gradients' times.
    """
    random = np.random.default_rng(seed)
    bucket_of = np.arange(parameters) * buckets // parameters
    usual = [one_step(bucket_of, rank) for rank in range(ranks)]
    for step in range(first, first + steps):
        for rank, events in enumerate(usual):
            made = events.copy()
            made["step"] = step
            made["host_ns"] += step * _STEP_NS
            gradients = made["kind"] == Kind.GRAD_READY
            made["host_ns"][gradients] += random.integers(0, _JITTER_NS, int(gradients.sum()))
            made["sequence"] += step * len(made)
            yield Batch(rank, 1, step * len(made), 0, made)


def measure(
    ranks: int = 8, buckets: int = 50, parameters: int = 400, events: int = 1_000_000, repeats: int = 9
) -> dict[str, Any]:
    """Fills a timeline and asks it everything.

    Returns:
        What was asked for; ``steps``; ``megabytes`` and ``megabytes_after`` (what the timeline has allocated, before
        and after the questions); ``append_us`` (per batch);
        ``questions``: for each ``first_ms``; of those that follow one more step each ``median_ms``, ``worst_ms``
        and ``cpu_ms`` (median of the thread's own time: what is left on a busy machine).
    """
    of_step = 4 + parameters + 3 * buckets + 1
    steps = max(10, events // (ranks * of_step))

    def filled() -> Timeline:
        made = Timeline()
        for rank in range(ranks):
            made.describe(rank, describe(ranks, buckets, parameters))
        for batch in batches(ranks, buckets, parameters, 0, steps):
            made.extend(batch)
        return made

    megabytes, after = _memory(filled)
    timeline = filled()
    more = batches(ranks, buckets, parameters, steps, (len(_QUESTIONS) + 1) * (repeats + 1), seed=1)
    appended: list[float] = []
    cursor = [timeline.since(0)[1]]

    def arrive() -> None:
        for _ in range(ranks):
            batch = next(more)
            begin = time.perf_counter()
            timeline.extend(batch)
            appended.append(time.perf_counter() - begin)

    def new_events(asked: Timeline) -> None:
        cursor[0] = asked.since(cursor[0])[1]

    found = {}
    for name, question in {**_QUESTIONS, "since(cursor)": new_events}.items():
        times, busy = [], []
        for _ in range(repeats + 1):
            arrive()
            begin, cpu = time.perf_counter(), time.thread_time()
            question(timeline)
            times.append((time.perf_counter() - begin) * 1e3)
            busy.append((time.thread_time() - cpu) * 1e3)
        found[name] = {
            "first_ms": times[0],
            "median_ms": statistics.median(times[1:]),
            "worst_ms": max(times[1:]),
            "cpu_ms": statistics.median(busy[1:]),
        }
    asked = {"ranks": ranks, "buckets": buckets, "parameters": parameters, "events": steps * ranks * of_step}
    return asked | {
        "steps": steps,
        "megabytes": megabytes,
        "megabytes_after": after,
        "append_us": statistics.median(appended) * 1e6,
        "questions": found,
    }


def _memory(filled: Callable[[], Timeline]) -> tuple[float, float]:
    """Megabytes that a timeline has allocated, before and after it was asked everything."""
    Timeline().spans()  # imports pandas
    tracemalloc.start()
    timeline = filled()
    before = tracemalloc.get_traced_memory()[0]
    for question in _QUESTIONS.values():
        question(timeline)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return before / 1e6, after / 1e6


def table(found: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{found['events']:,} events: {found['ranks']} ranks, {found['buckets']} buckets, {found['parameters']} "
        f"parameters, {found['steps']} steps; {found['megabytes']:.0f} MB, "
        f"{found['megabytes_after']:.0f} MB after these questions; a batch of one step is appended in "
        f"{found['append_us']:.0f} µs",
        f"{'question':24}{'first':>10}{'median':>10}{'worst':>10}{'CPU':>10}  (ms; one more step arrives before each)",
    ]
    for name, one in found["questions"].items():
        lines.append(
            f"{name:24}{one['first_ms']:10.1f}{one['median_ms']:10.1f}{one['worst_ms']:10.1f}{one['cpu_ms']:10.1f}"
        )
    return "\n".join(lines)


OPTIONS = (
    *(option(f"--{name}", type=count) for name in ("ranks", "buckets", "parameters", "events")),
    option("--repeats", type=count, help="questions of each kind after the first"),
)
