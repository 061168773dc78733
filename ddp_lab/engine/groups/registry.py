"""Every process group of this rank with its sockets, so that a thread can end pending collectives.

Gloo has no way to end a waiting collective: its `abort` and `shutdown` have no effect, and destroying a group unblocks
nothing while a model, a `Work` or a variable refers to it. Its sockets can be shut down from any thread, and then every
collective on them fails on both ends. Other backends have a working `abort`.

See [Note: a reused descriptor]. A group's sockets are stored as (descriptor, inode). When the group no longer exists,
its descriptors may be reused by other sockets. So `shut_down_groups` first duplicates the descriptor, compares the
duplicate's inode, and shuts down the duplicate: it shuts exactly what it compared.

See [Note: half a shutdown]. A socket is shut down only for reading: Gloo's thread reads the remaining data, can
still answer its peer, then reads the end, fails all waiting works, and closes the socket, which the peer notices. If it
were also shut down for writing, the answer would fail, and Gloo would fail no work.

See [Note: what is on its way]. Works that Gloo forgets nevertheless ([Note: a work that Gloo forgets] in
`csrc/comm/abortable_work.h`: data being sent or received at that moment) are ended by `abort_orphaned_works`. That
leaks threads of Gloo, so it is better to delay `shut_down_groups` until no more data moves (`bytes_moved`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ... import native
from ...comm.shared_memory import is_broken
from . import sockets
from .sockets import Socket

_CONNECTED_AT_ONCE = {"gloo", "shm"}  # backends whose connections are complete once a group is made ...
_LAZY = "TORCH_GLOO_LAZY_INIT"  # ... without this
_LOOK_SECONDS = 0.005
_MOVING_SECONDS = 2.0
_C = native.load()


@dataclass
class GroupRecord:
    """One process group that this rank is a member of.

    Attributes:
        name: c10d's name of the group; the same on every member.
        ranks: global ranks in the order of the group; empty for the default group.
        backend: backend configuration as given, e.g. ``"cpu:gloo,cuda:nccl"``.
        timeout_seconds: the group's timeout.
        description: c10d's description.
        sockets: the group's sockets as (descriptor, inode).
        made_ns: before it was made (wall clock).
        backends: own names of its backends, whatever was asked for.
    """

    name: str
    ranks: list[int]
    backend: str
    timeout_seconds: float
    description: str
    sockets: list[Socket]
    reference: weakref.ref[Any] = field(repr=False)
    made_ns: int = 0
    backends: tuple[str, ...] = ()
    shut_down: bool = False
    asks_backend: bool = field(default=False, repr=False)  # for its count: a group asks only torch's own backends

    @property
    def group(self) -> Any:
        """The process group, None once it is no longer referenced."""
        return self.reference()

    @property
    def sequence(self) -> int | None:
        """How many collectives this rank has entered on it; None if it was destroyed or its backend does not count."""
        group = self.group
        if group is None:
            return None
        if not self.asks_backend:
            try:
                return int(group._get_sequence_number_for_group())
            except RuntimeError:
                self.asks_backend = True
        try:
            return int(_backends(group)[0]._get_sequence_number_for_group())
        except (RuntimeError, IndexError):
            return None


_records: list[GroupRecord] = []
_left_behind: set[Any] = set()  # groups with threads that are still in a collective; c10d's, no record's
_lock = threading.Lock()
_original: Callable[..., Any] | None = None
_seals = True  # closes Gloo's ports to further connections
_store_port: int | None = None
_unsealed = ""  # why a group's port could not be sealed


def install(*, seals: bool = True) -> None:
    """Starts registering every group made by `torch.distributed`.

    Args:
        seals: whether Gloo's ports are closed to further connections, see [Note: a sealed port] in `sockets.py`.
    """
    global _original, _seals
    _seals = seals
    if _original is None:
        _original = c10d._new_process_group_helper
        c10d._new_process_group_helper = _registering
        _C.make_gloo_abortable()


def adopt() -> None:
    """Registers the groups that exist and are not registered, without their sockets: they can be seen, not ended."""
    with _lock:
        known = [record.group for record in _records]
        for group in list(c10d._world.pg_map):
            if any(group is one for one in known) or group not in c10d._world.pg_group_ranks:  # it is being made
                continue
            _records.append(
                GroupRecord(
                    name=c10d._world.pg_names[group],
                    ranks=list(c10d._world.pg_group_ranks[group]),
                    backend=str(c10d._world.pg_backend_config.get(group, "")),
                    timeout_seconds=0.0,
                    description=str(group.group_desc),
                    sockets=[],
                    reference=weakref.ref(group),
                    backends=_backend_names(group),
                )
            )


def uninstall() -> None:
    """Stops registering and forgets every group: for tests, whose processes are ranks again and again."""
    global _original
    if _original is not None:
        c10d._new_process_group_helper = _original
        _original = None
    forget()


def bound_to(device: torch.device, backend: str) -> dict[str, Any]:
    """The arguments of `init_process_group` that depend on a rank's device.

    Nccl2, which "nccl" builds from torch 2.15 on, uses the GPU of LOCAL_RANK unless it is given one. The former NCCL
    uses the first tensor's, and would make groups of some ranks differently if it were given one.
    """
    nccl2 = hasattr(c10d, "_nccl2_device") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    return {"device_id": device} if nccl2 and device.type == "cuda" and "nccl" in backend else {}


def exclude_port(port: int) -> None:
    """Registers the rendezvous store's port, whose connections belong to no group.

    Only the store in use counts. The system reuses the ports of earlier ones for new connections, and a connection that
    is not assigned to its group can't be shut down.
    """
    global _store_port
    _store_port = port


def alive() -> list[GroupRecord]:
    """The groups that are still referenced, in the order of their creation."""
    with _lock:
        return [record for record in _records if record.group is not None]


def forget() -> None:
    """Forgets every group; their sockets are left alone."""
    with _lock:
        _records.clear()


def seal_store() -> str:
    """Closes the rendezvous store to new connections: all ranks are connected. See [Note: a sealed port].

    Returns:
        Why it could not be done; empty if it was, or the store belongs to another rank.
    """
    return sockets.seal(_store_port) if _store_port is not None else ""


def unsealed() -> str:
    """Why a group's port could not be sealed; empty if all are."""
    return _unsealed


def shut_down_groups() -> int:
    """Ends every collective that waits on any group of this rank, here and on its peers; callable from any thread.

    Returns:
        How many groups were shut down now. They stay unusable: the ranks must rejoin.
    """
    with _lock:
        records = [record for record in _records if not record.shut_down]
        for record in records:
            record.shut_down = True
    for record in records:
        for one in record.sockets:
            sockets.shut_down(one, socket.SHUT_RD)  # see [Note: half a shutdown]
        _abort_others(record.group)
    return len(records)


def abort_orphaned_works(seconds: float = 0.0) -> None:
    """Ends works that still wait on groups that were shut down, after up to `seconds` in which they may end themselves.

    Such a group is never destroyed: that would wait for Gloo's own threads, which run until their timeout.
    """
    ended = [(record, record.group) for record in alive() if record.shut_down]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_C.count_gloo_works(group) for _, group in ended):
        time.sleep(_LOOK_SECONDS)
    for record, group in ended:
        if _C.abort_gloo_works(group, "the collective was unblocked because its process group was shut down"):
            _left_behind.add(group)
            sockets.stop_polling(record.sockets)


def stop_polling() -> None:
    """Stops Gloo's threads from polling data that no work waits for, on groups that were shut down."""
    with _lock:
        sockets.stop_polling([one for record in _records if record.shut_down for one in record.sockets])


def bytes_moved() -> int:
    """The number of bytes through all groups' sockets in both directions; constant when no data moves."""
    with _lock:
        return sockets.bytes_moved([one for record in _records if not record.shut_down for one in record.sockets])


class Moves:
    """Whether data is moving on this rank's connections; see [Note: what is on its way]."""

    def __init__(self) -> None:
        self._moved = bytes_moved()
        self._deadline = time.monotonic() + _MOVING_SECONDS

    def go_on(self) -> bool:
        """Whether data was sent or received since the last call, for some seconds at most."""
        before, self._moved = self._moved, bytes_moved()
        return self._moved != before and time.monotonic() < self._deadline


def shut_down_store() -> int:
    """Ends waits in the rendezvous store on this rank (for a group that not all ranks make); from any thread.

    Returns:
        How many connections were shut down. The ranks must rejoin, which makes another store.
    """
    count = 0
    for one in list(sockets.all_sockets()):
        if sockets.connection_ports(one)[1:] == (_store_port,):
            sockets.shut_down(one)
            count += 1
    return count


def broken() -> bool:
    """Whether a group of this rank is unusable although it was not shut down."""
    return any(is_broken(backend) for record in alive() for backend in _backends(record.group))


def sequences() -> dict[str, int]:
    """Group name -> how many collectives this rank has entered on it; equal on all members when none is incomplete."""
    counts = {record.name: record.sequence for record in alive() if not record.shut_down}
    return {name: count for name, count in counts.items() if count is not None}


def _registering(*args: Any, **kwargs: Any) -> Any:
    global _unsealed
    assert _original is not None
    before, made_ns = {inode for _, inode in sockets.all_sockets()}, time.time_ns()
    group, store = _original(*args, **kwargs)
    if group is None or group is c10d.GroupMember.NON_GROUP_MEMBER:
        return group, store
    bound = dict(zip(("size", "rank", "ranks", "backend", "store", "name"), args, strict=False))
    name = str(kwargs.get("group_name", bound.get("name")))
    with _lock:
        if any(record.group is group for record in _records):  # an existing group, found by its tag
            return group, store
        timeout = kwargs.get("timeout")
        record = GroupRecord(
            name=name,
            ranks=list(kwargs.get("global_ranks_in_group", bound.get("ranks")) or []),
            backend=str(kwargs.get("backend", bound.get("backend"))),
            timeout_seconds=timeout.total_seconds() if timeout is not None else 0.0,
            description=str(kwargs.get("group_desc") or "undefined"),
            sockets=[found for found in sockets.all_sockets() if found[1] not in before and _is_connection(found)],
            reference=weakref.ref(group),
            made_ns=made_ns,
            backends=_backend_names(group),
        )
        _records.append(record)
    if _seals and set(record.backends) <= _CONNECTED_AT_ONCE and not os.environ.get(_LAZY):
        _unsealed = sockets.close_beside(record.sockets) or _unsealed
    return group, store


def _is_connection(one: Socket) -> bool:
    """Whether it is a connected TCP socket that is not one of the rendezvous store's."""
    ports = sockets.connection_ports(one)
    return bool(ports) and _store_port not in ports


def _abort_others(group: Any) -> None:
    """Aborts the group's backends other than Gloo, whose `abort` has no effect."""
    for backend in _backends(group):
        if backend.name() != "gloo":
            backend.abort()


def _backends(group: Any) -> list[Any]:
    if group is None:
        return []
    return [group._get_backend(torch.device(device)) for device in group._device_types]


def _backend_names(group: Any) -> tuple[str, ...]:
    found = set()
    for backend in _backends(group):
        with contextlib.suppress(RuntimeError):  # a third party's backend may have no name
            found.add(str(backend.name()))
    return tuple(sorted(found))
