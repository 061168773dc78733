"""Detects that a model has changed, and trains its current parameters: frozen, added, removed, reassigned ones.

[Note: a model that changes]
The reducer is built for the parameters that are trained when the model is wrapped. Each synchronised forward compares
the contents of the module's dicts with those at that time (C++, [Note: watching a module]); only if something differs
does Python look closer. If the trained parameters or the set of buffers have changed, all ranks agree again on what
they train (a change on only one rank would otherwise average the wrong tensors), new tensors become rank 0's, and a new
reducer of the next generation replaces the old one. The same holds for `module.double()` and `module.to(device)`, which
keep the parameters but replace their data: autograd makes new accumulators for them, on which the old reducer has no
hooks. (With mixed precision the data change in every step and hooks are renewed, so that does not count.) A model whose
parameters are all frozen, like a critic while the generator trains, needs no reducer: it keeps its current one.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from . import process_groups
from .arguments import BROADCAST_BYTES, warn_user
from .parameters import Survey, kinds_of, module_text, names_text, survey
from .synchronizer import GradientSynchronizer

__all__ = ["adapt", "unchanged", "warn_of_forward"]

_PAUSE_SECONDS = 0.005
_HINT_SECONDS = 5.0  # all ranks come here within a step

# How often the models of a group have changed
_changes_of: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def unchanged(sync: GradientSynchronizer) -> bool:
    """Whether the module's contents are those when the reducer was built, or when it was last found idle."""
    if sync.is_sharded:  # its forward replaces the parameters by other tensors
        return True
    if _module_of(sync) is not sync.module:
        return False
    return bool(sync.seen.unchanged() or (sync.idle_seen is not None and sync.idle_seen.unchanged()))


def adapt(sync: GradientSynchronizer) -> None:
    """Makes the model train its module's current parameters. Communicates if they have changed.

    Raises:
        RuntimeError: the ranks' models differ, or a backward is unfinished.
    """
    replaced = _module_of(sync) is not sync.module
    sync.module = _module_of(sync)
    before, now = sync.survey, survey(sync.module, sync.ignored)
    if replaced and _same_tensors(before, now):  # torch.compile(model.module), say
        sync.seen = now.seen
        return
    now.parameters = _without_substitutes(now.parameters, before.parameters)
    now.trained &= now.parameters.keys()
    if not now.trained:
        sync.idle_seen = now.seen
        return
    now.kinds = kinds_of(now.parameters)
    if sync.options.mixed_precision is not None:
        now.kinds |= before.kinds
    changes, new = _changes(before, now)
    if not changes:
        sync.seen = now.seen
        return
    if sync.inputs.uneven:
        raise RuntimeError(
            _text(sync, changes) + " This is not possible inside join(): ranks that have joined do not take part."
        )
    sync.reducer.begin_forward(True)  # raises if the last backward is unfinished
    _wait_for_all(sync, changes)
    sync.renew(now)
    _broadcast(sync, new)
    warnings.warn(_text(sync, changes), stacklevel=6)


def warn_of_forward(sync: GradientSynchronizer) -> None:
    """After a forward that has changed the module's contents: warns if it has changed which parameters are trained."""
    before, now = sync.survey, survey(sync.module, sync.ignored)
    parameters = _without_substitutes(now.parameters, before.parameters)
    trained = {name for name in now.trained if name in before.trained and parameters[name] is before.parameters[name]}
    if now.trained <= trained:
        return
    warn_user(
        f"The forward of {module_text(sync.module)} has itself put new parameters into the module, or thawed some: "
        f"{names_text(now.trained - trained)}. DistributedDataParallel does not average their gradients of this "
        f"forward on rank {sync.group.rank()}. Make such changes before the model is called, on all ranks."
    )


def _module_of(sync: GradientSynchronizer) -> torch.nn.Module:
    """The module that the wrapper has now: a program may assign another one to `model.module`."""
    owner = sync.owner()
    module = owner._modules.get("module") if owner is not None else None
    return sync.module if module is None else module


def _same_tensors(before: Survey, now: Survey) -> bool:
    """Whether two modules have the same parameters and buffers, by whatever names."""

    def contents(of: Survey) -> list[Any]:
        trained = [id(of.parameters[name]) for name in of.parameters if name in of.trained]
        return [[*map(id, of.parameters.values())], [*map(id, of.buffers.values())], trained]

    return contents(before) == contents(now)


def _wait_for_all(sync: GradientSynchronizer, changes: list[str]) -> None:
    """Waits in the group's store, as long as a collective would, until every rank has noticed a change.

    Only then may the ranks enter collectives about it: other ranks would take them for those of their step.
    A group without a store can't wait.
    """
    group = sync.group
    store = process_groups.store_of(group)
    if store is None:
        return
    count = _changes_of.get(group, 0)
    keys = [f"ddp_lab/change/{count}/{rank}" for rank in range(group.size())]
    rank = group.rank()
    store.set(keys[rank], "; ".join(changes))
    changed = f"the parameters of {module_text(sync.module)} have changed on rank {rank} ({'; '.join(changes)})"

    def missing() -> str:
        return ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))

    hint = time.monotonic() + _HINT_SECONDS
    timeout = process_groups.timeout_of(group._get_backend(sync.device)) or default_pg_timeout
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


def _broadcast(sync: GradientSynchronizer, names: set[str]) -> None:
    """Makes the named parameters and buffers rank 0's."""
    tensors = [*sync.survey.parameters.items(), *sync.buffers.named.items()]
    chosen = [tensor.detach() for name, tensor in tensors if name in names]
    if chosen:
        process_groups.broadcast_coalesced(chosen, sync.group, BROADCAST_BYTES)


def _without_substitutes(
    now: dict[str, torch.nn.Parameter], before: dict[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Restores parameters that `torch.func.functional_call` has temporarily replaced by plain tensors."""
    return {name: p if isinstance(p, torch.nn.Parameter) else before.get(name, p) for name, p in now.items()}


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
        f"{what} {names_text(names)}"
        for what, names in (
            ("frozen:", frozen), ("no longer frozen:", unfrozen), ("added:", added), ("removed:", removed),
            ("reassigned:", reassigned), ("buffers added:", new_buffers),
            ("buffers removed:", before.buffers.keys() - now.buffers.keys()),
        )
        if names
    ]  # fmt: skip
    for dtype, device in sorted(set(converted.values()), key=str):
        alike = [n for n, kind in converted.items() if kind == (dtype, device)]
        said.append(f"now {str(dtype).removeprefix('torch.')} on {device}: {names_text(alike)}")
    return said, {*added, *reassigned, *new_buffers}


def _text(sync: GradientSynchronizer, changes: list[str]) -> str:
    return (
        f"The parameters of {module_text(sync.module)} have changed since it was wrapped in "
        f"DistributedDataParallel ({'; '.join(changes)}). All ranks made the same change and average the gradients of "
        "the parameters trained now; new tensors were broadcast from rank 0. An optimizer made before does not know "
        "new parameters. Frozen ones keep their current gradient."
    )
