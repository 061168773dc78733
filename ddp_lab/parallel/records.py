"""What a model's buckets are: frozen records for the user, a description for the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import arguments, verify
from .comm_hooks import hook_name

if TYPE_CHECKING:
    from .model_state import ModelState

__all__ = ["BucketInfo", "BucketTimes", "assignment", "buckets"]


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket's way through one backward happened, in milliseconds from the backward's begin.

    Attributes:
        first_ready_ms: the first gradient of the bucket was ready.
        ready_ms: the last one was.
        launched_ms: its collective was started.
        reduced_ms: its collective was complete, as the host sees it.
        backward_ms: the whole backward, until every bucket was written back.
    """

    first_ready_ms: float
    ready_ms: float
    launched_ms: float
    reduced_ms: float
    backward_ms: float


@dataclass(frozen=True)
class BucketInfo:
    """One bucket of a model.

    Attributes:
        index: its place in the order of launch, the same on all ranks.
        parameters: qualified names of the parameters whose gradients travel in it, in buffer order.
        bytes: size of its buffer.
        dtype: e.g. ``"float32"``.
        device: e.g. ``"cuda:0"``.
        rebuilt: whether the order of readiness (after the first backward) decided the assignment.
        generation: number of the assignment, 0 for the first; events carry it.
        times: of the last backward that finished; None if there was none with this assignment.
    """

    index: int
    parameters: tuple[str, ...]
    bytes: int
    dtype: str
    device: str
    rebuilt: bool
    generation: int
    times: BucketTimes | None


def buckets(model: ModelState) -> tuple[BucketInfo, ...]:
    """See `DistributedDataParallel.buckets`."""
    times = model.reducer.bucket_times()
    generation = model.reducer.generation()
    return tuple(
        BucketInfo(
            index=index,
            parameters=tuple(model._names[i] for i in members),
            bytes=sum(model._sizes[i] for i in members),
            dtype=str(model._keys[members[0]][0]).removeprefix("torch."),
            device=str(model._keys[members[0]][1]),
            rebuilt=model._has_rebuilt_buckets,
            generation=generation,
            times=_bucket_times(times[index]),
        )
        for index, members in enumerate(model._assignment)
    )


def _bucket_times(times: tuple[int, ...]) -> BucketTimes | None:
    begin, *later = times
    return BucketTimes(*((moment - begin) / 1e6 for moment in later)) if begin else None


def assignment(model: ModelState) -> dict[str, Any]:
    """The description of the assignment that the model's next events refer to."""
    parameters = [
        {
            "index": index,
            "name": name,
            "shape": list(parameter.shape),
            "numel": parameter.numel(),
            "bytes": model._sizes[index],
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
        }
        for index, (name, parameter) in enumerate(zip(model._names, model._trained, strict=True))
    ]
    return {
        "type": "assignment",
        "reducer": model.reducer_id,
        "generation": model.reducer.generation(),
        "first_step": model.reducer.step(),
        "process_group": verify.process_group_index(model.process_group),
        "group_ranks": dist.get_process_group_ranks(model.process_group),
        "backend": str(dist.get_backend(model.process_group)),
        "module": type(model.module).__name__,
        "parameters": parameters,
        "buckets": [
            {
                "bucket": info.index,
                "bytes": info.bytes,
                "dtype": info.dtype,
                "device": info.device,
                "parameters": model._assignment[info.index],
            }
            for info in buckets(model)
        ],
        "rebuilt": model._has_rebuilt_buckets,
        "options": _options(model),
    }


def _options(model: ModelState) -> dict[str, Any]:
    """What the model was built with, as far as it decides what a step costs."""
    caps = model._caps
    hook = model._comm_hooks[-1][0] if model._comm_hooks else None
    return {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "batched_grad_copy": model.batched_grad_copy,
        "bucket_cap_mb": caps.others / arguments.MEBIBYTE,
        "bucket_cap_mb_list": [cap / arguments.MEBIBYTE for cap in caps.rebuilt()],
        "comm_hook": None if hook is None else hook_name(hook) if callable(hook) else str(hook),
    }
