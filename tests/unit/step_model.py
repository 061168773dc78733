"""Training steps made from a simple model of time, with known answers: gradients, buckets, a link, delays, copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.timeline import Timeline
from tests.unit.backwards import MS, Recorder, assignment


@dataclass(frozen=True)
class StepModel:
    """What a step does; times in ms, sizes in bytes.

    Attributes:
        gradients: how long each parameter's gradient takes, by parameter.
        sizes: bytes of each.
        buckets: parameters by bucket.
        order: in which the gradients come; None: as in the buckets.
        start, per_mb: time of a collective: ``start + per_mb * MB``.
        late: (rank, step) -> parameter -> extra time before its gradient.
        forward: (rank, step) -> time of the forward.
        unused: (rank, step) -> parameters without a gradient.
        handling, copy_per_mb: what taking in a gradient costs: before the bucket is ready.
        tail: from the last bucket's reduction to the end.
    """

    gradients: Sequence[float]
    sizes: Sequence[int]
    buckets: Sequence[Sequence[int]]
    order: Sequence[int] | None = None
    ranks: int = 2
    start: float = 0.1
    per_mb: float = 1.0
    late: Callable[[int, int], Mapping[int, float]] = lambda rank, step: {}
    forward: Callable[[int, int], float] = lambda rank, step: 1.0
    unused: Callable[[int, int], Collection[int]] = lambda rank, step: ()
    handling: float = 0.0
    copy_per_mb: float = 0.0
    tail: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def assignment(self, generation: int = 0, *, rebuilt: bool = True) -> dict[str, Any]:
        """The description of the buckets."""
        options = dict.fromkeys(("find_unused_parameters", "static_graph", "gradient_as_bucket_view"), False)
        options |= {"batched_grad_copy": False, "bucket_cap_mb": 25.0, "comm_hook": None}
        options["bucket_cap_mb_list"] = [max(self._bytes(b) for b in self.buckets) / 2**20]
        made = assignment(self.buckets, ranks=range(self.ranks), generation=generation, sizes=self.sizes)
        for one in made["parameters"]:
            one["name"] += ".weight"
        return made | {"rebuilt": rebuilt, "session": 1, "options": options | dict(self.options)}

    def record(self, steps: int = 20) -> Timeline:
        """The timeline of so many steps on all ranks."""
        timeline = Timeline()
        recorders = [Recorder(rank) for rank in range(self.ranks)]
        at = 1_000.0
        for rank in range(self.ranks):
            timeline.describe(rank, self.assignment())
        for step in range(steps):
            at = self._step(step, at, recorders)
        for recorder in recorders:
            timeline.extend(recorder.batch())
        return timeline

    def step_ms(self) -> float:
        """Time of a step."""
        return float(self.record().steps().step_ms.median())

    def _bytes(self, members: Sequence[int]) -> int:
        return sum(self.sizes[i] for i in members)

    def _step(self, step: int, at: float, recorders: Sequence[Recorder]) -> float:
        """Records a step that begins at `at`; returns when its last rank has ended."""
        arrived = [self._arrivals(rank, step, at) for rank in range(self.ranks)]
        launched = []
        for rank in range(self.ranks):
            moments, _ = arrived[rank]
            ready = [max(moments[i][1] for i in members) for members in self.buckets]
            launched.append([max(ready[: b + 1]) for b in range(len(ready))])
        free, reduced = 0.0, []
        for b, members in enumerate(self.buckets):
            free = max(free, *(of_rank[b] for of_rank in launched))
            free += self.start + self.per_mb * self._bytes(members) / 1e6
            reduced.append(free)
        ended = [max(computed, reduced[-1]) + self.tail for _, computed in arrived]
        for rank, recorder in enumerate(recorders):
            self._record_rank(recorder, rank, step, at, arrived[rank], launched[rank], reduced, ended[rank])
        return max(ended)

    def _arrivals(self, rank: int, step: int, at: float) -> tuple[dict[int, tuple[float, float]], float]:
        """Parameter -> when its gradient came and when it was taken in; when the computation was over."""
        now = begin = at + self.forward(rank, step)
        order = self.order or [i for members in self.buckets for i in members]
        moments, unused, late = {}, self.unused(rank, step), self.late(rank, step)
        for i in order:
            if i in unused:
                moments[i] = (0.0, begin)
                continue
            came = now + self.gradients[i] + late.get(i, 0.0)
            now = came + self.handling + self.copy_per_mb * self.sizes[i] / 1e6
            moments[i] = (came, now)
        return moments, now

    def _record_rank(
        self, recorder: Recorder, rank: int, step: int, at: float,
        arrived: tuple[dict[int, tuple[float, float]], float],
        launched: Sequence[float], reduced: Sequence[float], ended: float,
    ) -> None:  # fmt: skip
        moments, computed = arrived
        begin = at + self.forward(rank, step)
        facts: list[tuple[float, Kind, dict[str, int]]] = [
            (at, Kind.FORWARD_BEGIN, {}), (begin, Kind.FORWARD_END, {}), (begin, Kind.BACKWARD_BEGIN, {}),
            (computed, Kind.FINALIZE_BEGIN, {}), (ended, Kind.BACKWARD_END, {}),
        ]  # fmt: skip
        for b, members in enumerate(self.buckets):
            of_bucket = {"bucket": b, "bytes": self._bytes(members)}
            facts += [
                (moments[i][0], Kind.GRAD_READY, {**of_bucket, "parameter": i}) for i in members if moments[i][0] > 0
            ]
            facts += [
                (max(moments[i][1] for i in members), Kind.BUCKET_READY, of_bucket),
                (launched[b], Kind.BUCKET_LAUNCHED, of_bucket),
                (reduced[b], Kind.BUCKET_REDUCED, of_bucket),
            ]
        for when, kind, values in sorted(facts, key=lambda fact: fact[0]):
            recorder.record(kind, round(when * MS), reducer=0, process_group=0, step=step, **values)


class History:
    """A timeline of one model whose buckets are assigned anew now and then.

    Attributes:
        timeline: what the ranks sent.
        step: the number of the next step.
    """

    def __init__(self, ranks: int = 2) -> None:
        self.timeline, self.step = Timeline(), 0
        self._recorders = [Recorder(rank) for rank in range(ranks)]
        self._at = 1_000.0

    def assign(self, model: StepModel, generation: int, *, rebuilt: bool = True) -> None:
        """All ranks describe an assignment."""
        for recorder in self._recorders:
            self.timeline.describe(recorder.rank, model.assignment(generation, rebuilt=rebuilt))

    def train(self, model: StepModel, generation: int, steps: int) -> None:
        """All ranks train so many steps with it."""
        for _ in range(steps):
            self._at = model._step(self.step, self._at, self._recorders)
            self.step += 1
        self._send(generation)

    def abandon(self, generation: int) -> None:
        """All ranks begin a backward and give it up."""
        for recorder in self._recorders:
            for ms, kind in ((self._at, Kind.BACKWARD_BEGIN), (self._at + 1, Kind.ABANDONED)):
                recorder.record(kind, round(ms * MS), reducer=0, process_group=0, step=self.step)
        self.step, self._at = self.step + 1, self._at + 10_000
        self._send(generation)

    def mark(self, name: str) -> None:
        """Rank 0 marks this moment."""
        index = len(self.timeline.mark_names())
        self.timeline.describe(0, {"type": "mark", "index": index, "name": name, "session": 1})
        self._recorders[0].record(Kind.MARK, round((self._at + 0.5) * MS), parameter=index)
        self._at += 1
        self._send(0)

    def _send(self, generation: int) -> None:
        for recorder in self._recorders:
            batch = recorder.batch()
            batch.events["generation"] = generation
            self.timeline.extend(batch)
