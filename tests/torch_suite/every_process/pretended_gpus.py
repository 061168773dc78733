"""Eight pretended GPUs, all of them the CPU.

[Note: pretended GPUs]
Most of torch's DDP tests ask for two GPUs and NCCL, although what they test (buckets, unused parameters, join, hooks,
static graphs, error texts) is the same on any device. Here such a test finds GPUs, and each tensor and module that it
moves to one stays where it is:

- wherever torch takes a device, ``cuda``, ``cuda:1`` and a bare index become ``cpu`` (a `TorchFunctionMode`, and
  replaced methods for the threads that a mode does not reach);
- ``torch.cuda`` answers questions and does nothing; streams and events are objects that accept every call;
- the backend ``nccl`` is Gloo;
- the conditions of tests ("needs two GPUs", "needs NCCL") hold;
- DistributedDataParallel does not get the `device_ids` and `output_device` of a module that is on the CPU after all.

What needs a real device (streams, SyncBatchNorm, moving inputs) can't be shown like this: see `tests/gpu`. A test is
listed only if it passes like this with torch's own class.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

COUNT = 8
_CPU = torch.device("cpu")


def install() -> None:
    """For the rest of the process; before `torch.testing._internal.distributed` is imported."""
    # a build for GPUs would ask the driver, once for all processes to come
    _triton.has_triton = lambda *args, **kwargs: False
    _pretend_devices()
    _pretend_cuda_module()
    _map_backends()
    _meet_conditions()
    _drop_device_ids()


def _mapped(device: Any) -> Any:
    """The CPU for whatever names a GPU; anything else as it is."""
    if isinstance(device, bool):
        return device
    names_gpu = (
        isinstance(device, int)
        or (isinstance(device, torch.device) and device.type == "cuda")
        or (isinstance(device, str) and device.split(":")[0] == "cuda")
    )
    return _CPU if names_gpu else device


class _DevicesAreTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _mapped(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if func is torch.device and args and isinstance(args[0], int):
            return _CPU
        if name == "to" and len(args) > 1:
            args = (args[0], _mapped(args[1]), *args[2:])
        return func(*args, **kwargs)


def _pretend_devices() -> None:
    _DevicesAreTheCpu().__enter__()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    move = torch.nn.Module.to

    @functools.wraps(move)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _mapped(kwargs["device"])
        return move(self, *map(_mapped, args), **kwargs)

    torch.nn.Module.to = moved  # type: ignore[method-assign]


class _Inert:
    """A stream or event: takes every call, has no time, is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *error: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inert)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _pretend_cuda_module() -> None:
    # torch._dynamo keeps a table by function, so each name gets one of its own
    def giving(value: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: value()

    cuda: Any = torch.cuda
    any_torch: Any = torch
    for name in ("set_device", "synchronize", "_sleep", "empty_cache"):
        setattr(cuda, name, giving(lambda: None))
    cuda.current_device = giving(lambda: 0)
    cuda.device_count = giving(lambda: COUNT)
    for name in ("device", "stream"):
        setattr(cuda, name, giving(contextlib.nullcontext))
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, giving(_Inert))
    cuda.Stream = cuda.Event = any_torch.Stream = any_torch.Event = _Inert
    any_torch.accelerator.current_stream = giving(_Inert)
    any_torch.accelerator.synchronize = giving(lambda: None)
    cuda.nccl.version = lambda: (2, 27, 3)


def _map_backends() -> None:
    c10d: Any = dist.distributed_c10d

    def with_gloo(make_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_group)
        def made(*args: Any, **kwargs: Any) -> Any:
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            return make_group(*("gloo" if isinstance(a, str) and a == "nccl" else a for a in args), **kwargs)

        return made

    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        _replace(c10d, name, with_gloo)

    def without_ids(barrier: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(barrier)
        def waited(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_ids", None)
            return barrier(*args, **kwargs)

        return waited

    _replace(c10d, "barrier", without_ids)


def _replace(c10d: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """In both modules under which torch publishes its collectives."""
    wrapped = wrap(getattr(c10d, name))
    setattr(c10d, name, wrapped)
    if hasattr(dist, name):
        setattr(dist, name, wrapped)


def _meet_conditions() -> None:
    from torch.testing._internal import common_distributed

    conditions: Any = common_distributed

    def unchanged(test: Any) -> Any:
        return test

    def always(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return unchanged

    def if_gpus(count: int, **options: Any) -> Callable[[Any], Any]:
        return unittest.skip(f"needs {count} GPUs") if count > COUNT else unchanged

    conditions.skip_if_lt_x_gpu = if_gpus
    conditions.skip_if_no_gpu = unchanged
    for name in (
        "nccl_skip_if_lt_x_gpu",
        "requires_nccl",
        "requires_nccl_version",
        "require_n_gpus_for_nccl_backend",
        "requires_accelerator_dist_backend",
    ):
        setattr(conditions, name, always)
    conditions.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(int(world_size))}
    conditions.at_least_x_gpu = lambda count: True


def _drop_device_ids() -> None:
    """[Note: pretended GPUs]. Several `device_ids` are left, because DistributedDataParallel has to refuse them."""
    cls: Any = torch.nn.parallel.DistributedDataParallel
    construct = cls.__init__

    @functools.wraps(construct)
    def constructed(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        ids = args[0] if args else kwargs.get("device_ids")
        if all(p.device.type == "cpu" for p in module.parameters()) and len(ids or ()) < 2:
            args = (*[None for _ in args[:2]], *args[2:])
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        construct(self, module, *args, **kwargs)

    cls.__init__ = constructed
