"""Checks of a comm hook before it is registered. The hooks themselves are torch's, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

__all__ = ["builtin_hook", "check_hook", "hook_name"]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_BF16 = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def hook_name(hook: Callable[..., Any]) -> str:
    """The hook's name, also for partial functions and callable objects."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def check_hook(hook: Callable[..., Any]) -> None:
    """Refuses a hook that could not be called as ``hook(state, bucket)``.

    Raises:
        TypeError: it can't be called, or needs a backend that this torch does not have.
        ValueError: its signature is another one.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(
            f"Communication hook: the second parameter of {hook_name(hook)}{signature} must be named 'bucket': "
            "hook(state, bucket)."
        )
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, GradBucket) and not isinstance(annotation, str):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket, got {annotation}.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], got {returned}."
        )
    if getattr(hook, "__name__", "") in _BF16 and not _sums_bf16():
        raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL")


def builtin_hook(kind: BuiltinCommHookType) -> Hook:
    """Torch's hook of the same arithmetic as its built-in `kind`; its state is the process group."""
    known: dict[BuiltinCommHookType, Hook] = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in known:
        raise TypeError(f"comm_hook_type must be a dist.BuiltinCommHookType, got {kind!r}")
    return known[kind]


def _sums_bf16() -> bool:
    if torch.version.cuda is not None or torch.version.hip is not None:
        return bool(dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10))
    return bool(dist.is_xccl_available() and torch.xpu.is_available())
