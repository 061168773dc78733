"""The constructor's arguments: which are taken, what they are checked for, what is refused for now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = [
    "NOT_YET",
    "bucket_caps",
    "buffer_sync",
    "check_module",
    "not_yet_method",
    "refuse_methods",
    "refuse_unsupported",
    "resolve_devices",
    "resolve_group",
]

Devices = Sequence[int | torch.device | str] | None

MEBIBYTE = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25

# argument -> the value that asks for nothing
NOT_YET: dict[str, Any] = {
    "find_unused_parameters": False,
    "static_graph": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
}

# Methods inherited from torch's class that work on torch's own reducer.
_TORCH_REDUCER_METHODS = (
    "__getstate__",
    "__setstate__",
    "_get_ddp_logging_data",
    "_register_buffer_comm_hook",
    "_register_fused_optim",
    "_set_ddp_runtime_logging_sample_rate",
    "_set_sparse_metadata",
    "_set_static_graph",
    "join",
    "join_hook",
)


def refuse_unsupported(**given: Any) -> None:
    """Raises NotImplementedError naming the first argument of `NOT_YET` that asks for something."""
    for name, value in given.items():
        if value is not NOT_YET[name] and bool(value) != bool(NOT_YET[name]):
            raise NotImplementedError(
                f"DistributedDataParallel: the argument {name} is not supported yet (got {value!r}); "
                f"leave it at {NOT_YET[name]!r}, or use torch.nn.parallel.DistributedDataParallel"
            )


def refuse_methods(cls: type) -> None:
    """Replaces the inherited methods that need torch's reducer by ones that say so."""
    for name in _TORCH_REDUCER_METHODS:
        if hasattr(TorchDDP, name):
            setattr(cls, name, not_yet_method(name))


def not_yet_method(name: str) -> Callable[..., Any]:
    """A method that raises NotImplementedError with its own name."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = "copying and pickling (wrap a copy of `.module`)" if name.startswith("__") else f"the method {name}"
        raise NotImplementedError(f"DistributedDataParallel: {what} is not supported yet")

    method.__name__ = name
    method.__qualname__ = f"DistributedDataParallel.{name}"
    method.__doc__ = "Not supported yet: raises NotImplementedError."
    return method


def resolve_devices(
    device_ids: Devices, output_device: Any, parameters: Sequence[torch.nn.Parameter]
) -> tuple[list[int] | None, int | None]:
    """`device_ids` and `output_device` as indices, or (None, None) for CPU and multi-device modules.

    Raises:
        ValueError: several ids; ids for a module that is not on one accelerator; several types of device.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {list(device_ids)}.")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {sorted(types)}."
        )
    if device_ids and len(devices) == 1 and types != {"cpu"}:
        chosen = [_get_device_index(device, True) for device in device_ids]
        output = device_ids[0] if output_device is None else output_device
        return chosen, _get_device_index(output, True)
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU "
            f"modules, but got device_ids {device_ids}, output_device {output_device}, and module parameters on "
            f"{sorted(map(str, devices))}."
        )
    return None, None


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the default one; ValueError if there is none, or this rank is not in it."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group() before wrapping the model"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the process group of the model (process_group={group!r})")
    return group


def check_module(module: torch.nn.Module, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuses parameters that have no shape yet, and those whose gradients we can't average yet; by name."""
    for name, parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                f"Run a dummy forward pass to correctly initialize '{name}'."
            )
        if getattr(parameter, "_in_backward_optimizers", None):
            raise NotImplementedError(
                f"DistributedDataParallel: '{name}' has an optimizer applied in backward, not supported yet"
            )
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise NotImplementedError(
                f"DistributedDataParallel: the sparse gradients of '{name}' are not supported yet; "
                "build it with sparse=False"
            )


def bucket_caps(bucket_cap_mb: float | None) -> list[int]:
    """Caps in bytes of the rebuilt buckets: a small first one only if the caller names no size."""
    if bucket_cap_mb is None:
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        return [first, DEFAULT_BUCKET_CAP_MB * MEBIBYTE]
    return [int(bucket_cap_mb * MEBIBYTE)]


def buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are broadcast (at each forward, at construction)."""
    if forward_sync_buffers is None:
        both = True if broadcast_buffers is None else broadcast_buffers
        return both, both
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is ignored because forward_sync_buffers was given as well.", FutureWarning, stacklevel=3
        )
    return forward_sync_buffers, True
