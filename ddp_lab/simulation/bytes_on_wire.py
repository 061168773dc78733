"""How many bytes of its buckets a model's collectives carry.

A bucket's buffer may be smaller than its parameters (mixed precision averages in 16 bits), and a comm hook may send
less than the buffer. Times of a link count what travels, so whoever asks a link asks here first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["carried", "shares"]

_HALVED = re.compile(r"\b(fp16|bf16)_compress(_hook)?$", re.IGNORECASE)  # also as c10d's built-in hooks are called
_UNKNOWN = re.compile(r"powersgd|quantization|wrapper", re.IGNORECASE)
_HALF = 2  # bytes of a number that such a hook has rounded


def carried(assignment: Mapping[str, Any]) -> list[float] | None:
    """Bytes of each bucket that its all-reduce carries.

    Args:
        assignment: as ranks describe it, see tutorials/site/descriptions.md.

    Returns:
        None where the comm hook alone knows it (PowerSGD, quantization). A hook that is not one of torch's counts as
        one that sends its buffer.
    """
    hook = str((assignment.get("options") or {}).get("comm_hook") or "")
    if _UNKNOWN.search(hook):
        return None
    buffers = [float(one["bytes"]) for one in assignment["buckets"]]
    if not _HALVED.search(hook):
        return buffers
    numels = {one["index"]: one.get("numel", one["bytes"] // 4) for one in assignment["parameters"]}
    halved = [float(_HALF * sum(numels[index] for index in one["parameters"])) for one in assignment["buckets"]]
    return [min(pair) for pair in zip(buffers, halved, strict=True)]


def shares(assignment: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of all buffers, and of all that travels, over those of the parameters in them."""
    of = {one["index"]: one["bytes"] for one in assignment["parameters"]}
    whole = sum(of[index] for one in assignment["buckets"] for index in one["parameters"])
    buffers = sum(one["bytes"] for one in assignment["buckets"])
    found = carried(assignment)
    return buffers / max(whole, 1), (buffers if found is None else sum(found)) / max(whole, 1)
