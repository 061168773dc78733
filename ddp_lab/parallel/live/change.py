"""A change of a model's buckets or comm hook: as requested, and as rank 0 has decided it for all ranks.

Comm hooks have names, so that the client can request one: torch's, and those that the ranks' program has named.

[Note: replacing a comm hook]
A hook may be replaced between two backwards: none of its collectives is in flight then. All ranks must replace it
between the same two, because hooks differ in the collectives they enter. The state of torch's PowerSGD is kept by
bucket, and is discarded whenever the buckets change. Hooks that run an optimizer's step can't be replaced. With hooks
that do not synchronise all ranks in each backward nothing can be changed live: the ranks change in the same step
([Note: a change while training runs]) only because they wait for each other.
"""

from __future__ import annotations

import difflib
import functools
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from ...protocol.messages import Change
from ..core import comm_hooks, process_groups
from ..core.arguments import MEBIBYTE, BucketCaps
from ..core.synchronizer import GradientSynchronizer

__all__ = ["Decision", "apply", "check", "decide", "describe", "name_hook"]

ORDERS = ("ready", "registration", "reversed")


@dataclass(frozen=True)
class Decision:
    """A change in which everything is decided that might differ between ranks.

    Attributes:
        caps: size limits in bytes; None: unchanged.
        order: indices of all trained parameters in the order of the buckets; None: unchanged.
        generation: version of the bucket layout for which `order` was decided.
        comm_hook: a name; None: unchanged.
        words: text of the mark.
    """

    caps: BucketCaps | None
    order: list[int] | None
    generation: int
    comm_hook: str | None
    words: str

    def text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Decision:
        """The inverse of `text`."""
        made = json.loads(text)
        if made["caps"] is not None:
            made["caps"] = BucketCaps(**{**made["caps"], "each": tuple(made["caps"]["each"])})
        return cls(**made)


def check(sync: GradientSynchronizer, change: Change) -> None:
    """Refuses impossible changes of this model, before anything is changed on any rank.

    Raises:
        ValueError: the change is invalid.
        RuntimeError: this model can't be changed.
    """
    if sync.in_python or not sync.survey.trained:
        raise RuntimeError("this model has no buckets to change: it uses the Python reducer, or trains no parameter")
    _check_caps(change)
    _order_of(sync, change)
    _check_hook(sync, change.comm_hook)
    caps = _caps_of(sync, change)
    made = sync.assigned(caps, sync.held_order) if caps is not None else sync.assignment
    _check_hook_buckets(sync, change.comm_hook, len(made))


def _check_caps(change: Change) -> None:
    several = change.bucket_cap_mb_list
    if several is not None and (change.bucket_cap_mb is not None or change.first_bucket_mb is not None):
        raise ValueError("bucket_cap_mb_list can't be combined with the other sizes: it sets the limit of every bucket")
    if several is not None and not len(several):
        raise ValueError("bucket_cap_mb_list must contain at least one size")
    for cap in (change.bucket_cap_mb, change.first_bucket_mb, *(several or ())):
        if cap is not None and not cap > 0:
            raise ValueError(f"a bucket size limit must be positive, got {cap} MiB")
    if change == Change():
        raise ValueError("no change was given")


def _caps_of(sync: GradientSynchronizer, change: Change) -> BucketCaps | None:
    small_last = sync.caps.small_last
    if change.bucket_cap_mb_list is not None:
        each = tuple(int(cap * MEBIBYTE) for cap in change.bucket_cap_mb_list)
        return BucketCaps(max(each), max(each), each, small_last)
    if change.bucket_cap_mb is None and change.first_bucket_mb is None:
        return None
    others = sync.caps.others if change.bucket_cap_mb is None else int(change.bucket_cap_mb * MEBIBYTE)
    first = others if change.first_bucket_mb is None else int(change.first_bucket_mb * MEBIBYTE)
    return BucketCaps(first, others, (), small_last)


def _order_of(sync: GradientSynchronizer, change: Change) -> list[int] | None:
    count = len(sync.trained.names)
    if change.order is None:
        return None
    if isinstance(change.order, str):
        if change.order not in ORDERS:
            raise ValueError(f"order={change.order!r}: choose one of {', '.join(ORDERS)}, or give all names")
        if change.order == "ready":
            ready = [int(index) for index in sync.reducer.ready_order()]
            return ready if sorted(ready) == list(range(count)) else sync.held_order
        return list(range(count)) if change.order == "registration" else list(reversed(range(count)))
    if sorted(change.order) != sorted(sync.trained.names):
        missing = sorted(set(sync.trained.names) - set(change.order))
        unknown = sorted(set(change.order) - set(sync.trained.names))
        raise ValueError(
            f"order must contain each of the {count} trained parameters once (missing: {missing[:5]}, unknown: "
            f"{unknown[:5]})"
        )
    place = {name: index for index, name in enumerate(sync.trained.names)}
    return [place[name] for name in change.order]


def decide(sync: GradientSynchronizer, change: Change) -> Decision:
    """The decision for all ranks, made by one of them because only one order of readiness can be used."""
    return Decision(
        caps=_caps_of(sync, change),
        order=_order_of(sync, change),
        generation=int(sync.reducer.generation()),
        comm_hook=change.comm_hook,
        words=change.words(),
    )


def apply(sync: GradientSynchronizer, decision: Decision) -> None:
    """Carries it out; communicates nothing. Between two backwards, on the thread that trains.

    Raises:
        RuntimeError: the last backward is unfinished.
    """
    if sync.reducer.in_flight():
        sync.reducer.begin_forward(True)  # discards a failed backward; raises if it is only unfinished
    if decision.caps is not None:
        sync.caps = decision.caps
    if decision.comm_hook is not None:
        _replace_hook(sync, decision.comm_hook)
    _forget_buckets(sync)
    if sync.may_still_rebuild:  # and will then use the new sizes
        sync.describe()
    elif decision.caps is None and decision.order is None:
        sync.reducer.rebuild(sync.assignment)
        sync.describe()
    else:
        # An order that was decided for other parameters, or before the buckets have followed a drift, is out of date:
        # on all ranks alike, since all have the same generation.
        known = decision.order is not None and decision.generation == sync.reducer.generation()
        sync.reassign(decision.order if known and decision.order is not None else sync.held_order)


def describe(sync: GradientSynchronizer) -> dict[str, Any]:
    """A model's current settings, in the form of a change."""
    caps = sync.caps
    return {
        "bucket_cap_mb": caps.others / MEBIBYTE,
        "first_bucket_mb": (caps.each[0] if caps.each else caps.first) / MEBIBYTE,
        "bucket_cap_mb_list": [cap / MEBIBYTE for cap in caps.each] or None,
        "comm_hook": sync.hook_name,
        "buckets": len(sync.assignment),
    }


# -- comm hooks by name

_Factory = Callable[[GradientSynchronizer], tuple[comm_hooks.Hook, object]]

_NONE = "none"
_UNCOUPLED = ("noop_hook", "post_localSGD_hook")


def _bf16(sync: GradientSynchronizer) -> tuple[comm_hooks.Hook, object]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    reference = weakref.ref(sync)  # the model's group may be replaced later

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


_factories: dict[str, _Factory] = {
    "fp16": lambda sync: (BuiltinCommHookType.FP16_COMPRESS, None),
    "bf16": _bf16,
    "powersgd": _power_sgd,
}


def name_hook(name: str, hook: Callable[..., Any], state: Callable[[Any], object] | None = None) -> None:
    """See `DistributedDataParallel.register_named_comm_hook`."""
    if name in (_NONE, "fp16", "bf16", "powersgd"):
        raise ValueError(f"the name {name!r} is taken: choose another one")
    comm_hooks.check_hook(hook)
    _factories[name] = lambda sync: (hook, None if state is None else state(sync.owner()))


def _check_hook(sync: GradientSynchronizer, name: str | None) -> None:
    """Refuses unknown names, and models whose hook can't be replaced or does not synchronise the ranks."""
    present = sync.hook_name or ""
    if any(word in present for word in _UNCOUPLED):
        raise RuntimeError(
            f"the model's comm hook is {present}, with which ranks do not synchronise in each backward, so they can't "
            "change in the same step. Call model.reconfigure(...) on all ranks instead"
        )
    if name is None:
        return
    known = [_NONE, *_factories]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"no comm hook is known as {name!r} on this rank{hint}: choose one of {', '.join(map(repr, known))}"
        )
    if sync.options.mixed_precision is not None:
        raise RuntimeError("mixed_precision reduces gradients itself: such a model can't have a comm hook")
    if "optim" in present:
        raise RuntimeError(f"the comm hook {present} runs the optimizer step; without it the model would not train")


def _check_hook_buckets(sync: GradientSynchronizer, name: str | None, buckets: int) -> None:
    """Refuses a known hang: PowerSGD's callbacks wait for collectives on Gloo's two threads."""
    chosen = "powerSGD" in (sync.hook_name or "") if name is None else name == "powersgd"
    if chosen and buckets > 1 and process_groups.backend_name(sync.group) == "gloo":
        raise RuntimeError(
            f"PowerSGD hangs on Gloo with several buckets, and there would be {buckets}: give also a bucket_cap_mb "
            "that is larger than the model"
        )


def _replace_hook(sync: GradientSynchronizer, name: str) -> None:
    """Replaces the current hook, if any, by the named one."""
    sync.detach_hook()
    if name != _NONE:
        sync.attach_hook(*_factories[name](sync))


def _forget_buckets(sync: GradientSynchronizer) -> None:
    """Clears PowerSGD's state of each bucket: errors and matrices of its shape."""
    for _, state in sync.hooks:
        if type(state).__name__ == "PowerSGDState":  # torch's module takes a while to import
            for held in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(state, held).clear()
