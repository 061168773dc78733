"""Rank side: objects as bytes that a client without torch can load.

A tensor becomes a numpy array wherever it sits: in a list, a dict, a dataclass, an attribute. dtypes that numpy
lacks (bfloat16, float8) become float32; a 0-dim tensor becomes a numpy scalar. `torch.Size` becomes a tuple,
`torch.dtype` and `torch.device` their names.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
import types
from typing import Any

__all__ = ["NotPortableError", "is_small", "to_bytes"]

_SMALL_BYTES = 1 << 16
_SMALL_ITEMS = 1_000
_SCALARS = (type(None), bool, int, float, complex)


class NotPortableError(TypeError):
    """An object holds something that only exists on the rank; the message names it."""


class _Pickler(pickle.Pickler):
    """Pickles by value what the client knows and refuses the rest by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            _refuse_foreign(obj)
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            import operator

            array = _as_array(obj)
            return (operator.itemgetter(()), (array,)) if array.ndim == 0 else _as_is(array)
        if isinstance(obj, torch.Size):
            return tuple, (list(obj),)
        if isinstance(obj, (torch.dtype, torch.device)):
            return str, (str(obj),)
        return NotImplemented


def to_bytes(value: Any) -> bytes:
    """Pickles `value` so that a process without torch, and without this rank's cells, can load it.

    Args:
        value: any object; costs one copy of its tensors to the host.

    Returns:
        The pickled bytes.

    Raises:
        NotPortableError: the object holds something that can't leave the rank; the message says what.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.DEFAULT_PROTOCOL).dump(value)
    except NotPortableError:
        raise
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise NotPortableError(str(error)) from error
    return buffer.getvalue()


def is_small(value: Any) -> bool:
    """Whether `value` is plain data of at most 64 KiB and 1,000 items: cheap enough to send unasked."""
    items = 0
    size = 0
    stack = [value]
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    while stack:
        each = stack.pop()
        items += 1
        kind = type(each)
        if kind in (str, bytes):
            size += len(each)
        elif kind in (list, tuple, set, frozenset):
            items += len(each)
            stack.extend(each if items <= _SMALL_ITEMS else ())
        elif kind in (dict, collections.OrderedDict):
            items += len(each)
            stack.extend((*each.keys(), *each.values()) if items <= _SMALL_ITEMS else ())
        elif torch is not None and kind is torch.Tensor:
            size += each.numel() * each.element_size()
        elif numpy is not None and (kind is numpy.ndarray or isinstance(each, numpy.generic)):
            size += each.nbytes if not each.dtype.hasobject else _SMALL_BYTES + 1
        elif kind not in _SCALARS:
            return False
        if items > _SMALL_ITEMS or size > _SMALL_BYTES:
            return False
    return True


def _as_array(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.numpy()


def _as_is(array: Any) -> Any:
    return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _refuse_foreign(obj: Any) -> None:
    module = getattr(obj, "__module__", None) or ""
    kind = "class" if isinstance(obj, type) else "function"
    if module == "__main__":
        raise NotPortableError(f"{kind} {obj.__qualname__} was defined on the rank; the client does not have it")
    if module.partition(".")[0] == "torch":
        raise NotPortableError(f"{kind} {module}.{obj.__qualname__} needs torch, which the client does not import")
