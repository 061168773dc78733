"""Backends that can be compared, and collectives that can be measured, as calls without arguments on own buffers.

The size of a collective is that of the largest buffer that a rank has for it: all that is averaged, broadcast or
exchanged, all that one rank gathers, all that is scattered. So a rank's own piece in the gathering and scattering ones
is that size divided by the number of ranks, at least one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ... import comm

__all__ = ["DTYPES", "LIMITS", "OPERATIONS", "SHARED", "Buffers", "available", "groups", "lacks", "limits", "sides_of"]

LIMITS = ("copy", "triad")
"""Operations that are not collectives: all ranks run them at the same time, and memory is the limit."""
SHARED = " shared"
"""Behind a backend's name: the buffer lies in memory of the backend."""
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64")
_ROOT = 0
_UNSUPPORTED = ("support", "implement")
# Torch 2.13 has new names for these two and warns at the old ones.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def available(device: str = "cpu") -> list[str]:
    """Names that `torch.distributed` knows, can use here, and takes for tensors of this device; ours among them."""
    comm.register()
    names = [name for name, devices in dist.Backend.backend_capability.items() if device in devices]
    return sorted(name for name in names if name != "fake" and dist.is_backend_available(name))


def groups(names: Sequence[str]) -> dict[str, Any]:
    """A group of all ranks on each backend; called on every rank of a Gloo world, which is the group for ``"gloo"``."""
    comm.register()
    return {name: dist.group.WORLD if name == "gloo" else dist.new_group(backend=name) for name in names}


class Buffers:
    """The buffers of one rank for collectives of one size.

    Args:
        size: bytes.
        dtype: of the elements.
        ranks: in the group.

    Attributes:
        whole: shape ``[size // itemsize]``.
        cut, other: shape ``[ranks * elements of a piece]``.
        piece: shape ``[elements of whole // ranks]``, at least one.
        inputs, outputs: a piece for each rank, memory of their own.
    """

    def __init__(self, size: int, dtype: torch.dtype, ranks: int) -> None:
        count = max(1, size // dtype.itemsize)
        each = max(1, count // ranks)
        self.whole = torch.ones(count, dtype=dtype)
        self.cut = torch.ones(each * ranks, dtype=dtype)
        self.other = torch.empty_like(self.cut)
        self.piece = torch.ones(each, dtype=dtype)
        self.inputs = [torch.ones(each, dtype=dtype) for _ in range(ranks)]
        self.outputs = [torch.ones(each, dtype=dtype) for _ in range(ranks)]


def _at_root(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    return list(tensors) if dist.get_rank() == _ROOT else None


OPERATIONS: dict[str, Callable[[Buffers, Any], Any]] = {
    "all_reduce": lambda b, group: dist.all_reduce(b.whole, group=group),
    "broadcast": lambda b, group: dist.broadcast(b.whole, _ROOT, group=group),
    "reduce": lambda b, group: dist.reduce(b.whole, _ROOT, group=group),
    "all_gather": lambda b, group: dist.all_gather(b.outputs, b.piece, group=group),
    "all_gather_into_tensor": lambda b, group: _ALL_GATHER(b.cut, b.piece, group=group),
    "reduce_scatter": lambda b, group: dist.reduce_scatter(b.piece, b.inputs, group=group),
    "reduce_scatter_tensor": lambda b, group: _REDUCE_SCATTER(b.piece, b.cut, group=group),
    "all_to_all": lambda b, group: dist.all_to_all(b.outputs, b.inputs, group=group),
    "all_to_all_single": lambda b, group: dist.all_to_all_single(b.other, b.cut, group=group),
    "gather": lambda b, group: dist.gather(b.piece, _at_root(b.outputs), _ROOT, group=group),
    "scatter": lambda b, group: dist.scatter(b.piece, _at_root(b.inputs), _ROOT, group=group),
    "barrier": lambda b, group: dist.barrier(group=group),
}


def limits(buffers: Buffers) -> dict[str, Callable[[], Any]]:
    """The calls of `LIMITS` for buffers as large as `whole`: a memcpy, and a = b + 0.5 c (whole numbers: b + c)."""
    a, b, c = (torch.ones_like(buffers.whole) for _ in range(3))
    alpha = 0.5 if b.is_floating_point() else 1
    return {"copy": partial(a.copy_, b), "triad": partial(torch.add, b, c, alpha=alpha, out=a)}


def lacks(call: Callable[[], Any]) -> str:
    """Calls once; returns torch's words if the backend has no such operation, else ``""``."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        words = str(error).splitlines()[0]
        if not any(word in words.lower() for word in _UNSUPPORTED):
            raise
        return words
    return ""


def sides_of(found: dict[str, Any]) -> list[str]:
    """All sides that any of a result's ``rows`` has: backends, with buffers in their memory too, and limits."""
    wanted = [name + what for name in found["backends"] for what in ("", SHARED)] + list(LIMITS)
    return [name for name in wanted if any(name in row["sides"] | row["missing"] for row in found["rows"])]
