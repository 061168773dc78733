"""Why a program of `fully_shard` met a parameter that was still sharded."""

from __future__ import annotations

import traceback

__all__ = ["unregistered_method"]

_MIXED = "got mixed torch.Tensor and DTensor"  # torch's error
_OF_A_ROOT = ("unshard", "reshard", "set_requires_gradient_sync")  # methods that fully_shard adds to a module


def unregistered_method(error: BaseException) -> str:
    """What to do if a method of a sharded module was called besides its forward; "" if the error has another cause."""
    if _MIXED not in str(error):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_locals.get("self"), frame.f_code.co_name
        if not all(hasattr(type(module), method) for method in _OF_A_ROOT):
            continue
        if name == "forward" or name.startswith("_"):  # this one gathers
            return ""
        return (
            f"`{name}` of {type(module).__name__.removeprefix('FSDP')} was called, but only `forward` gathers the "
            f"parameters that fully_shard has sharded: call `register_fsdp_forward_method(model, {name!r})` of "
            "torch.distributed.fsdp before."
        )
    return ""
