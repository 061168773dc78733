"""Memory and load of this rank's GPU, for the cluster's widget.

[Note: a GPU that hangs]
The control thread answers while a cell runs, also while the GPU hangs in a collective, when the answer matters most.
CUDA's runtime and torch's allocator can block then while holding the GIL, and the rank could no longer be interrupted.
So the GPU is queried only through the driver's management library (NVML), which also creates no CUDA context.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ..machine import nvml
from ..protocol.messages import GpuUse


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Gpu:
    """One GPU as the driver's management library knows it. See [Note: a GPU that hangs].

    Args:
        uuid: as the driver names it, with or without its prefix.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The GPU of a rank that has initialised CUDA; None for another device. Call it on the main thread."""
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return None
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return None if uuid is None else cls(str(uuid))

    def read(self) -> GpuUse | None:
        """Its use; None if there is no such library or GPU."""
        if self._handle is None:
            return None
        library, handle = self._handle
        memory, utilization = _Memory(), _Utilization()
        knows_memory = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        knows_use = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        used, total = (int(memory.used), int(memory.total)) if knows_memory else (None, None)
        return GpuUse(used, total, int(utilization.gpu) if knows_use else None)

    @functools.cached_property
    def _handle(self) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
        """The library and its handle of the GPU."""
        library = nvml()
        if library is None:
            return None
        handle = ctypes.c_void_p()
        plain = self._uuid.removeprefix("GPU-").removeprefix("MIG-")
        for prefix in ("GPU-", "MIG-"):
            if library.nvmlDeviceGetHandleByUUID(f"{prefix}{plain}".encode(), ctypes.byref(handle)) == 0:
                return library, handle
        return None
