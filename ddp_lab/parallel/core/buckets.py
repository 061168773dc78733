"""What a model's buckets are: frozen records for the user, a description for the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import agreement, arguments, process_groups
from .comm_hooks import hook_name

if TYPE_CHECKING:
    from .model_state import ModelState

__all__ = ["BucketInfo", "BucketTimes", "assignment", "buckets", "describe", "name_of_hook"]


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
        dtype: of its buffer, e.g. ``"float32"``; with mixed precision not that of the parameters.
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
            **_buffer([model._trained[i] for i in members], model.mixed_precision),
            rebuilt=model._has_rebuilt_buckets,
            generation=generation,
            times=_bucket_times(times[index]),
        )
        for index, members in enumerate(model._assignment)
    )


def _buffer(tensors: Sequence[torch.Tensor], mixed_precision: Any) -> dict[str, Any]:
    """Bytes, dtype and device of a bucket's buffer."""
    dtype = tensors[0].dtype
    if mixed_precision is not None:
        dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype or dtype
    return {
        "bytes": sum(tensor.numel() for tensor in tensors) * dtype.itemsize,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(tensors[0].device),
    }


def _bucket_times(times: tuple[int, ...]) -> BucketTimes | None:
    begin, *later = times
    return BucketTimes(*((moment - begin) / 1e6 for moment in later)) if begin else None


def assignment(model: ModelState) -> dict[str, Any]:
    """The description of the assignment that the model's next events refer to."""
    return describe(
        model._assignment,
        dict(zip(model._names, model._trained, strict=True)),
        model.process_group,
        model.mixed_precision,
        reducer=model.reducer_id,
        generation=model.reducer.generation(),
        first_step=model.reducer.step(),
        module=type(model.module).__name__,
        rebuilt=model._has_rebuilt_buckets,
        options=_options(model),
    )


def describe(
    buckets: Sequence[Sequence[int]],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    mixed_precision: Any = None,
    **facts: Any,
) -> dict[str, Any]:
    """The description of an assignment (see tutorials/site/descriptions.md).

    Args:
        buckets: for each bucket the indices of its parameters.
        parameters: by qualified name, in the order of registration.
        group: the model's process group.
        mixed_precision: the model's, None without.
        facts: what else it says.
    """
    tensors = list(parameters.values())
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return {
        "type": "assignment",
        "process_group": agreement.process_group_index(group),
        "group_ranks": process_groups.global_ranks(group),
        "backend": process_groups.backend_name(group),
        "parameters": [
            {
                "index": index,
                "name": name,
                "shape": list(tensor.shape),
                "numel": tensor.numel(),
                "bytes": sizes[index],
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": str(tensor.device),
            }
            for index, (name, tensor) in enumerate(parameters.items())
        ],
        "buckets": [
            {
                "bucket": bucket,
                **_buffer([tensors[index] for index in members], mixed_precision),
                "parameters": list(members),
            }
            for bucket, members in enumerate(buckets)
        ],
        **facts,
    }


def _options(model: ModelState) -> dict[str, Any]:
    """What the model was built with, as far as it decides what a step costs."""
    caps = model._caps
    return {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "batched_grad_copy": model.batched_grad_copy,
        "averages_in_place": model.reducer.sums_pieces() and not (model._comm_hooks or model.batched_grad_copy),
        "bucket_cap_mb": caps.others / arguments.MEBIBYTE,
        "bucket_cap_mb_list": [cap / arguments.MEBIBYTE for cap in caps.rebuilt()],
        "comm_hook": name_of_hook(model._comm_hooks),
    }


def name_of_hook(hooks: Sequence[tuple[Any, object]]) -> str | None:
    """The name of the comm hook that was registered last; None without one."""
    hook = hooks[-1][0] if hooks else None
    return None if hook is None else hook_name(hook) if callable(hook) else str(hook)
