"""Finds the tensors in a forward's output, whatever object it is.

[Note: which outputs are searched]
A backward is noticed when the gradient of an output arrives, and unused parameters are found by walking the graph from
the outputs, so every tensor of the output counts. Tensors, lists, tuples, dicts, sets, dataclasses, remote references
owned by this process and classes registered with torch's pytree are searched according to their type; any other object
through its `__dict__` and `__slots__`. An output can refer to many objects (a config, a tokenizer), so at most
`_MOST_OBJECTS` such objects are visited, `_DEEPEST` levels deep; tensors that are not found are still averaged, because
a backward is also noticed by its first gradient.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["find_tensors"]

_MOST_OBJECTS = 10_000
_DEEPEST = 100
_CONTAINERS = (list, tuple, set, frozenset)
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_NOTHING_IN_IT = (
    *_PLAIN, bytearray, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    torch.nn.Module, torch.Generator,
)  # fmt: skip


def find_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in `output`, each once, in the order in which they are found.

    See [Note: which outputs are searched]. Cycles are followed once.
    """
    if isinstance(output, torch.Tensor):
        return [output]
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # keeps visited objects alive, so that their ids stay valid
    _search(output, found, seen, 0)
    return list(found.values())


def _search(value: Any, found: dict[int, torch.Tensor], seen: dict[int, Any], depth: int) -> None:
    kind = type(value)
    if kind is torch.Tensor:
        found[id(value)] = value
        return
    if kind in _PLAIN or id(value) in seen or depth > _DEEPEST or len(seen) >= _MOST_OBJECTS:
        return
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
        return
    if isinstance(value, _NOTHING_IN_IT):
        return
    seen[id(value)] = value
    for part in value if isinstance(value, _CONTAINERS) else _inside(value):
        _search(part, found, seen, depth + 1)


def _inside(value: Any) -> Iterable[Any]:
    """The direct contents of an object that is neither tensor nor sequence."""
    if isinstance(value, Mapping):
        return value.values()
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if _is_local_reference(value):
        return [value.local_value()]
    return _attributes(value)


def _is_local_reference(value: Any) -> bool:
    """Whether it is an RRef that this process owns. Programs without RPC don't pay for its import."""
    return type(value).__name__ in ("RRef", "PyRRef") and hasattr(value, "local_value") and bool(value.is_owner())


def _attributes(value: Any) -> Iterable[Any]:
    """The values of an object's own attributes; properties are not called."""
    found = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                found.append(getattr(value, name, None))
    return found
