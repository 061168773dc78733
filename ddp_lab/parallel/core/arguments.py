"""The constructor's arguments: torch's names and defaults, checks and meaning."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .parameters import Survey, module_text

__all__ = [
    "Arguments",
    "BucketCaps",
    "ReducerOptions",
    "check_module",
    "default_group",
    "described_options",
    "nothing_to_train",
    "takes_arguments",
    "use_side_stream",
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
_Model = TypeVar("_Model")
_Options = ParamSpec("_Options")


def takes_arguments(
    arguments: Callable[_Options, Arguments],
) -> Callable[[Callable[[_Model, Arguments], None]], Callable[Concatenate[_Model, _Options], None]]:
    """Makes a constructor of `Arguments` one of their fields, as the installed torch's: order, names, TypeErrors."""

    def takes(
        constructor: Callable[[_Model, Arguments], None],
    ) -> Callable[Concatenate[_Model, _Options], None]:
        @functools.wraps(constructor)
        def construct(self: _Model, /, *args: _Options.args, **kwargs: _Options.kwargs) -> None:
            try:
                TORCH_SIGNATURE.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
            constructor(self, arguments(*args, **kwargs))

        construct.__signature__ = TORCH_SIGNATURE  # type: ignore[attr-defined]
        return construct

    return takes


# How an option of the reducer is used; nothing: only where the option is read.
_IS_AGREED: Final = {"agreed": True}  # it must be the same on all ranks
_IS_DESCRIBED: Final = {"described": True}  # the description for the timeline has it
_IN_PYTHON: Final = {"in_python": True}  # the reducer in C++ does not take it


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are reduced; see `DistributedDataParallel` for what each means."""

    find_unused_parameters: bool = field(default=False, metadata=_IS_AGREED | _IS_DESCRIBED)
    static_graph: bool = field(default=False, metadata=_IS_AGREED | _IS_DESCRIBED)
    gradient_as_bucket_view: bool = field(default=False, metadata=_IS_DESCRIBED)
    skip_all_reduce_unused_params: bool = field(default=False, metadata=_IS_AGREED)
    batched_grad_copy: bool = field(default=False, metadata=_IS_DESCRIBED)
    lazy_bucket_allocation: bool = False
    mixed_precision: Any = field(default=None, metadata=_IN_PYTHON)

    @classmethod
    def of(cls, source: object) -> ReducerOptions:
        """The options among the attributes of `Arguments`, or of torch's class, which lacks some in older releases."""
        found: dict[str, Any] = {one.name: getattr(source, one.name, one.default) for one in fields(cls)}
        return cls(**found)

    def agreed(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        return self._those("agreed", True)

    def described(self) -> dict[str, Any]:
        """The options in the description for the timeline."""
        return self._those("described", True)

    def for_reducer(self) -> dict[str, bool]:
        """The options that the reducer in C++ takes."""
        return self._those("in_python", False)

    def _those(self, use: str, wanted: bool) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.metadata.get(use, False) is wanted}

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

    @classmethod
    def of_torch(cls, model: TorchDDP) -> BucketCaps:
        """Those of a model of torch's class."""
        others = model.bucket_bytes_cap
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else others  # type: ignore[attr-defined]
        return cls(first, others, tuple(getattr(model, "bucket_bytes_cap_list", ())))

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

    def rebuilt_mb(self) -> list[float]:
        """The same in MiB."""
        return [cap / MEBIBYTE for cap in self.rebuilt()]


def described_options(
    options: ReducerOptions, caps: BucketCaps, *, averages_in_place: bool, comm_hook: str | None
) -> dict[str, Any]:
    """The options of a model of our class or torch's in its description (see tutorials/site/descriptions.md)."""
    return {
        **options.described(),
        "averages_in_place": averages_in_place,
        "bucket_cap_mb": caps.others / MEBIBYTE,
        "bucket_cap_mb_list": caps.rebuilt_mb(),
        "comm_hook": comm_hook,
    }


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of `DistributedDataParallel`, whose documentation says what each means.

    Names, order and defaults are torch's; an argument that the installed torch lacks keeps its default.
    """

    module: torch.nn.Module
    device_ids: Devices = None
    output_device: Any = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    process_group: dist.ProcessGroup | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delay_all_reduce_named_params: Any = None
    param_to_hook_all_reduce: torch.nn.Parameter | None = None
    mixed_precision: Any = None
    device_mesh: Any = None
    skip_all_reduce_unused_params: bool = False
    bucket_cap_mb_list: Sequence[float] | None = None
    batched_grad_copy: bool = False
    forward_sync_buffers: bool | None = None
    lazy_bucket_allocation: bool = False

    def check(self, *, in_python: bool) -> None:
        """Checks that need nothing but the arguments, and warnings of those that were renamed or have no effect.

        Raises:
            ValueError: only one of the two arguments for delayed parameters is given.
            AssertionError: `bucket_cap_mb_list` in the mode of [Note: the Python reducer], where inductor makes
                buckets.
        """
        if (self.delay_all_reduce_named_params is None) != (self.param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: the first "
                "names the parameters that are averaged late, the second the parameter whose gradient starts that."
            )
        if self.bucket_cap_mb_list and in_python:
            raise AssertionError("when using bucket_cap_mb_list, python reducer is not supported: give bucket_cap_mb")
        if self.broadcast_buffers is not None and "forward_sync_buffers" in TORCH_SIGNATURE.parameters:
            warn_user(
                "Both `broadcast_buffers` and `forward_sync_buffers` were given: `broadcast_buffers` is deprecated, "
                "and ignored here."
                if self.forward_sync_buffers is not None
                else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`, which leaves the broadcast at "
                "construction as it is (broadcast_buffers=False also skips that, for buffers that differ between "
                "ranks).",
                FutureWarning,
            )
        if self.check_reduction:
            warn_user(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. It has no effect.",
                FutureWarning,
            )

    @property
    def caps(self) -> BucketCaps:
        """The size limits of the buckets."""
        return BucketCaps.of(self.bucket_cap_mb, self.bucket_cap_mb_list)

    @property
    def syncs_buffers(self) -> bool:
        """Whether buffers are broadcast at each forward."""
        return self._of_buffers(self.forward_sync_buffers)

    @property
    def sends_buffers(self) -> bool:
        """Whether buffers are broadcast at construction."""
        return self._of_buffers(None if self.forward_sync_buffers is None else True)

    def _of_buffers(self, decided: bool | None) -> bool:
        if decided is not None:
            return decided
        return True if self.broadcast_buffers is None else self.broadcast_buffers

    @property
    def is_sharded(self) -> bool:
        """Whether the device mesh is a part of a larger one, over whose other dimensions parameters are sharded."""
        return self.device_mesh is not None and bool(self.device_mesh._get_root_mesh() != self.device_mesh)

    def resolve_group(self) -> dist.ProcessGroup:
        """The given group, that of the device mesh, or the default one.

        A mesh that is a slice of a larger one means that the module's parameters are sharded over the other
        dimensions (tensor parallel): the module is then transformed in place, as torch does it.

        Raises:
            RuntimeError: a group and a mesh were given, or a mesh of several dimensions.
            ValueError: there is no default group, or this rank is not in the group.
        """
        mesh = self.device_mesh
        if mesh is None:
            return _checked_group(self.process_group)
        if self.process_group:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}. Slice it: device_mesh=mesh['name'].")
        if self.is_sharded:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(self.module)
        group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
        return group

    def resolve_devices(self, parameters: Sequence[torch.Tensor]) -> tuple[list[int] | None, int | None]:
        """`device_ids` and `output_device` as indices, or (None, None) for CPU and multi-device modules.

        Raises:
            ValueError: several ids; ids for a module that is not on one accelerator; several types of device.
        """
        device_ids, output_device = self.device_ids, self.output_device
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids can only be None or contain a single element. Got {list(device_ids)}: start one process "
                "for each device."
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


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of the program that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_static(find_unused: bool) -> None:
    """Warns of `find_unused_parameters` with a static graph."""
    if find_unused:
        warn_user(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically: omit find_unused_parameters, and make sure that the unused parameters do "
            "not change during training."
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
