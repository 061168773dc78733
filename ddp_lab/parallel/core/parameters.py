"""The contents of a module: one pass over every submodule, parameter and buffer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import native

__all__ = ["Seen", "Survey", "TrainedParameters", "buffers_now", "kinds_of", "module_text", "names_text", "survey"]

_C = native.load()

# [(kind, dict, (key, value, trained, ...))]: see csrc/python/module_watch.cpp
_Entries = list[tuple[str, dict[str, Any], tuple[Any, ...]]]


class Seen:
    """The contents of a module's dicts at some time."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = tuple(entries)  # the watch only borrows them
        self.unchanged = _C.ModuleWatch(self._entries).unchanged


@dataclass
class Survey:
    """A module's parameters and buffers that are not ignored.

    Attributes:
        parameters: by qualified name; a parameter with several names under the first of them.
        trained: the names of those that require a gradient.
        sparse: the names of those that belong to an embedding with sparse gradients.
        buffers: by qualified name.
        buffer_places: for each name the dict and the key where the module keeps that buffer, or None.
        batch_norm: the name of a SyncBatchNorm layer, if there is one.
        kinds: for each parameter's name its dtype and device; they can change while the parameter stays.
        seen: the dicts in which they were found.
    """

    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    buffer_places: list[tuple[str, Any, str]] = field(default_factory=list)
    batch_norm: str | None = None
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)
    seen: Seen = field(default_factory=lambda: Seen([]))


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters whose gradients a reducer averages, each list by their index in it.

    Attributes:
        names: qualified.
        tensors: the parameters.
        bytes: the size of each.
        kinds: dtype and device of each.
        sparse: whether its gradients are sparse.
    """

    names: list[str]
    tensors: list[torch.nn.Parameter]
    bytes: list[int]
    kinds: list[tuple[torch.dtype, torch.device]]
    sparse: list[bool]

    @classmethod
    def of(cls, found: Survey) -> TrainedParameters:
        """In the order of registration."""
        names = [name for name in found.parameters if name in found.trained]
        tensors = [found.parameters[name] for name in names]
        return cls(
            names=names,
            tensors=tensors,
            bytes=[tensor.numel() * tensor.element_size() for tensor in tensors],
            kinds=[(tensor.dtype, tensor.device) for tensor in tensors],
            sparse=[name in found.sparse for name in names],
        )


def survey(module: torch.nn.Module, ignored: set[str]) -> Survey:
    """Visits every submodule once. `ignored` contains qualified names; those of the root may begin with a dot."""
    if any(name.startswith(".") for name in ignored):
        ignored = {name.removeprefix(".") for name in ignored}
    found = Survey()
    entries: _Entries = []
    known: set[int] = set()
    for prefix, child in _submodules(module):
        sparse = isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse
        if found.batch_norm is None and isinstance(child, torch.nn.SyncBatchNorm):
            found.batch_norm = prefix.rstrip(".")
        parameters, buffers, children = child._parameters, child._buffers, child._modules
        for key, parameter in parameters.items():
            name = prefix + key
            if parameter is None or id(parameter) in known or name in ignored:
                continue
            known.add(id(parameter))
            found.parameters[name] = parameter
            if parameter.requires_grad:
                found.trained.add(name)
            if sparse:
                found.sparse.add(name)
        names = [key for key, _ in buffers.items()]  # a scripted module's dicts can't be iterated otherwise
        found.buffer_places += [(prefix + key, buffers, key) for key in names if prefix + key not in ignored]
        entries += (("p", parameters, _entries(parameters)), ("b", buffers, _names_only(buffers)))
        entries.append(("m", children, _entries(children)))
    found.buffers = buffers_now(found)
    found.kinds = kinds_of(found.parameters)
    # a scripted module keeps its tensors in C++
    found.seen = Seen([entry for entry in entries if isinstance(entry[1], dict)])
    return found


def buffers_now(found: Survey) -> dict[str, torch.Tensor]:
    """The current buffers, each once: a forward may reassign them."""
    known: set[int] = set()
    now: dict[str, torch.Tensor] = {}
    for name, held, key in found.buffer_places:
        buffer = held[key] if key in held else None  # noqa: SIM401 - a scripted module's have no get()
        if buffer is not None and id(buffer) not in known:
            known.add(id(buffer))
            now[name] = buffer
    return now


def _submodules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each submodule once, in the order of named_modules(), with the prefix of its tensors' names."""
    known: set[int] = set()
    waiting: list[tuple[str, torch.nn.Module]] = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        yield prefix, module
        children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        waiting += reversed(children)


def _entries(held: Any) -> tuple[Any, ...]:
    flat: list[Any] = []
    for key, value in held.items():
        flat += (key, value, getattr(value, "requires_grad", None))
    return tuple(flat)


def _names_only(held: Any) -> tuple[Any, ...]:
    return tuple(part for key, _ in held.items() for part in (key, None, None))


def kinds_of(parameters: dict[str, torch.nn.Parameter]) -> dict[str, tuple[torch.dtype, torch.device]]:
    """Dtype and device of each parameter."""
    return {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}


def names_text(names: Iterable[str]) -> str:
    """The first names, quoted, and the number of the others: ``'a', 'b' and 3 more``."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"'{name}'" for name in ordered[:5]) + more


def module_text(module: torch.nn.Module) -> str:
    """The module's class and, if known, the line where its forward is defined: ``Net (train.py:12)``."""
    forward = inspect.getattr_static(type(module), "forward")  # a scripted class has a descriptor that raises
    code = getattr(forward, "__code__", None)
    name = type(module).__name__
    if code is None or code.co_filename.startswith("<"):
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
