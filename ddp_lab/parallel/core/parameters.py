"""What a model consists of, and noticing when it no longer does: frozen, added, removed and reassigned parameters.

[Note: a model that changes]
The reducer is built for the parameters that are trained when the model is wrapped. Each synchronised forward compares
what the module's dicts hold with what they held then (C++, [Note: watching a module]); only if something differs
does Python look closer. Is it a change of the trained parameters or of the set of buffers, all ranks agree anew on
what they train (a change on one rank alone would otherwise average the wrong tensors), new tensors become rank 0's, and
a new reducer of the next generation takes the old one's place. The same goes for `module.double()` or
`module.to(device)`, which keep the parameters and give them other data: autograd makes new accumulators for them, on
which the old reducer has no hooks. (With mixed precision data change in every step, and hooks are made anew: then they
do not count.) A model whose parameters are all frozen, as a
critic is while the generator trains, needs no reducer: it keeps the one it has.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from ... import native
from . import process_groups
from .messages import module_text
from .timeouts import timeout_of

if TYPE_CHECKING:
    from .model_state import ModelState

__all__ = ["Seen", "Survey", "adapt", "buffers_now", "survey", "unchanged"]

_C = native.load()
_PAUSE_SECONDS = 0.005
_HINT_SECONDS = 5.0  # all ranks come here within a step

# How often the models of a group have changed
_changes_of: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

# [(kind, dict, (key, value, trained, ...))]: see csrc/python/module_watch.cpp
_Entries = list[tuple[str, dict[str, Any], tuple[Any, ...]]]


class Seen:
    """What the dicts of a module held at some time."""

    def __init__(self, entries: _Entries) -> None:
        self._entries = tuple(entries)  # the watch only borrows them
        self.unchanged = _C.ModuleWatch(self._entries).unchanged


@dataclass
class Survey:
    """What a module holds that is not ignored.

    Attributes:
        parameters: by qualified name; a parameter with several names under the first of them.
        trained: the names of those that require a gradient.
        sparse: the names of those that belong to an embedding with sparse gradients.
        buffers: by qualified name.
        buffer_places: for each name the dict and the key where the module keeps that buffer, or None.
        batch_norm: the name of a SyncBatchNorm layer, if there is one.
        kinds: for each parameter's name its dtype and device; they can change while the parameter stays.
        seen: what they were found in.
    """

    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    buffer_places: list[tuple[str, Any, str]] = field(default_factory=list)
    batch_norm: str | None = None
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)
    seen: Seen = field(default_factory=lambda: Seen([]))


def survey(module: torch.nn.Module, ignored: set[str]) -> Survey:
    """Looks at every submodule once. `ignored` holds qualified names; those of the root may begin with a dot."""
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
    found.kinds = _kinds(found.parameters)
    # a scripted module keeps its tensors in C++
    found.seen = Seen([entry for entry in entries if isinstance(entry[1], dict)])
    return found


def buffers_now(found: Survey) -> dict[str, torch.Tensor]:
    """The buffers that are in their places now, each once: a forward may assign them anew."""
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


def unchanged(model: ModelState) -> bool:
    """Whether the module holds what it did when the reducer was built, or when it was last found idle."""
    if model._is_sharded:  # its forward puts other tensors in the places of the parameters
        return True
    return bool(model._seen.unchanged() or (model._idle_seen is not None and model._idle_seen.unchanged()))


def adapt(model: ModelState) -> None:
    """Makes the model train what its module holds now. Communicates, if that is something else than before.

    Raises:
        RuntimeError: the ranks do not hold the same model (any more), or a backward is unfinished.
    """
    before, now = model._survey, survey(model.module, model.parameters_to_ignore)
    now.parameters = _without_substitutes(now.parameters, before.parameters)
    now.trained &= now.parameters.keys()
    if not now.trained:
        model._idle_seen = now.seen
        return
    now.kinds = _kinds(now.parameters)
    if model.mixed_precision is not None:
        now.kinds |= before.kinds
    changes, new = _changes(before, now)
    if not changes:
        model._seen = now.seen
        return
    if model._join_config.enable:
        raise RuntimeError(
            _text(model, changes) + " This can't be done inside join(): the ranks that have joined miss it."
        )
    model.reducer.begin_forward(True)  # raises if the last backward is unfinished
    _wait_for_all(model, changes)
    model._renew_reducer(now)
    _broadcast(model, new)
    warnings.warn(_text(model, changes), stacklevel=6)


def _wait_for_all(model: ModelState, changes: list[str]) -> None:
    """Waits in the group's store, as long as a collective would, until every rank has noticed a change.

    Only then may the ranks enter collectives about it: to a rank that has not changed they would be those of its step.
    A group without a store can't wait.
    """
    group = model.process_group
    store = process_groups.store_of(group)
    if store is None:
        return
    count = _changes_of.get(group, 0)
    keys = [f"ddp_lab/change/{count}/{rank}" for rank in range(group.size())]
    rank = group.rank()
    store.set(keys[rank], "; ".join(changes))
    changed = f"the parameters of {module_text(model.module)} have changed on rank {rank} ({'; '.join(changes)})"

    def missing() -> str:
        return ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))

    hint = time.monotonic() + _HINT_SECONDS
    timeout = timeout_of(group._get_backend(model.device)) or default_pg_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):  # not store.wait(): an interrupt could not end it
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"DDP expects same model across all ranks, but {changed} and not on rank {missing()}. "
                "Change them on all ranks between the same two steps."
            )
        if time.monotonic() > hint:
            hint = math.inf
            warnings.warn(
                f"DDP waits for the same change on all ranks: {changed} and not yet on rank {missing()}.", stacklevel=7
            )
        time.sleep(_PAUSE_SECONDS)
    _changes_of[group] = count + 1


def _broadcast(model: ModelState, names: set[str]) -> None:
    """Makes the named parameters and buffers rank 0's."""
    tensors = [*model._survey.parameters.items(), *model.named_module_buffers.items()]
    chosen = [tensor.detach() for name, tensor in tensors if name in names]
    if chosen:
        size = model.broadcast_bucket_size
        process_groups.broadcast_coalesced(chosen, model.process_group, size)


def _without_substitutes(
    now: dict[str, torch.nn.Parameter], before: dict[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Puts parameters back for whose place `torch.func.functional_call` has borrowed a plain tensor."""
    return {name: p if isinstance(p, torch.nn.Parameter) else before.get(name, p) for name, p in now.items()}


def _kinds(parameters: dict[str, torch.nn.Parameter]) -> dict[str, tuple[torch.dtype, torch.device]]:
    return {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}


def _changes(before: Survey, now: Survey) -> tuple[list[str], set[str]]:
    """What differs, in words, and the names of tensors that are new."""
    frozen = [n for n in before.trained - now.trained if before.parameters[n] is now.parameters.get(n)]
    unfrozen = [n for n in now.trained - before.trained if now.parameters[n] is before.parameters.get(n)]
    shared = now.parameters.keys() & before.parameters.keys()
    reassigned = [n for n in shared if now.parameters[n] is not before.parameters[n]]
    converted = {n: now.kinds[n] for n in shared.difference(reassigned) if now.kinds[n] != before.kinds[n]}
    added = now.parameters.keys() - before.parameters.keys()
    removed = before.parameters.keys() - now.parameters.keys()
    new_buffers = now.buffers.keys() - before.buffers.keys()
    said = [
        f"{what} {_names(names)}"
        for what, names in (
            ("frozen:", frozen), ("no longer frozen:", unfrozen), ("added:", added), ("removed:", removed),
            ("assigned anew:", reassigned), ("buffers added:", new_buffers),
            ("buffers removed:", before.buffers.keys() - now.buffers.keys()),
        )
        if names
    ]  # fmt: skip
    for dtype, device in sorted(set(converted.values()), key=str):
        alike = [n for n, kind in converted.items() if kind == (dtype, device)]
        said.append(f"now {str(dtype).removeprefix('torch.')} on {device}: {_names(alike)}")
    return said, {*added, *reassigned, *new_buffers}


def _names(names: Any) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"'{name}'" for name in ordered[:5]) + more


def _text(model: ModelState, changes: list[str]) -> str:
    return (
        f"The parameters of {module_text(model.module)} have changed since it was wrapped in "
        f"DistributedDataParallel ({'; '.join(changes)}). The ranks have agreed on it and average the gradients of "
        "what is trained now; new tensors were broadcast from rank 0. An optimizer made before does not know new "
        "parameters. Frozen ones keep the gradient they have."
    )
