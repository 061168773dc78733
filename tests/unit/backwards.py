"""Events of backwards with chosen times, as a rank's recorder would hand them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddp_lab.protocol.events import DTYPE, Batch, Kind

MS = 1_000_000


def rows(*facts: Mapping[str, Any], first: int = 0) -> np.ndarray:
    """Events with these fields and consecutive sequence numbers; what is not given is -1, of times 0."""
    made = np.zeros(len(facts), DTYPE)
    for name in ("bytes", "step", "reducer", "process_group", "bucket", "parameter"):
        made[name] = -1
    made["sequence"] = first + np.arange(len(facts))
    for row, fact in zip(made, facts, strict=True):
        for name, value in fact.items():
            row[name] = value
    return made


@dataclass
class Recorder:
    """Collects events of one rank with consecutive sequence numbers."""

    rank: int = 0
    session: int = 1
    next: int = 0
    _events: list[dict[str, int]] = field(default_factory=list)

    def record(self, kind: Kind, at: int, **fields: int) -> None:
        self._events.append({"sequence": self.next, "host_ns": at, "kind": kind, **fields})
        self.next += 1

    def batch(self, dropped: int = 0) -> Batch:
        """What was recorded since the last batch."""
        events, self._events = rows(*self._events), []
        return Batch(self.rank, self.session, self.next - len(events), dropped, events)

    def backward(self, step: int, begin: int, buckets: Sequence[Bucket], finalize: int, **fields: int) -> None:
        """One backward of one forward that takes a millisecond; times in ms from `begin` (ns)."""
        common = {"reducer": 0, "process_group": 0, **fields, "step": step}
        self.record(Kind.FORWARD_BEGIN, begin - MS, **common)
        self.record(Kind.FORWARD_END, begin, **common)
        self.record(Kind.BACKWARD_BEGIN, begin, **common)
        facts = []
        for number, bucket in enumerate(buckets):
            of_bucket = {**common, "bucket": number, "bytes": bucket.bytes}
            facts += [
                (at, Kind.GRAD_READY, {**of_bucket, "parameter": p})
                for p, at in zip(bucket.parameters, bucket.gradients, strict=True)
            ]
            facts += [
                (bucket.gradients[-1], Kind.BUCKET_READY, of_bucket),
                (bucket.launched, Kind.BUCKET_LAUNCHED, of_bucket),
                (bucket.reduced, Kind.BUCKET_REDUCED, of_bucket),
            ]
        facts.append((finalize, Kind.FINALIZE_BEGIN, common))
        facts.append((max([finalize, *(b.reduced for b in buckets)]), Kind.BACKWARD_END, common))
        for at, kind, values in sorted(facts, key=lambda fact: fact[0]):
            self.record(kind, begin + round(at * MS), **values)


@dataclass(frozen=True)
class Bucket:
    """Times of one bucket in ms from the backward's begin."""

    gradients: tuple[float, ...]
    launched: float
    reduced: float
    parameters: tuple[int, ...] = ()
    bytes: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.parameters:
            object.__setattr__(self, "parameters", tuple(range(len(self.gradients))))


def assignment(
    buckets: Sequence[Sequence[int]],
    *,
    ranks: Sequence[int] = (0, 1),
    reducer: int = 0,
    generation: int = 0,
    sizes: Sequence[int] = (),
) -> dict[str, Any]:
    """An assignment's description; parameters are called layer0, layer1, ... and have `sizes`, in bytes."""
    indices = sorted(index for bucket in buckets for index in bucket)
    made = {"type": "assignment", "reducer": reducer, "generation": generation, "first_step": 0, "process_group": 0}
    made |= {"group_ranks": list(ranks), "backend": "gloo", "module": "Net", "rebuilt": generation > 0}
    made["parameters"] = [{"index": i, "name": f"layer{i}", "numel": 1, "bytes": 4} for i in indices]
    made["buckets"] = [{"bucket": b, "bytes": 1_000_000, "parameters": list(p)} for b, p in enumerate(buckets)]
    if sizes:
        of_all = {"dtype": "float32", "device": "cpu"}
        for one, size in zip(made["parameters"], sizes, strict=True):
            one |= of_all | {"shape": [size // 4], "numel": size // 4, "bytes": size}
        for one in made["buckets"]:
            one |= of_all | {"bytes": sum(sizes[index] for index in one["parameters"])}
    return made
