"""Checks of a comm hook before it is registered. The hooks themselves are torch's, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from .arguments import warn_user

__all__ = [
    "Hook",
    "attach",
    "check_backend",
    "check_hook",
    "check_signature",
    "hook_name",
    "name_of_hook",
    "warn_if_late",
]

Hook = Callable[..., Any] | BuiltinCommHookType

_BF16 = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def hook_name(hook: Callable[..., Any]) -> str:
    """The hook's name, also for partial functions and callable objects."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def name_of_hook(hooks: Sequence[tuple[Hook, object]]) -> str | None:
    """The name of the last registered comm hook; None without one."""
    hook = hooks[-1][0] if hooks else None
    return None if hook is None else hook_name(hook) if callable(hook) else str(hook)


def check_hook(hook: Callable[..., Any]) -> None:
    """Refuses a hook that can't be called as ``hook(state, bucket)``; its arguments may have any names.

    Raises:
        TypeError: it can't be called, or needs a backend that this torch does not have.
        ValueError: it has another signature.
    """
    check_signature(hook)
    check_backend(hook)


def check_signature(hook: Callable[..., Any]) -> None:
    """The part of `check_hook` about its arguments."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = _signature(hook)
    if signature is not None:
        _check_signature(hook, signature)


def check_backend(hook: Callable[..., Any]) -> None:
    """The part of `check_hook` about its requirements."""
    if getattr(hook, "__name__", "") in _BF16 and not _sums_bf16():
        raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL")


def warn_if_late(hook: Callable[..., Any], step: int) -> None:
    """Warns about a hook that is registered after `step` > 0 synchronised backwards.

    Their gradients were averaged without it, and ranks that register it in different steps enter different collectives.
    """
    if step:
        warn_user(
            f"register_comm_hook({hook_name(hook)}) was called after {step} synchronised backward passes, which "
            "averaged gradients without it. Register a hook before the first backward, or on all ranks between the "
            "same two steps."
        )


def attach(reducer: Any, hook: Hook, state: object) -> None:
    """Makes the reducer average with the hook: a Python one that was checked, or a built-in one, which needs no state.

    Raises:
        TypeError: it is neither.
        RuntimeError: the reducer has a hook already.
    """
    if isinstance(hook, BuiltinCommHookType):
        reducer.register_builtin_hook(hook)
    elif callable(hook):
        reducer.register_hook(state, hook)
    else:
        raise TypeError(f"comm_hook_type must be a dist.BuiltinCommHookType, got {hook!r}")


def _signature(hook: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(hook, eval_str=True)
    except ValueError:  # a function written in C may have none
        return None
    except (NameError, AttributeError, TypeError, SyntaxError):  # annotations for type checkers only
        return inspect.signature(hook)


def _check_signature(hook: Callable[..., Any], signature: inspect.Signature) -> None:
    try:
        bound = signature.bind("state", "bucket")
    except TypeError as error:
        raise ValueError(
            f"Communication hook: {hook_name(hook)}{signature} can't be called as hook(state, bucket): {error}."
        ) from None
    second = next((name for name, value in bound.arguments.items() if value == "bucket"), None)  # None: *arguments
    annotation = signature.parameters[second].annotation if second else inspect.Parameter.empty
    if annotation not in (inspect.Parameter.empty, Any, GradBucket) and not isinstance(annotation, str):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket. Got {annotation}.")
    returned = signature.return_annotation
    known = (inspect.Signature.empty, Any, torch.futures.Future[torch.Tensor])
    if returned not in known and not isinstance(returned, str):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. Got {returned}."
        )


def _sums_bf16() -> bool:
    if torch.version.cuda is not None or torch.version.hip is not None:
        return bool(dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10))
    return bool(dist.is_xccl_available() and torch.xpu.is_available())
