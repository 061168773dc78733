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

_OWN_NUMBERS = 1 << 40  # no group of all ranks gets there

_C = native.load()
_members: weakref.WeakKeyDictionary[ProcessGroup, list[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Groups:
    """What `torch.distributed.new_group` hands to `_create` as its options."""

    groups: list[ProcessGroup]
    devices: list[torch.device]


def register() -> None:
    """Makes ``"round_robin"`` known to torch.distributed; once is enough."""
    registration.register(NAME, _create, ["cpu", "cuda"], extended_api=True)  # noted by the groups that it is made of


def round_robin_process_group(groups: Sequence[ProcessGroup]) -> ProcessGroup:
    """A group that gives each collective to the next of `groups`, so that several are on their way at once.

    One group works through its collectives one after the other, or with few threads; several use more of a fast link:
    the DDP paper measures it with 1, 3 and 5 groups. The result is an ordinary group: `process_group` of torch's DDP
    and of `ddp_lab.DistributedDataParallel`, or `group` of any function of `torch.distributed`. Call it on each rank
    of the groups, with the groups in the same order; it sends nothing, and ranks outside don't take part.

    - Collectives go to the groups in the order in which the rank enters them: the same operations in the same order
      on all ranks, as any group wants it. Results are those of the groups, and so are works and futures.
    - `send`, `recv`, their asynchronous forms and batches of them always use the first group. Two ranks send and
      receive without the others, whose turns would then differ; and what is sent with a tag must be found by who
      receives it.
    - `barrier` uses all groups: it ends when all that was given to any of them before is done.
    - Each group's own timeout holds; `set_timeout` of the result's backend sets it for all. Aborting it aborts all.
      Destroying it leaves the groups as they are.

    Args:
        groups: groups of the same ranks in the same order, e.g. ``[dist.new_group() for _ in range(3)]``, of any
            backend. It serves the devices that all of them serve. A group in which others also start collectives is
            of use only if all ranks start them in the same order.

    Raises:
        ValueError: there are no groups, one is given twice, this process is not a member, or their ranks differ.
        TypeError: something else than a group.

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
        raise ValueError(f"no device is served by all groups: {serve}")
    options = _Groups(given, [torch.device(name) for name in sorted(shared)])
    unsorted: Any = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # older releases of torch always sort them
    # Named by its members alone: no other process takes part.
    with _uncounted(ranks):
        group = dist.new_group(ranks, backend=NAME, pg_options=options, use_local_synchronization=True, **unsorted)
    assert isinstance(group, ProcessGroup)
    _members[group] = [one.group_name for one in given]
    return group


@contextlib.contextmanager
def _uncounted(ranks: list[int]) -> Iterator[None]:
    """From torch 2.14 on a group that its members make alone is named by the number that names the next group of all
    ranks, and takes it: the others, which were not asked, would give that next group another name, and all would wait
    for ever. So ours take numbers of their own, the smallest that is free, which is the same on all of them.
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
    """c10d's names of the groups that take turns in a group; none if it is no such group."""
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
                f"{what}: this process (rank {dist.get_rank()}) is not a member; call round_robin_process_group on "
                "the members alone"
            )
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"{what} is no process group but {group!r}; torch.distributed.new_group makes one")
        same = next((i for i in range(index) if groups[i] is group), None)
        if same is not None:
            raise ValueError(f"{what} is groups[{same}] once more: each turn needs a group of its own")
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
    """The group on one rank, as c10d asks for it.

    c10d takes it as it is, with the devices that its groups serve; of a backend it would make one for each device.
    """
    if not isinstance(options, _Groups):
        raise ValueError(
            'a "round_robin" group is made of other groups: ddp_lab.comm.round_robin_process_group(groups) makes it'
        )
    backend = _C.round_robin_backend(options.groups)
    group = ProcessGroup(about.store, about.group_rank, about.group_size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    for device in options.devices:
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, backend)
    return group
