"""DataParallel: one process, one module, a batch split over several devices.

Each forward copies the module to all devices (replicate.py), splits the batch (scatter_gather.py), runs the replicas
in threads (parallel_apply.py) and joins their outputs; the backward of the copies sums the replicas' gradients into
the module's own. Devices are accelerators or, to learn and test it anywhere, CPU devices: see [Note: CPU devices] in
devices.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._utils import _get_all_device_indices, _get_available_device_type, _get_devices_properties

from .devices import Device, Resolved, on_cpu, resolve_device, resolve_devices
from .parallel_apply import parallel_apply
from .replicate import replicate
from .scatter_gather import gather, scatter_kwargs

__all__ = ["DataParallel", "data_parallel"]

BALANCED = 0.75  # least memory or cores of a device, as a part of the best device's


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """Runs a module on several devices of this process, each with a part of the batch.

    A drop-in for `torch.nn.DataParallel`: same signature, same results. Tensors among the arguments are split along
    `dim`, also inside tuples, lists and dicts; anything else goes to all replicas by reference. Gradients of the
    replicas are summed into the module.

    What to know:
        * Replicas live for one forward. Attributes that a forward sets are lost; only what the first device's replica
          writes in place into parameters and buffers remains (BatchNorm's statistics come from the first device).
        * Hooks of the module run once on each device, in no order between devices.
        * A scalar output becomes a vector with one element for each device.
        * An RNN whose batch is not its first dimension needs ``dim``, and outputs padded to one length.
        * For more than one GPU, `ddp_lab.DistributedDataParallel` is faster.

    Args:
        module: its parameters and buffers are on the first device.
        device_ids: accelerators as indices or devices, or CPU devices: ``["cpu:0", "cpu:1"]``, ``["cpu"] * 4``.
            None: all accelerators. If there is none and no CPU devices are given, forward calls the module itself.
        output_device: where outputs are joined; the first device if None.
        dim: the dimension of the batch.

    Raises:
        ValueError: CPU devices and accelerators in one list.

    Example:
        >>> model = ddp_lab.DataParallel(torch.nn.Linear(4, 2), device_ids=["cpu:0", "cpu:1"])
        >>> model(torch.randn(8, 4)).shape  # each replica saw 4 samples
        torch.Size([8, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.device_ids: list[Any] = _devices(device_ids)  # indices, or CPU devices
        if not self.device_ids:
            return
        self.output_device: Any = self.device_ids[0] if output_device is None else _output_device(output_device)
        self.src_device_obj = _torch_device(self.device_ids[0])
        if self.src_device_obj.type == "cuda":
            _warn_of_imbalance(self.device_ids)
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the replicas and joins their outputs.

        Raises:
            RuntimeError: a parameter or buffer is not on the first device.
            Exception: a replica's exception, with its number and device in the message.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            _check_source(self.module, self.src_device_obj)
            parts, named = self.scatter(inputs, kwargs, self.device_ids)
            if not parts and not named:
                parts, named = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*parts[0], **named[0])
            replicas = self.replicate(self.module, self.device_ids[: len(parts)])
            return self.gather(self.parallel_apply(replicas, parts, named), self.output_device)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """A replica for each device, outside autograd if gradients are off."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Device]) -> Any:
        """Positional and keyword arguments for each device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The output of each replica."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Device) -> Any:
        """The replicas' outputs, joined."""
        return gather(outputs, output_device, dim=self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Any | None = None,
) -> Any:
    """Calls ``module(*inputs, **module_kwargs)`` once, split over several devices.

    Args:
        module: its parameters and buffers are on the first device.
        inputs: a tuple of arguments, or one argument.
        device_ids: as for `DataParallel`.
        output_device: where outputs are joined; the first device if None, the CPU if -1.
        dim: the dimension of the batch.
        module_kwargs: keyword arguments.

    Returns:
        The joined outputs.

    Raises:
        RuntimeError: there is no accelerator and no CPU devices are given, or the module is on another device.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    devices = _devices(device_ids)
    if not devices:
        raise RuntimeError(
            "device type could not be determined: there is no accelerator here; give CPU devices, such as "
            'device_ids=["cpu:0", "cpu:1"]'
        )
    output = devices[0] if output_device is None else _output_device(output_device)
    _check_source(module, _torch_device(devices[0]))
    parts, named = scatter_kwargs(inputs, module_kwargs, devices, dim)
    if not parts and not named:
        parts, named = ((),), ({},)
    if len(devices) == 1:
        return module(*parts[0], **named[0])
    used = devices[: len(parts)]
    replicas = replicate(module, used)
    return gather(parallel_apply(replicas, parts, named, used), output, dim)


def _devices(device_ids: Sequence[Device] | None) -> list[Resolved]:
    """The devices to use; none if there is no accelerator and no CPU devices are given."""
    named = None if device_ids is None else list(device_ids)
    if named and any(
        isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu" for device in named
    ):
        return resolve_devices(named)
    if _get_available_device_type() in (None, "mps"):
        return []
    devices = resolve_devices(_get_all_device_indices() if named is None else named)
    if not devices:
        raise RuntimeError("no available devices were found")
    return devices


def _output_device(device: Device) -> Device:
    return -1 if device == -1 else resolve_device(device)  # -1 is kept: `gather` warns of it


def _torch_device(device: Resolved) -> torch.device:
    if on_cpu([device]):
        return torch.device("cpu")  # what the tensors say
    return torch.device(str(_get_available_device_type()), int(device))  # type: ignore[arg-type]


def _check_source(module: nn.Module, source: torch.device) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != source:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {source} (device_ids[0]) but found one of "
                f"them on device: {tensor.device} ({name}). Move it: module.to({str(source)!r})"
            )


def _warn_of_imbalance(devices: Sequence[Resolved]) -> None:
    properties = _get_devices_properties(devices)
    pair = imbalance([(p.total_memory, p.multi_processor_count) for p in properties])
    if pair is not None:
        low, high = (devices[position] for position in pair)
        warnings.warn(
            f"There is an imbalance between your GPUs. You may want to exclude GPU {low} which has less than 75% of "
            f"the memory or cores of GPU {high}. You can do so by setting the device_ids argument to DataParallel, or "
            "by setting the CUDA_VISIBLE_DEVICES environment variable.",
            stacklevel=3,
        )


def imbalance(resources: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The weakest and the strongest device, by memory or else by cores, if the weakest has less than 75 %.

    Args:
        resources: bytes of memory and number of multiprocessors of each device.

    Returns:
        Two positions in `resources`, or None.
    """
    for column in zip(*resources, strict=True):
        low, high = column.index(min(column)), column.index(max(column))
        if column[low] < BALANCED * column[high]:
            return low, high
    return None


DataParallel.__init__.__signature__ = inspect.signature(nn.DataParallel.__init__)  # type: ignore[attr-defined]
