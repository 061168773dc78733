"""What a model consists of, and noticing when it no longer does: frozen, added, removed and reassigned parameters.

[Note: a model that changes]
The reducer is built for the parameters that are trained when the model is wrapped. Each synchronised forward compares
what the module's dicts hold with what they held then (C++, [Note: watching a module]); only if something differs
does Python look closer. Is it a change of the trained parameters or of the set of buffers, all ranks agree anew on
what they train (a change on one rank alone would otherwise average the wrong tensors), new tensors become rank 0's, and
a new reducer of the next generation takes the old one's place. A model whose parameters are all frozen, as a
critic is while the generator trains, needs no reducer: it keeps the one it has.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import native
from .messages import module_text

if TYPE_CHECKING:
    from .model_state import ModelState

__all__ = ["Survey", "adapt", "survey", "unchanged"]

_C = native.load()

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
        buffers: the names of the buffers.
        seen: what they were found in.
    """

    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    seen: Seen = field(default_factory=lambda: Seen([]))


def survey(module: torch.nn.Module, ignored: set[str]) -> Survey:
    """Looks at every submodule once. `ignored` holds qualified names; those of the root may begin with a dot."""
    found = Survey()
    seen: _Entries = []
    known: set[int] = set()
    for prefix, child in module.named_modules():
        start = prefix + "." if prefix else ""
        sparse = isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse
        parameters, buffers, children = child._parameters, child._buffers, child._modules
        for key, parameter in parameters.items():
            name = start + key
            if parameter is None or id(parameter) in known or name in ignored or f"{prefix}.{key}" in ignored:
                continue
            known.add(id(parameter))
            found.parameters[name] = parameter
            if parameter.requires_grad:
                found.trained.add(name)
            if sparse:
                found.sparse.add(name)
        found.buffers.update(start + key for key, buffer in buffers.items() if buffer is not None)
        seen += [("p", parameters, _entries(parameters)), ("b", buffers, _entries(buffers, names_only=True))]
        seen.append(("m", children, _entries(children, names_only=False)))
    found.buffers -= ignored
    # a scripted module keeps its tensors in C++
    found.seen = Seen([entry for entry in seen if isinstance(entry[1], dict)])
    return found


def _entries(held: Any, names_only: bool = False) -> tuple[Any, ...]:
    flat: list[Any] = []
    for key, value in held.items():
        flat += (key, None if names_only else value, getattr(value, "requires_grad", None))
    return tuple(flat)


def unchanged(model: ModelState) -> bool:
    """Whether the module holds what it did when the reducer was built, or when it was last found idle."""
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
    changes, new = _changes(before, now)
    if not changes:
        model._seen = now.seen
        return
    if model._join_config.enable:
        raise RuntimeError(
            _text(model, changes) + " This can't be done inside join(): the ranks that have joined miss it."
        )
    model.reducer.begin_forward(True)  # raises if the last backward is unfinished
    model._renew_reducer(now)
    _broadcast(model, new)
    warnings.warn(_text(model, changes), stacklevel=6)


def _broadcast(model: ModelState, names: set[str]) -> None:
    """Makes the named parameters and buffers rank 0's."""
    tensors = [*model._survey.parameters.items(), *model.named_module_buffers.items()]
    chosen = [tensor.detach() for name, tensor in tensors if name in names]
    if chosen:
        size = model.broadcast_bucket_size
        dist._broadcast_coalesced(model.process_group, chosen, size, 0)  # type: ignore[attr-defined]


def _without_substitutes(
    now: dict[str, torch.nn.Parameter], before: dict[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Puts parameters back for whose place `torch.func.functional_call` has borrowed a plain tensor."""
    return {name: p if isinstance(p, torch.nn.Parameter) else before.get(name, p) for name, p in now.items()}


def _changes(before: Survey, now: Survey) -> tuple[list[str], set[str]]:
    """What differs, in words, and the names of tensors that are new."""
    frozen = [n for n in before.trained - now.trained if before.parameters[n] is now.parameters.get(n)]
    unfrozen = [n for n in now.trained - before.trained if now.parameters[n] is before.parameters.get(n)]
    shared = now.parameters.keys() & before.parameters.keys()
    reassigned = [n for n in shared if now.parameters[n] is not before.parameters[n]]
    added = now.parameters.keys() - before.parameters.keys()
    removed = before.parameters.keys() - now.parameters.keys()
    new_buffers = now.buffers - before.buffers
    said = [
        f"{what} {_names(names)}"
        for what, names in (
            ("frozen:", frozen), ("no longer frozen:", unfrozen), ("added:", added), ("removed:", removed),
            ("assigned anew:", reassigned), ("buffers added:", new_buffers),
            ("buffers removed:", before.buffers - now.buffers),
        )
        if names
    ]  # fmt: skip
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
