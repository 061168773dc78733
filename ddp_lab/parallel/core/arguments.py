"""The constructor's arguments: torch's names and defaults, checks and meaning."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .parameters import Survey, module_text

__all__ = [
    "BucketCaps",
    "ReducerOptions",
    "as_installed_torch",
    "buffer_sync",
    "check",
    "check_module",
    "default_group",
    "is_slice",
    "nothing_to_train",
    "resolve_devices",
    "resolve_group",
    "use_side_stream",
    "warn_of_deprecated",
    "warn_static",
    "warn_user",
]

Devices = Sequence[int | torch.device | str] | None

MEBIBYTE = 1024 * 1024
BROADCAST_BYTES = 250 * MEBIBYTE  # of tensors that are sent in one broadcast
DEFAULT_BUCKET_CAP_MB = 25
_UNLIMITED = 2**62
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep

TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)
_Init = TypeVar("_Init", bound=Callable[..., None])


def as_installed_torch(constructor: _Init) -> _Init:
    """Makes a constructor take its arguments as the installed torch's does: order, names, TypeErrors."""

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = TORCH_SIGNATURE.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
        constructor(**given)

    construct.__signature__ = TORCH_SIGNATURE  # type: ignore[attr-defined]
    return construct  # type: ignore[return-value]


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are reduced; see `DistributedDataParallel` for what each means."""

    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    mixed_precision: Any

    @property
    def assigns_anew(self) -> bool:
        """Whether the buckets are rebuilt after the first backward, in the order of readiness."""
        return not self.find_unused_parameters or self.static_graph


@dataclass(frozen=True)
class BucketCaps:
    """Sizes in bytes at which buckets are closed.

    Attributes:
        first: size limit of the bucket that is launched first.
        others: size limit of all others.
        each: size limits of the single buckets, if the caller gave a list; the last one repeats.
        small_last: the small bucket is the last one (environment DDP_SET_LAST_BUCKET_CAP=1).
    """

    first: int
    others: int
    each: tuple[int, ...] = ()
    small_last: bool = False

    @classmethod
    def of(cls, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> BucketCaps:
        """A small first bucket only if neither is given."""
        small_last = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
        if bucket_cap_mb_list:
            each = tuple(int(cap * MEBIBYTE) for cap in bucket_cap_mb_list)
            cap = int(max(bucket_cap_mb_list) * MEBIBYTE)
            return cls(cap, cap, each, small_last)
        if bucket_cap_mb is None:
            # Tests set this attribute of torch's
            first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
            return cls(first, DEFAULT_BUCKET_CAP_MB * MEBIBYTE, (), small_last)
        cap = int(bucket_cap_mb * MEBIBYTE)
        return cls(cap, cap, (), small_last)

    @property
    def given(self) -> list[int]:
        """The size limits that the caller gave for single buckets."""
        return list(self.each)

    @property
    def has_small_first(self) -> bool:
        """Whether the first bucket is smaller than the others."""
        return self.first < self.others

    def initial(self, *, find_unused: bool) -> list[int]:
        """Size limits of the buckets in the first backward, in the order of registration.

        One bucket for everything unless unused parameters are looked for: while the order of the gradients is
        unknown, a bucket of an unused parameter could start before a collective that the model's own backward
        runs, and so in another order than on another rank.
        """
        if self.each:
            return self.given
        if not find_unused:
            return [_UNLIMITED]
        return [self.first, self.others] if self.has_small_first else [self.others]

    def rebuilt(self) -> list[int]:
        """Size limits of the rebuilt buckets, in the order of launch."""
        return self.given or [self.first, self.others]


def resolve_group(process_group: dist.ProcessGroup | None, mesh: Any, module: torch.nn.Module) -> dist.ProcessGroup:
    """The given group, that of the device mesh, or the default one.

    A mesh that is a slice of a larger one means that the module's parameters are sharded over the other
    dimensions (tensor parallel): the module is then transformed in place, as torch does it.

    Raises:
        RuntimeError: a group and a mesh were given, or a mesh of several dimensions.
        ValueError: there is no default group, or this rank is not in the group.
    """
    if mesh is None:
        return _checked_group(process_group)
    if process_group:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}. Slice it: device_mesh=mesh['name'].")
    if is_slice(mesh):
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
    return group


def is_slice(mesh: Any) -> bool:
    """Whether a device mesh is a part of a larger one; False for None."""
    return mesh is not None and bool(mesh._get_root_mesh() != mesh)


def default_group() -> dist.ProcessGroup:
    """The default process group; ValueError if there is none."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group. "
            "(torch.distributed.init_process_group() comes before the model is wrapped.)"
        )
    return group


def _checked_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = default_group() if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the process group of the model (process_group={group!r})")
    return group


def resolve_devices(
    device_ids: Devices, output_device: Any, parameters: Sequence[torch.Tensor]
) -> tuple[list[int] | None, int | None]:
    """`device_ids` and `output_device` as indices, or (None, None) for CPU and multi-device modules.

    Raises:
        ValueError: several ids; ids for a module that is not on one accelerator; several types of device.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element. Got {list(device_ids)}: start one process for "
            "each device."
        )
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
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got "
            f"device_ids {device_ids}, output_device {output_device}, and module parameters on "
            f"{sorted(map(str, devices))}. Leave both out for a module on the CPU or on several devices."
        )
    return None, None


def check_module(module: torch.nn.Module, survey: Survey) -> None:
    """Refuses a module with parameters that have no shape yet, by name, or SyncBatchNorm layers on the CPU."""
    for name, parameter in survey.parameters.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                f"Run a dummy forward pass to correctly initialize '{name}' of {module_text(module)}."
            )
        if survey.batch_norm is not None and parameter.device.type == "cpu":
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules; '{survey.batch_norm}' of {module_text(module)} "
                "is on the CPU."
            )


def buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are broadcast (at each forward, at construction)."""
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    both = True if broadcast_buffers is None else broadcast_buffers
    return both, both


def check(delayed: Any, trigger: Any, bucket_cap_mb_list: Any, *, in_python: bool) -> None:
    """Checks of the arguments alone.

    Raises:
        ValueError: only one of the two arguments for delayed parameters is given.
        AssertionError: `bucket_cap_mb_list` in the mode of [Note: the Python reducer], where inductor makes buckets.
    """
    if (delayed is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the first "
            "names the parameters that are averaged late, the second the parameter whose gradient starts that."
        )
    if bucket_cap_mb_list and in_python:
        raise AssertionError("when using bucket_cap_mb_list, python reducer is not supported: give bucket_cap_mb")


def warn_of_deprecated(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, *, check_reduction: bool
) -> None:
    """Warns of arguments that were renamed or have no effect."""
    if broadcast_buffers is not None and "forward_sync_buffers" in TORCH_SIGNATURE.parameters:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were given: `broadcast_buffers` is deprecated, and "
            "ignored here."
            if forward_sync_buffers is not None
            else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`, which leaves the broadcast at "
            "construction as it is (broadcast_buffers=False also skips that, for buffers that differ between ranks).",
            FutureWarning,
            stacklevel=4,
        )
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. It has no effect.",
            FutureWarning,
            stacklevel=4,
        )


def warn_user(text: str) -> None:
    """Warns at the innermost line of the program that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_static(find_unused: bool, stacklevel: int) -> None:
    """Warns of `find_unused_parameters` with a static graph, at a line `stacklevel` frames above."""
    if find_unused:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically: omit find_unused_parameters, and make sure that the unused parameters do "
            "not change during training.",
            stacklevel=stacklevel,
        )


def nothing_to_train(module: torch.nn.Module) -> str:
    """The message for a module without a trained parameter."""
    return (
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient. "
        f"{module_text(module)} has none: use it unwrapped, or unfreeze parameters before it is wrapped."
    )


def use_side_stream() -> bool:
    """Whether inputs are copied to the device on a stream of their own (environment PYTORCH_DDP_USE_SIDE_STREAM)."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
