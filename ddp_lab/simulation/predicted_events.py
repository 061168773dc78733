"""A prediction as the events that it would have recorded, so that every view shows it like a real step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..protocol.events import DTYPE, Batch, Kind
from .simulator import Prediction
from .workload import Workload

__all__ = ["batches", "description"]

_Fact = tuple[int, Kind, int, int, int]  # time, kind, bucket, parameter, bytes
_NONE = -1


def description(workload: Workload, predicted: Prediction, *, module: str, generation: int = 0) -> dict[str, Any]:
    """The assignment, as a rank describes it (see tutorials/site/descriptions.md)."""
    dtypes = [key if isinstance(key, str) else str(key[0]) for key in workload.keys]  # type: ignore[index]
    devices = ["cpu" if isinstance(key, str) else str(key[1]) for key in workload.keys]  # type: ignore[index]
    sizes = workload.sizes.tolist()
    return {
        "type": "assignment",
        "reducer": 0,
        "generation": generation,
        "first_step": 0,
        "process_group": 0,
        "group_ranks": list(range(workload.ranks)),
        "backend": "simulated",
        "module": module,
        "parameters": [
            {"index": i, "name": name, "shape": [sizes[i]], "numel": sizes[i], "bytes": sizes[i]}
            | {"dtype": dtypes[i], "device": devices[i]}
            for i, name in enumerate(workload.names)
        ],
        "buckets": [
            {"bucket": b, "bytes": int(predicted.bytes[b]), "parameters": list(members)}
            | {"dtype": dtypes[members[0]], "device": devices[members[0]]}
            for b, members in enumerate(predicted.buckets)
        ],
        "rebuilt": True,
    }


def batches(workload: Workload, predicted: Prediction, *, steps: int = 2) -> list[Batch]:
    """One batch for each rank with `steps` equal steps (times between steps need two)."""
    made = []
    for rank in range(workload.ranks):
        events = [_array(_facts(workload, predicted, rank), step, predicted.step_ns) for step in range(steps)]
        joined = np.concatenate(events)
        joined["sequence"] = np.arange(len(joined))
        made.append(Batch(rank, 1, 0, 0, joined))
    return made


def _facts(workload: Workload, predicted: Prediction, rank: int) -> list[_Fact]:
    begin = predicted.begin_ns[rank]
    facts: list[_Fact] = [
        (_ns(begin - workload.forward_ns[rank]), Kind.FORWARD_BEGIN, _NONE, _NONE, _NONE),
        (_ns(begin), Kind.FORWARD_END, _NONE, _NONE, _NONE),
        (_ns(begin), Kind.BACKWARD_BEGIN, _NONE, _NONE, _NONE),
        (_ns(predicted.computed_ns[rank]), Kind.FINALIZE_BEGIN, _NONE, _NONE, _NONE),
        (_ns(predicted.end_ns[rank]), Kind.BACKWARD_END, _NONE, _NONE, _NONE),
    ]
    for bucket, members in enumerate(predicted.buckets):
        size = int(predicted.bytes[bucket])
        for index in members:
            at = _ns(predicted.gradients_ns[rank, index])
            facts.append((at, Kind.GRAD_READY, bucket, index, int(workload.sizes[index])))
        facts += [
            (_ns(predicted.ready_ns[rank, bucket]), Kind.BUCKET_READY, bucket, _NONE, size),
            (_ns(predicted.launched_ns[rank, bucket]), Kind.BUCKET_LAUNCHED, bucket, _NONE, size),
            (_ns(predicted.reduced_ns[bucket]), Kind.BUCKET_REDUCED, bucket, _NONE, size),
        ]
    return sorted(facts, key=lambda fact: fact[:2])


def _ns(time: float) -> int:
    return round(float(time)) + 1  # 0 means missing


def _array(facts: Sequence[_Fact], step: int, step_ns: float) -> npt.NDArray[np.void]:
    made = np.zeros(len(facts), DTYPE)
    time, kind, bucket, parameter, size = zip(*facts, strict=True)
    made["host_ns"] = np.array(time) + round(step * step_ns)
    made["kind"], made["bucket"], made["parameter"], made["bytes"] = kind, bucket, parameter, size
    made["step"] = step
    return made
