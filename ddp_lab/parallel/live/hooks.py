"""Comm hooks by name, so that the client can ask for one: torch's, and those that the ranks' program has named.

[Note: replacing a comm hook]
Between two backwards a hook may be replaced: nothing of it is under way then. It must be replaced between the same two
on all ranks, since hooks differ in the collectives they enter. State of torch's PowerSGD is kept by bucket, and is
forgotten whenever the buckets change. Some hooks do more than average and can't be replaced: those that step
optimizers. Beside hooks that do not bring all ranks together in each backward nothing can be changed live, because
what makes the ranks change in the same step ([Note: a change while training runs]) is that they wait for each other.
"""

from __future__ import annotations

import difflib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from ..core import comm_hooks, process_groups
from ..core.synchronizer import GradientSynchronizer

__all__ = ["check", "check_buckets", "define", "forget_buckets", "known", "make", "replace"]

Factory = Callable[[GradientSynchronizer], tuple[comm_hooks.Hook, object]]

NONE = "none"
_UNCOUPLED = ("noop_hook", "post_localSGD_hook")


def _bf16(sync: GradientSynchronizer) -> tuple[comm_hooks.Hook, object]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    reference = weakref.ref(sync)  # the model's group may be another one tomorrow

    @functools.wraps(bf16_compress_hook)
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return bf16_compress_hook(reference().group, bucket)  # type: ignore[union-attr]

    return hook, None


def _power_sgd(sync: GradientSynchronizer) -> tuple[comm_hooks.Hook, object]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    reference = weakref.ref(sync)

    @functools.wraps(powerSGD_hook)
    def hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.process_group = reference().group  # type: ignore[union-attr]
        return powerSGD_hook(state, bucket)

    return hook, PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


_factories: dict[str, Factory] = {
    "fp16": lambda sync: (BuiltinCommHookType.FP16_COMPRESS, None),
    "bf16": _bf16,
    "powersgd": _power_sgd,
}


def define(name: str, hook: Callable[..., Any], state: Callable[[Any], object] | None = None) -> None:
    """See `DistributedDataParallel.define_comm_hook`."""
    if name in (NONE, "fp16", "bf16", "powersgd"):
        raise ValueError(f"the name {name!r} is taken: choose another one")
    comm_hooks.check_hook(hook)
    _factories[name] = lambda sync: (hook, None if state is None else state(sync.owner()))


def known() -> list[str]:
    """The names that can be asked for on this rank."""
    return [NONE, *_factories]


def make(sync: GradientSynchronizer, name: str) -> tuple[comm_hooks.Hook, object]:
    """The hook and a new state for it."""
    return _factories[name](sync)


def check(sync: GradientSynchronizer, name: str | None) -> None:
    """Refuses a name that is not known here, and models whose hook can't be replaced or does not couple the ranks."""
    present = sync.hook_name or ""
    if any(word in present for word in _UNCOUPLED):
        raise RuntimeError(
            f"the model's comm hook is {present}, with which ranks do not wait for each other in each backward: they "
            "could not change in the same step. Call model.reconfigure(...) on all ranks instead"
        )
    if name is None:
        return
    if name not in known():
        close = difflib.get_close_matches(name, known(), 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"no comm hook is known as {name!r} on this rank{hint}: choose one of {', '.join(map(repr, known()))}"
        )
    if sync.options.mixed_precision is not None:
        raise RuntimeError("mixed_precision has its own way to reduce gradients: such a model takes no comm hook")
    if "optim" in present:
        raise RuntimeError(f"the model's comm hook {present} steps optimizers: without it nothing would be trained")


def check_buckets(sync: GradientSynchronizer, name: str | None, buckets: int) -> None:
    """Refuses what is known to hang: PowerSGD's callbacks wait for collectives on Gloo's two threads."""
    chosen = "powerSGD" in (sync.hook_name or "") if name is None else name == "powersgd"
    if chosen and buckets > 1 and process_groups.backend_name(sync.group) == "gloo":
        raise RuntimeError(
            f"PowerSGD hangs on Gloo with several buckets, and there would be {buckets}: ask for a bucket_cap_mb that "
            "holds the whole model too"
        )


def replace(sync: GradientSynchronizer, name: str) -> None:
    """Puts the named hook in the place of the present one, if any."""
    sync.detach_hook()
    if name != NONE:
        sync.attach_hook(*make(sync, name))


def forget_buckets(sync: GradientSynchronizer) -> None:
    """Clears what torch's PowerSGD remembers of each bucket: errors and matrices of its shape."""
    for _, state in sync.hooks:
        if type(state).__name__ == "PowerSGDState":  # torch's module takes a while to import
            for held in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(state, held).clear()
