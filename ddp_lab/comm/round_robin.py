"""Several groups as one: collectives go to them in turn (DDP paper, section 3.3 and figure 12)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from .. import native
from . import registration

__all__ = ["NAME", "members", "register", "round_robin_process_group"]

NAME = "round_robin"

_OWN_NUMBERS = 1 << 40  # beyond the numbers of groups of all ranks

_C = native.load()
_members: weakref.WeakKeyDictionary[ProcessGroup, list[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Groups:
    """The options that `torch.distributed.new_group` passes to `_create`."""

    groups: list[ProcessGroup]
    devices: list[torch.device]


def register() -> None:
    """Registers ``"round_robin"`` with torch.distributed; can be called repeatedly."""
    registration.register(NAME, _create, ["cpu", "cuda"], extended_api=True)  # recorded by its member groups


def round_robin_process_group(groups: Sequence[ProcessGroup]) -> ProcessGroup:
    """A group that gives each collective to the next of `groups`, so that several are in flight at once.

    One group runs its collectives one after the other, or with few threads; several use more of a fast network: the
    DDP paper measures it with 1, 3 and 5 groups. The result is an ordinary group: `process_group` of torch's DDP
    and of `ddp_lab.DistributedDataParallel`, or `group` of any function of `torch.distributed`. Call it on each rank
    of the groups, with the groups in the same order; the call sends nothing, and other ranks don't take part.

    - Collectives go to the groups in the order in which the rank enters them. As for any group, all ranks must call
      the same operations in the same order. Results, `Work` handles and futures are those of the groups.
    - `send`, `recv`, their asynchronous forms and batches of them always use the first group. Two ranks send and
      receive without the others, whose turns would then differ; and a receiver must find messages by their tags.
    - `barrier` uses all groups: it ends when everything given to any of them before is done.
    - Each group's own timeout applies; `set_timeout` of the result's backend sets it for all. Aborting it aborts all.
      Destroying it leaves the groups as they are.

    Args:
        groups: groups of the same ranks in the same order, e.g. ``[dist.new_group() for _ in range(3)]``, of any
            backend. It serves the devices that all of them serve. If other code also starts collectives in a
            group, all ranks must start them in the same order.

    Raises:
        ValueError: there are no groups, one is given twice, this process is not a member, or their ranks differ.
        TypeError: an argument is not a group.

    Example:
        >>> groups = [dist.new_group(backend="gloo") for _ in range(3)]
        >>> model = DistributedDataParallel(model, process_group=round_robin_process_group(groups))
    """
    register()
    given = list(groups)
    ranks = _check(given)
    shared = set.intersection(*({device.type for device in group._device_types} for group in given))
    if not shared:
        serve = "; ".join(f"groups[{i}] {_names(group._device_types)}" for i, group in enumerate(given))
        raise ValueError(f"the groups have no device in common: {serve}")
    options = _Groups(given, [torch.device(name) for name in sorted(shared)])
    unsorted: Any = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # older releases of torch always sort them
    # Named only by its members: no other process takes part.
    with _uncounted(ranks):
        group = dist.new_group(ranks, backend=NAME, pg_options=options, use_local_synchronization=True, **unsorted)
    assert isinstance(group, ProcessGroup)
    _members[group] = [one.group_name for one in given]
    return group


@contextlib.contextmanager
def _uncounted(ranks: list[int]) -> Iterator[None]:
    """From torch 2.14 on a group that only its members make uses up the number that names the next group of all ranks:
    the others would give that next group another name, and all would wait forever. So ours use numbers of their own,
    the smallest free one, which is the same on all members.
    """
    world: Any = c10d._world
    count, names = world.group_count, set(world.pg_names.values())
    try:
        for number in range(len(names) + 1):
            world.group_count = _OWN_NUMBERS + number
            if c10d._hash_ranks_to_str(ranks) not in names:
                break
        yield
    finally:
        world.group_count = count


def members(group: Any) -> list[str]:
    """c10d's names of the member groups of a group; none if it is not such a group."""
    return _members.get(group, [])


def _check(groups: Sequence[Any]) -> list[int]:
    """Returns the ranks of all groups, or raises the error that names the one that doesn't fit."""
    if not groups:
        raise ValueError("round_robin_process_group needs at least one group")
    first: list[int] = []
    for index, group in enumerate(groups):
        what = f"groups[{index}]"
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"{what}: this process (rank {dist.get_rank()}) is not a member; call round_robin_process_group "
                "only on members"
            )
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"{what} is not a process group but {group!r}; torch.distributed.new_group makes one")
        same = next((i for i in range(index) if groups[i] is group), None)
        if same is not None:
            raise ValueError(f"{what} is the same as groups[{same}]: give each group only once")
        try:
            ranks = dist.get_process_group_ranks(group)
        except KeyError:
            raise ValueError(f"{what} has been destroyed, or was not made by torch.distributed.new_group") from None
        if index and ranks != first:
            raise ValueError(f"{what} has ranks {ranks}, groups[0] has ranks {first}: they must be the same")
        first = ranks
    return first


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(sorted(device.type for device in devices)) or "none"


def _create(about: Any, options: Any) -> ProcessGroup:
    """The group on one rank, created for c10d.

    c10d uses it as it is, with the devices that its groups serve; it would create a backend once for each device.
    """
    if not isinstance(options, _Groups):
        raise ValueError(
            'a "round_robin" group consists of groups: make it with ddp_lab.comm.round_robin_process_group(groups)'
        )
    backend = _C.round_robin_backend(options.groups)
    group = ProcessGroup(about.store, about.group_rank, about.group_size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    for device in options.devices:
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, backend)
    return group
