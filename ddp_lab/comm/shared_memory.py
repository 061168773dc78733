"""The backend "shm": collectives of CPU ranks on one host through shared memory.

[Note: how ranks find the memory]
Each rank writes into the group's store which host it is on (the boot id of the kernel, so that host names don't
matter), its process id and where its pool is; rank 0 also where its segment is. The others open it through rank 0's
entry in /proc, which the kernel allows only to processes of the same user, and report whether they could. If one could
not (it has other process ids, as in a container, or the kernel forbids it), rank 0 creates memory with a random name;
all open that, report whether they could, and remove the name. Shared memory is used only if all could; else the whole
group uses Gloo. Pools are also opened through /proc; if a rank can't, tensors are copied. Rank 0 reports any such
fallback and its reason in a `FallbackWarning`. ``DDP_LAB_HOST_ID`` replaces the boot id.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import types
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from .. import native
from ..documentation import with_help
from ..errors import FallbackWarning
from . import registration

__all__ = ["NAME", "gloo_of_one_thread", "is_broken", "register"]

NAME = "shm"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HOST_ID = "DDP_LAB_HOST_ID"
_C = native.load()


def register() -> None:
    """Registers ``"shm"`` with torch.distributed; can be called repeatedly."""
    registration.register(NAME, _create, ["cpu"])
    _allow_monitored_barrier()


def _allow_monitored_barrier() -> None:
    """`dist.monitored_barrier` before torch 2.14 refuses every group that is not called "gloo".

    A group "shm" contains a Gloo group, whose barrier it is. So torch's function runs as it is, but for the name of the
    backend that it reads; its frames stay torch's, by which a hang in it is recognised.
    """
    theirs: Any = distributed_c10d.monitored_barrier
    if torch.__version__ >= "2.14" or theirs.__module__ == __name__:
        return

    def get_backend(group: Any = None) -> str:
        names = str(distributed_c10d.get_backend(group))
        return "gloo" if NAME in (names, names.partition("cpu:")[2].partition(",")[0]) else names

    with_shm = types.FunctionType(
        theirs.__code__, {**theirs.__globals__, "get_backend": get_backend}, theirs.__name__, theirs.__defaults__
    )
    functools.update_wrapper(with_shm, theirs)
    with_shm.__module__ = __name__
    distributed_c10d.monitored_barrier = dist.monitored_barrier = with_shm


def is_broken(backend: Any) -> bool:
    """Whether a group's backend is shared memory that a failed operation has made unusable: later ones raise."""
    return bool(_C.shared_memory_broken(backend))


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend for one group, created for c10d on each of its ranks."""
    # torch's agent keeps one store for all attempts, in which there are the addresses and pids of dead ranks.
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    meeting = _Meeting(store, rank, size)
    segment = meeting.segment()
    why_not = unnamed = meeting.agree()
    if not why_not:
        segment.close_descriptor()  # all ranks have mapped the memory: no more opening
    elif meeting.on_one_host:
        try:
            segment = meeting.named_segment()
            why_not = meeting.agree()
        finally:
            meeting.forget_name()
    said = _in_words(why_not, unnamed, meeting.why_no_pools)
    if said and rank == 0:
        warnings.warn(with_help(f"shm: {said}", "shm-falls-back"), FallbackWarning, stacklevel=2)
    within = PrefixStore("gloo", store)
    if why_not:
        return ProcessGroupGloo(within, rank, size, timeout=timeout)
    gloo = gloo_of_one_thread(within, rank, size, timeout)
    return _C.shared_memory_backend(segment, gloo, rank, meeting.pids, meeting.ranks, meeting.pools, timeout)


def gloo_of_one_thread(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Gloo as torch makes it, but it runs one collective at a time.

    [Note: threads of Gloo]
    Torch's threads (two for each device) all write the name of the collective that they have just ended into one
    std::string of the group, without a lock (`ProcessGroupGloo::runLoop`, torch 2.13). A name of more than 15
    characters lies in memory of its own: "_ALLREDUCE_SPARSE". So where sparse tensors are summed, a thread that is
    held up there writes into freed memory or frees it twice, and the process crashes, rarely and later.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in names] or [
        ProcessGroupGloo.create_default_device()
    ]
    options._timeout, options._threads = timeout, 1
    return ProcessGroupGloo(store, rank, size, options)


def _in_words(why_not: str, unnamed: str, why_no_pools: str) -> str:
    """The fallbacks of a group in words; "" if there are none.

    Args:
        why_not: why it can't use shared memory.
        unnamed: why it can't use memory without a name.
        why_no_pools: why its ranks can't read each other's tensors.
    """
    if why_not:
        return f"{why_not}; this group's collectives use Gloo"
    copied = "its tensors are copied" if why_no_pools else ""
    if unnamed:
        return f"{unnamed}; this group's memory is in /dev/shm{copied and f', and {copied}'}"
    return f"{why_no_pools}; this group works, but {copied}" if copied else ""


class _Meeting:
    """One rank's access to the memory of its group; see [Note: how ranks find the memory].

    Attributes:
        why_not: why this rank can't use it.
        why_no_pools: why this rank can't read the others' pools; after `agree`, why any rank can't.
        on_one_host: whether all ranks are.
        ranks: of the group, as the job counts them: messages name these.
        pids: of all ranks; 0 for a rank that shows that it is alive by a lock on the memory.
        pools: those of all ranks; none if a rank can't read them all.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = PrefixStore(NAME, store)
        self._rank, self._size = rank, size
        self._bytes = _C.shared_memory_bytes(size)
        self._name = ""
        self._agreements = 0
        self.why_not = self.why_no_pools = ""
        self.on_one_host = False
        own = dist.get_rank() if dist.is_initialized() else rank  # the first group to be made is the default one
        self._own, self._called = own, f"rank {own}"
        self.ranks: list[int] = []
        self.pids: list[int] = []
        self.pools: list[Any] = []

    def segment(self) -> Any:
        """The group's memory, None if this rank can't use it."""
        mine: dict[str, Any] = {"host": _host(), "namespace": _process_namespace(), "pid": os.getpid()}
        mine["rank"] = self._own
        try:
            mine["pool"] = _C.Pool.own()
        except RuntimeError as error:  # then there are no pools in this group
            mine["why_no_pool"] = f"{self._called} can't create memory for tensors: {error}"
        made = None
        if self._rank == 0:
            try:
                made = _C.Segment.create(self._bytes)
                mine["descriptor"] = made.descriptor
            except RuntimeError as error:
                mine["why_not"] = str(error)
        self._store.set(f"rank {self._rank}", json.dumps(mine))
        ranks = [json.loads(self._store.get(f"rank {rank}")) for rank in range(self._size)]
        self.pids, self.ranks = ([one[name] for one in ranks] for name in ("pid", "rank"))
        first = f"rank {self.ranks[0]}"
        others = [rank for rank, one in enumerate(ranks) if one["host"] != ranks[0]["host"]]
        if others:
            self.why_not = f"ranks {self.ranks[0]} and {self.ranks[others[0]]} are on different hosts"
            return None
        self.on_one_host = True
        strangers = [rank for rank, one in enumerate(ranks) if one["namespace"] != ranks[0]["namespace"]]
        if strangers:
            self.why_not = self.why_no_pools = (
                f"ranks {self.ranks[0]} and {self.ranks[strangers[0]]} can't see each other's processes"
            )
            return None
        if "descriptor" not in ranks[0]:
            self.why_not = self.why_no_pools = f"{first} can't create shared memory: {ranks[0]['why_not']}"
            return None
        self.why_no_pools = next((one["why_no_pool"] for one in ranks if "why_no_pool" in one), "")
        if not self.why_no_pools:
            try:
                self.pools = [_C.Pool.of_process(one["pid"], *one["pool"]) for one in ranks]
            except RuntimeError as error:
                self.why_no_pools = f"{self._called} can't read the tensors of another one: {error}"
        if made is not None:
            return made
        try:
            for pid in self.pids:
                os.close(os.pidfd_open(pid))  # by which a rank notices that another one has failed
            return _C.Segment.attach(ranks[0]["pid"], ranks[0]["descriptor"], self._bytes)
        except (OSError, RuntimeError, AttributeError) as error:  # Python for old kernels has no pidfd_open
            self.why_not = f"{self._called} can't open the memory of {first}: {error}"
            return None

    def named_segment(self) -> Any:
        """The same, if ranks can't open memory without a name."""
        self.why_not = ""
        self.pids = [0] * self._size
        segment = None
        try:
            if self._rank == 0:
                name = f"/ddp_lab-{secrets.token_hex(16)}"
                segment = _C.Segment.create_named(name, self._bytes)
                self._name = name
                self._store.set("name", name)
            else:
                self._name = self._store.get("name").decode()
                if self._name:
                    segment = _C.Segment.attach_named(self._name, self._bytes)
            if segment is not None:
                segment.hold(self._rank)
        except RuntimeError as error:
            self.why_not = f"{self._called} can't open named shared memory: {error}"
            if self._rank == 0 and not self._name:
                self._store.set("name", "")
        return segment

    def forget_name(self) -> None:
        """Removes the name: all ranks have the memory, or one of them failed."""
        if self._name:
            _C.Segment.unlink(self._name)

    def agree(self) -> str:
        """Sends all ranks what this one can use; returns why one of them can't use the memory, ``""`` if all can."""
        self._agreements += 1
        keys = [f"answer {self._agreements} of {rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps({"why_not": self.why_not, "why_no_pools": self.why_no_pools}))
        answers = [json.loads(self._store.get(key)) for key in keys]
        self.why_no_pools = next((answer["why_no_pools"] for answer in answers if answer["why_no_pools"]), "")
        if self.why_no_pools:
            self.pools = []
        return next((answer["why_not"] for answer in answers if answer["why_not"]), "")


def _host() -> str:
    """An id that only processes on one host share."""
    try:
        return os.environ.get(_HOST_ID) or _BOOT_ID.read_text().strip()
    except OSError:  # no /proc: unknown, so share nothing
        return secrets.token_hex(16)


def _process_namespace() -> str:
    """An id that processes with a common namespace of process ids share."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(16)
