"""Rejoin: destroys a rank's process groups, rebuilds them, and replaces every reference to an old group by the new one.

A group is identified across ranks and rejoins by its c10d name. Python references to a group (variables, attributes,
lists, closures) are found through the garbage collector and replaced; models also hold theirs in C++ and are notified.
"""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...comm.round_robin import members, round_robin_process_group
from ...errors import ClusterError
from ...parallel.live.model import live_models
from . import registry

_DEFAULT = "default"
_FORGOTTEN_SECONDS = 0.3
_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each model, how many it had given up


class LostGroup:
    """Replaces a process group that could not be rebuilt: any use of it raises and names the group."""

    def __init__(self, name: str, ranks: Sequence[int], why: str) -> None:
        self.__dict__["_lost"] = f"process group {name!r} of ranks {list(ranks)} was lost: {why}. Create it again"

    def __getattr__(self, attribute: str) -> Any:
        raise ClusterError(self.__dict__["_lost"])

    def __repr__(self) -> str:
        return f"<{self.__dict__['_lost']}>"


def inventory() -> dict[str, Any]:
    """This rank's groups besides the default one in plain data, how many names c10d has given, broken backwards.

    ``members`` of a group: the names of the groups that it uses in turn (`comm.round_robin_process_group`).
    """
    default = dist.group.WORLD.group_name if dist.group.WORLD is not None else None
    found = [
        {
            "name": record.name,
            "ranks": record.ranks,
            "backend": record.backend,
            "timeout_seconds": record.timeout_seconds,
            "description": record.description,
            "members": [_DEFAULT if name == default else name for name in members(record.group)],
        }
        for record in registry.alive()
        if record.ranks
    ]
    return {"groups": found, "group_count": c10d._world.group_count, "broken": broken_backwards()}


def broken_backwards() -> list[int]:
    """Models of ours that abandoned a backward since `note_backwards`, by their numbers on all ranks. Any thread."""
    return [
        sync.model_id
        for sync in [model.sync for model in live_models()]
        if sync.reducer.stage()["in_flight"] or _given_up(sync) > _known.get(sync, 0)
    ]


def note_backwards() -> None:
    """Counts only later abandoned backwards as broken: a cell begins, or gradients were discarded."""
    _known.clear()
    _known.update({model.sync: _given_up(model.sync) for model in live_models()})


def _given_up(sync: Any) -> int:
    """How many backwards were begun and not finished."""
    return int(sync.reducer.step()) - int(sync.reducer.finished())


def discard_gradients(broken: Iterable[int]) -> None:
    """Sets the gradients of these models to None: on some ranks they contain a part of a broken step."""
    for sync in [model.sync for model in live_models()]:
        if sync.model_id in broken:
            for parameter in sync.trained.tensors:
                parameter.grad = None
    note_backwards()


def take_down() -> dict[str, Any]:
    """Ends every group of this rank.

    Returns:
        Name -> the destroyed group, as `rebuild` needs it.
    """
    registry.shut_down_groups()
    registry.abort_orphaned_works(_FORGOTTEN_SECONDS)
    old = {record.name if record.ranks else _DEFAULT: record.group for record in registry.alive()}
    for model in live_models():
        model.sync.reducer.abandon()
    if dist.is_initialized():
        dist.destroy_process_group()
    registry.forget()
    return old


def rebuild(old: dict[str, Any], wanted: Sequence[Mapping[str, Any]], group_count: int) -> dict[str, str]:
    """Rebuilds the user's groups, in the same way on all ranks, and replaces references to the old ones.

    Args:
        old: the value of `take_down`.
        wanted: the groups that are alive on any rank, in one order for all ranks.
        group_count: the highest count of names on any rank, so that the next new group gets the same name.

    Returns:
        Name -> why that group could not be built.
    """
    new: dict[str, Any] = {_DEFAULT: dist.group.WORLD}
    lost = {}
    # c10d names a group that its members make without the others by how many groups they have (as many on all ranks,
    # with one for each that a rank is not in), from torch 2.14 on by how many they have made: so that is set for each.
    first = max(group_count, c10d._world.group_count)
    stand_ins: list[object] = []
    names: Any = c10d._world.pg_names
    # Those that are made of others are last.
    for count, group in enumerate(sorted(wanted, key=lambda one: bool(one["members"])), first):
        name, c10d._world.group_count = group["name"], count
        try:
            new[name] = _build(group, new)
        except (RuntimeError, ValueError, TypeError) as error:
            lost[name] = str(error).splitlines()[0]
            new[name] = LostGroup(name, group["ranks"], lost[name])
        if not isinstance(new[name], dist.ProcessGroup):
            stand_ins.append(object())
            names[stand_ins[-1]] = f"not on this rank: {name}"
    for stand_in in stand_ins:
        del names[stand_in]
    # The count restarts if the user's code has made the default group; the names of earlier groups are taken.
    taken = [int(group["name"]) + 1 for group in wanted if group["name"].isdigit()]
    c10d._world.group_count = max(first + len(wanted), *taken, 0)
    if old:
        _repoint([(group, new[name]) for name, group in old.items() if name in new], keep=old)
        _let_go(old)
    return lost


def _let_go(old: dict[str, Any]) -> None:
    """Ends the old groups' threads and sockets now.

    An exception that a cell raised while waiting on a group refers to it from its traceback's frames, and often to
    itself: such a group would stay, with four threads and a dozen files, until the next full garbage collection.

    Destroying a group joins its threads, which may take a while: nothing may wait for that.
    """
    given = dict(old)
    old.clear()

    def release() -> None:
        left = [weakref.ref(group) for group in given.values()]
        given.clear()
        for generation in (1, 2):  # all generations take 0.1 s and more, during which the next cell waits for the GIL
            if any(reference() is not None for reference in left):
                gc.collect(generation)

    threading.Thread(target=release, name="ddp_lab-let-go", daemon=True).start()


def _build(group: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    if group["members"]:
        gone = [name for name in group["members"] if name not in others]
        if gone:
            raise RuntimeError(f"the groups that it consisted of were destroyed before: {', '.join(gone)}")
        return round_robin_process_group([others[name] for name in group["members"]])
    numbered = group["name"].isdigit()
    if numbered:
        c10d._world.group_count = int(group["name"])  # c10d names groups by counting
    return dist.new_group(
        group["ranks"],
        timeout=timedelta(seconds=group["timeout_seconds"]),
        backend=group["backend"],
        use_local_synchronization=not numbered,
        group_desc=group["description"],
    )


def _models() -> Iterator[Any]:
    """Every live DistributedDataParallel, ours and torch's, but those whose constructor has failed."""
    yield from (model.sync.owner() for model in live_models())
    for candidate in gc.get_objects():
        if type(candidate) is torch.nn.parallel.DistributedDataParallel and "reducer" in vars(candidate):
            yield candidate


def _repoint(groups_: Sequence[tuple[Any, Any]], keep: dict[str, Any]) -> None:
    """Gives models and other holders of a group the new one; one pass over all objects for all groups.

    Args:
        groups_: old and new ones.
        keep: the only dict in which the old ones stay.
    """
    for model in filter(None, _models()):
        for old, new in groups_:
            if model.process_group is old and not isinstance(new, LostGroup):
                model._update_process_group(new)
                reducer = getattr(model, "reducer", None)
                if reducer is not None and hasattr(reducer, "_reset_state"):
                    reducer._reset_state()
    # No closure here may capture an old group: its cell would be among the holders.
    for holder in gc.get_referrers(*(old for old, _ in groups_)):
        if holder is not keep:
            for old, new in groups_:
                _replace(holder, old, new)


def _replace(holder: Any, old: Any, new: Any) -> None:
    """Puts `new` where a list, a closure, a dict or an object's attributes hold `old`."""
    if isinstance(holder, list):
        if any(item is old for item in holder):
            holder[:] = [new if item is old else item for item in holder]
    elif isinstance(holder, types.CellType):
        if holder.cell_contents is old:
            holder.cell_contents = new
    else:
        # An instance's attributes may be stored in it, with no dict that the collector knows of.
        names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(names, dict):
            names.update({name: new for name, value in names.items() if value is old})
