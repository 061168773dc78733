"""Stragglers where more ranks than cores compute: `python -m tests.ranks.monitoring.busy_stragglers [--runs 50]`.

Three ranks on two cores train a few seconds in each run. In half of the runs one rank sleeps 4 ms before its forward,
in the others before the gradients of one layer. Is it named, and is advice on communication given in its place?
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from ddp_lab.bench.measuring import fresh_ranks
from ddp_lab.dashboard.live import ViewFacts
from ddp_lab.timeline.timeline import Timeline
from tests.benchmarks import stragglers
from tests.benchmarks.stragglers import Delay

RANKS, CORES, LAYER, MS, BATCH = 3, 2, 5, 4.0, 256
COMMUNICATION = ("communication-bound", "bucket-too-small", "bucket-too-big", "first-bucket-late")


@dataclass(frozen=True)
class OnCores:
    """Has a rank's process compute on the first cores alone."""

    count: int

    def __call__(self, rank: int) -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.count])


def judged(timeline: Timeline, delay: Delay | None) -> dict[str, Any]:
    """What findings, the view of stragglers and the summary say of one run."""
    found, late = timeline.findings(), timeline.stragglers()
    facts = ViewFacts(timeline)
    facts.look("page", ["findings", "stragglers"], None)
    seen = facts.update(force=True)
    summary = timeline.summary()
    named = [one.rank for one in found if one.kind == "straggler"]
    advice = [one for one in found if one.kind in COMMUNICATION]
    first = next(iter(found), None)
    return {
        "rank": None if delay is None else delay.rank,
        "named": named,
        "strength": [one.where for one in late],
        "advice": [one.kind for one in advice],
        "first": first.kind if first else None,
        "step_ms": float(timeline.workload().step_ns or 0) / 1e6,
        "agree": {one.rank for one in late if one.cost_percent >= 0.5} == set(named)
        and [one["title"] for block in seen["findings"]["blocks"] for one in block.get("advice", ())]
        == [one.title for one in found]
        and (not late or f"ank {late[0].rank} " in seen["stragglers"]["blocks"][0]["text"])
        and (first is None or first.gain_percent < 2 or first.title in summary),
    }


def _run(delays: list[Delay | None], steps: int) -> list[dict[str, Any]]:
    timelines = stragglers.train(delays, steps, BATCH)
    return [judged(one, delay) for one, delay in zip(timelines, delays, strict=False)]


def measure(runs: int, steps: int = 100, ms: float = MS) -> list[dict[str, Any]]:
    """One record for each run: see `judged`; without a delay if `ms` is 0."""
    delays = [Delay(run % RANKS, LAYER if run % 2 else -1, ms) if ms else None for run in range(runs)]
    found: list[dict[str, Any]] = fresh_ranks.run(_run, delays, steps, ranks=RANKS, prepare=OnCores(CORES))
    return found


def counts(found: list[dict[str, Any]]) -> dict[str, int]:
    """How many runs named the rank, had advice on communication in its place, named another one, contradicted."""
    return {
        "runs": len(found),
        "named": sum(one["rank"] in one["named"] for one in found),
        "with a place": sum(one["rank"] in one["named"] and one["strength"] != ["varying"] for one in found),
        "advice in its place": sum(one["rank"] not in one["named"] and bool(one["advice"]) for one in found),
        "others named": sum(bool(set(one["named"]) - {one["rank"]}) for one in found),
        "contradictions": sum(not one["agree"] for one in found),
    }


def main() -> None:
    """Prints the figures of runs with and without a delay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    for ms in (MS, 0.0):
        found = measure(given.runs, given.steps, ms)
        steps = sorted(one["step_ms"] for one in found)
        print(f"delay of {ms:g} ms: {counts(found)}; steps of {steps[0]:.0f} to {steps[-1]:.0f} ms", flush=True)
        for one in found:
            if ms and one["rank"] not in one["named"]:
                print("   not named:", one)


if __name__ == "__main__":
    main()
