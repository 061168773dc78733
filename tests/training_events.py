"""Events of training steps as ranks record them, for tests of what reads events: made from a simple model of time.

Every rank's backward takes the same time except where `Training.delays` says otherwise; buckets are launched in
order, and a collective begins when the last rank has launched it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddp_lab.protocol.events import DTYPE, Batch, Kind
from ddp_lab.timeline.timeline import Timeline


@dataclass
class Training:
    """A model's buckets on some ranks, and how long things take (milliseconds).

    Attributes:
        forward_ms: of the forward that ends where the backward begins; 0: no forward is recorded.
        delays: (rank, bucket) -> extra milliseconds before that bucket's gradients, on that rank alone.
    """

    ranks: int = 2
    buckets: int = 3
    parameters: int = 4
    reducer: int = 0
    compute_ms: float = 4.0
    forward_ms: float = 0.0
    reduce_ms: float = 1.2
    bucket_bytes: int = 1 << 20
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._sequence = [0] * self.ranks

    def assignment(self) -> dict[str, Any]:
        """Returns the description that each rank sends before its first step."""
        elements = self.bucket_bytes // 4 // self.parameters
        of_all = {"dtype": "float32", "device": "cpu"}
        parameter = of_all | {"numel": elements, "bytes": elements * 4}
        shapes = ([64, elements // 64], [elements])
        names = [f"layers.{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(self.buckets * self.parameters)]
        members = [list(range(b * self.parameters, (b + 1) * self.parameters)) for b in range(self.buckets)]
        made = {"type": "assignment", "reducer": self.reducer, "generation": 0, "first_step": 0, "process_group": 0}
        made |= {"group_ranks": list(range(self.ranks)), "backend": "gloo", "module": "DigitsNet", "rebuilt": False}
        made["parameters"] = [
            parameter | {"index": index, "name": name, "shape": shapes[index % 2]} for index, name in enumerate(names)
        ]
        made["buckets"] = [
            of_all | {"bucket": bucket, "bytes": self.bucket_bytes, "parameters": its}
            for bucket, its in enumerate(members)
        ]
        return made

    def step(self, step: int, begin_ns: int | None = None) -> list[np.ndarray]:
        """Returns the events of one step, an array for each rank in the order of time."""
        begin = time.monotonic_ns() if begin_ns is None else begin_ns
        shape = (self.ranks, self.buckets, self.parameters)
        gaps = self.compute_ms / (self.buckets * self.parameters) * self._random.uniform(0.6, 1.4, shape)
        for (rank, bucket), extra in self.delays.items():
            gaps[rank, bucket, 0] += extra
        starts = self._random.uniform(0, 0.2, self.ranks)
        gradients = starts[:, None] + np.cumsum(gaps.reshape(self.ranks, -1), axis=1)
        ready = gradients.reshape(shape)[:, :, -1]
        launched = np.maximum.accumulate(ready, axis=1) + 0.01
        reduced = np.zeros(self.buckets)
        free = 0.0
        for bucket in range(self.buckets):
            free = max(free, float(launched[:, bucket].max())) + self.reduce_ms * float(self._random.uniform(0.8, 1.2))
            reduced[bucket] = free
        made = []
        for rank in range(self.ranks):
            facts: list[tuple[float, Kind, int, int]] = [(starts[rank], Kind.BACKWARD_BEGIN, -1, -1)]
            if self.forward_ms:
                before = starts[rank] - self.forward_ms
                facts += [(before, Kind.FORWARD_BEGIN, -1, -1), (starts[rank] - 0.001, Kind.FORWARD_END, -1, -1)]
            for index, at in enumerate(gradients[rank]):
                facts.append((at, Kind.GRAD_READY, index // self.parameters, index))
            for bucket in range(self.buckets):
                facts.append((ready[rank, bucket] + 0.001, Kind.BUCKET_READY, bucket, -1))
                facts.append((launched[rank, bucket], Kind.BUCKET_LAUNCHED, bucket, -1))
                facts.append((reduced[bucket] + 0.01 * rank, Kind.BUCKET_REDUCED, bucket, -1))
            computed = gradients[rank, -1] + 0.05
            facts.append((computed, Kind.FINALIZE_BEGIN, -1, -1))
            facts.append((max(computed, reduced[-1]) + 0.1, Kind.BACKWARD_END, -1, -1))
            made.append(self._encode(rank, step, begin, sorted(facts)))
        return made

    def feed(self, timeline: Timeline, step: int, begin_ns: int | None = None) -> None:
        """Hands one step of all ranks to a timeline (and before the first one, the assignment)."""
        if step == 0:
            for rank in range(self.ranks):
                timeline.describe(rank, {**self.assignment(), "session": 1})
                timeline.set_status(rank, {"state": "running", "pid": 4_000 + rank, "session": 1})
        for rank, events in enumerate(self.step(step, begin_ns)):
            timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))

    def trained(self, steps: int, *, ms: float = 10.0, timeline: Timeline | None = None) -> Timeline:
        """Hands so many steps, one every `ms`, to a timeline (a new one by default), and returns it."""
        made = timeline or Timeline()
        for step in range(steps):
            self.feed(made, step, 10**12 + round(step * ms * 1e6))
        return made

    def timeline(self, *chunks: tuple[int, np.ndarray]) -> Timeline:
        """Returns a timeline that has the assignment and these events: pairs of rank and events, renumbered."""
        made = Timeline()
        for rank in range(self.ranks):
            made.describe(rank, {**self.assignment(), "session": 1})
        append(made, *chunks)
        return made

    def _encode(self, rank: int, step: int, begin: int, facts: list[tuple[float, Kind, int, int]]) -> np.ndarray:
        """Returns the facts as events of one rank."""
        events = np.zeros(len(facts), DTYPE)
        events["sequence"] = self._sequence[rank] + np.arange(len(facts))
        self._sequence[rank] += len(facts)
        events["host_ns"] = [begin + int(at * 1e6) for at, *_ in facts]
        events["kind"] = [kind for _, kind, *_ in facts]
        events["bucket"] = [bucket for *_, bucket, _ in facts]
        events["parameter"] = [parameter for *_, parameter in facts]
        events["bytes"] = np.where(events["kind"] == Kind.BUCKET_LAUNCHED, self.bucket_bytes, -1)
        events["step"], events["reducer"], events["process_group"] = step, self.reducer, 0
        return events


def append(timeline: Timeline, *chunks: tuple[int, np.ndarray]) -> None:
    """Hands events to a timeline as the next ones of their ranks."""
    for rank, events in chunks:
        known = {one.rank: one for one in timeline.ranks()}[rank]
        timeline.extend(Batch(rank, known.session, known.events + known.dropped, 0, events))
