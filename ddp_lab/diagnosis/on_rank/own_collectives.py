"""Collectives that this rank has given to its groups: the newest ones, and those in flight.

Torch's Flight Recorders record each of them in C++, whatever code starts it, including the reducer, in about a
microsecond. They are on by default; `install` only makes their rings smaller, so that a dump takes a few milliseconds.

[Note: which recorder notes what]
"shm" has a log of its own. Gloo writes into torch's Flight Recorder by itself, and so does NCCL up to torch 2.14, and
later with ``TORCH_DIST_USE_NCCL2=0``: each into an instance of its own. From torch 2.15 on every other backend (nccl2,
which is what "nccl" then builds, "mpi", a third party's) has an instance of its own name; torch attaches a hook
that writes into it to each group (`distributed_c10d._maybe_attach_flight_recorder`). Before 2.15, nothing records them.

The right instance is determined by the own name of a group's backend, not by the requested one: "nccl" may have built
nccl2, and "shm" may have become Gloo. Entries have the same form in all of them.

The hook keeps no CUDA events: a dump of its entries queries no GPU, and needs none of the care of [Note: looks at a
GPU's collectives]. The backend reports to it that a collective has ended: nccl2 within a second or so (`_end_s`). For
one that never reports, entries count as ended when they are launched, so that none of them is ever in flight.

[Note: looks at a GPU's collectives]
A dump of NCCL's recorder asks CUDA whether kernels have ended. That can block while the GPU hangs, and must not hold
the GIL then: the rank could no longer be interrupted ([Note: a GPU that hangs]). So it uses torch's own server for such
queries, whose threads are C++, through a Unix socket in a private folder of this user. It waits at most `_NCCL_S`, and
after a late answer it sends no other query for `_AFTER_LATE_S`.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import json
import os
import pickle
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import _dump_fr_trace as _dump  # type: ignore[attr-defined, unused-ignore]

from ... import native
from ...engine.groups import registry
from ...parallel.live.model import live_models
from ...protocol.messages import InFlight, OldestFlight
from ..collectives_in_flight import Entry, Numbered, entries_of, group_description, numbered, tensors_in_words

__all__ = ["NcclRecorder", "collectives", "description_of", "frames_of", "in_flight", "install", "left"]

_RING = "TORCH_FR_BUFFER_SIZE"
_FORMER_RING = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "512"
_MOST_OPEN = 100  # of a group: the oldest ones
_NOTED_S = 0.2  # until a collective that a group has counted is recorded
_PAUSE_S = 0.005  # between looks whether the last ones have ended
_HANDLER = "dump_nccl_trace_json"
_NCCL_S = 0.3
_AFTER_LATE_S = 5.0
_FOUND = 200  # HTTP's
_END_S = 0.05
_END_BY_HOOK_S = 1.5  # nccl2's thread looks once a second
_C = native.load()
_BY_NAME = "backend:" in (_dump.__doc__ or "")  # torch 2.15: an instance for each backend
Dump = Mapping[str, Any]


class _Known(NamedTuple):
    """One living group's collectives."""

    record: registry.GroupRecord
    backend: str
    numbered: Numbered


class _Look(NamedTuple):
    """A snapshot of all groups: their counts, since when those were seen, when it was taken, its result."""

    state: Any
    since: float
    at: float
    found: list[_Known]


_nccl: NcclRecorder | None = None
_last = _Look(None, 0.0, 0.0, [])


def install(folder: Path, *, smaller: bool = True) -> None:
    """Prepares queries, before the first group is made.

    Args:
        folder: where a folder with a socket may be created.
        smaller: whether to make the recorders' rings smaller, if the user has not set their size.
    """
    global _nccl
    _nccl = _nccl or NcclRecorder(folder)
    if smaller and _FORMER_RING not in os.environ:
        os.environ.setdefault(_RING, _ENTRIES)


def collectives(began_ns: int | None) -> list[dict[str, Any]]:
    """The collectives of every living group of this rank, JSON-able. Callable from any thread.

    Args:
        began_ns: when the rank's last cell began (host time in ns); None if it has run none.

    Returns:
        For each ``group`` and ``backend``: its ``ranks`` (empty: all) and ``description``, ``entered`` (how many
        collectives; None if unknown), ``sequence`` (its backend's number, in which sends and receives may count),
        ``begun`` (the number of the first that was entered in the last cell; None if none was), ``kinds``: triples of
        name, tensors in words and bytes, ``entries``: pairs of number and index in ``kinds``, ``open``: of the
        collectives in flight, the oldest ones: number, index in ``kinds``, seconds since it was launched, bucket in
        words; and ``open_count``: how many there are.
    """
    wall = time.time_ns()
    since = wall if began_ns is None else wall - (time.monotonic_ns() - began_ns)
    return [_described(known, since) for known in _look(active=False)]


def in_flight() -> InFlight:
    """How many collectives of this rank have not ended, and the oldest of them."""
    found = _open()
    if not found:
        return InFlight()
    number, oldest = min(found, key=lambda each: each[1].created_ns)
    bucket = _buckets([oldest]).get(oldest.record, "")
    return InFlight(len(found), OldestFlight(oldest.name, number, oldest.bytes, _age(oldest), bucket))


def frames_of(group: str, number: int) -> list[tuple[str, int]]:
    """File and line of each frame of the call that entered a collective, innermost first; empty if it is no longer
    known, or is NCCL's. The first call takes some tenths of a second, in which no Python code of this process runs.
    """
    for known in _look(active=True):
        if known.record.name == group and number in known.numbered.entries:
            found = _frames(known.backend, known.numbered.entries[number].record)
            if found:
                return found
    return []


def description_of(record: registry.GroupRecord) -> str:
    """A group's description; of one without it that not all ranks belong to, "a group"."""
    own = group_description(record.description)
    some = dist.is_initialized() and 0 < len(record.ranks) < dist.get_world_size()
    return own or ("a group" if some else "")


def left() -> int:
    """How many collectives of this rank are still in flight although its cell has ended; waits until those that end now
    are recorded as ended.
    """
    began = time.monotonic()
    while found := _open():
        if time.monotonic() - began >= max(_end_s(one.backend) for _, one in found):
            break
        time.sleep(_PAUSE_S)
    return len(found)


def _open() -> list[tuple[int, Entry]]:
    return [
        (number, one) for known in _look(active=True) for number, one in known.numbered.entries.items() if not one.done
    ]


def _described(known: _Known, since_ns: int) -> dict[str, Any]:
    kinds: dict[tuple[str, str, int], int] = {}
    entries = [(number, _kind(one, kinds)) for number, one in known.numbered.entries.items()]
    begun = [number for number, one in known.numbered.entries.items() if one.created_ns >= since_ns]
    undone = {number: one for number, one in known.numbered.entries.items() if not one.done}
    oldest = sorted(undone)[:_MOST_OPEN]
    buckets = _buckets(undone[number] for number in oldest)
    return {
        "group": known.record.name,
        "backend": known.backend,
        "ranks": known.record.ranks,
        "description": description_of(known.record),
        "sequence": registry.sequences().get(known.record.name),
        "entered": max(known.numbered.entries, default=0) if known.numbered.known else None,
        "begun": min(begun, default=None),
        "kinds": list(kinds),
        "entries": entries if known.numbered.known else [],
        "open": [
            (number, _kind(one, kinds), _age(one), buckets.get(one.record, ""))
            for number, one in ((number, undone[number]) for number in oldest)
        ],
        "open_count": len(undone),
    }


def _kind(one: Entry, kinds: dict[tuple[str, str, int], int]) -> int:
    return kinds.setdefault((one.name, tensors_in_words(one.dtypes, one.shapes), one.bytes), len(kinds))


def _age(one: Entry) -> float:
    return max(0.0, (time.time_ns() - one.created_ns) / 1e9)


def _buckets(undone: Iterable[Entry]) -> dict[int, str]:
    """Record -> the bucket of an all-reduce in words, determined from its group and size."""
    launched, found = list(_launched()), {}
    for one in undone:
        fits = [each for each in launched if one.name == "all_reduce" and each[:2] == (one.group, one.bytes)]
        if fits:
            found[one.record] = fits[0][2]
            launched.remove(fits[0])
    return found


def _launched() -> Iterator[tuple[str, int, str]]:
    """Of each bucket that is launched and not reduced: group, bytes, words."""
    for sync in [model.sync for model in live_models()]:
        try:
            stages = sync.reducer.stage()["buckets"]
        except RuntimeError:  # it is being given new buckets at this moment
            continue
        for number, (members, (_, _, launched, reduced)) in enumerate(zip(sync.assignment, stages, strict=False)):
            if launched and not reduced:
                size = sum(sync.trained.bytes[index] for index in members)
                yield sync.group.group_name, size, f"bucket {number} of {type(sync.module).__name__}"


def _look(active: bool) -> list[_Known]:
    """All living groups; the last snapshot if the rank has entered nothing since.

    Args:
        active: whether to return, of NCCL's groups, only collectives in flight.
    """
    global _last
    living = [record for record in registry.alive() if not record.shut_down]
    backends = sorted({backend for record in living for backend in record.backends})
    counts = _counts(living)
    state = [(record.name, record.made_ns, count) for record, count in zip(living, counts, strict=True)]
    now = time.monotonic()
    since = _last.since if state == _last.state else now
    settled = _last.at - since >= _NOTED_S and "nccl" not in backends and None not in counts
    if settled and all(e.done for known in _last.found for e in known.numbered.entries.values()):
        return _last.found
    made = {record.name: record.made_ns for record in living}
    found = []
    for backend in backends:
        dump = _dump_of(backend, active, _nccl)
        by_key = numbered(entries_of(dump), dump.get("pg_status") or {}, made)
        found += [_Known(record, key[1], by_key[key]) for record in living for key in by_key if key[0] == record.name]
    heard = {known.record.name for known in found}
    for record, count in zip(living, _counts(living), strict=True):
        if record.name not in heard and count == 0 and len(record.backends) == 1:
            found.append(_Known(record, record.backends[0], Numbered(True, {})))
    _last = _Look(state, since, now, found)
    return found


def _counts(living: Iterable[registry.GroupRecord]) -> list[int | None]:
    counts = registry.sequences()
    return [counts.get(record.name) for record in living]


def _dump_of(backend: str, active: bool, nccl: NcclRecorder | None) -> Dump:
    """What a backend's recorder holds, without frames; empty if nothing notes its collectives.

    Args:
        backend: its own name.
        active: of NCCL only what has not ended.
        nccl: asks NCCL; None: it is not asked.
    """
    if backend == "nccl":
        return {} if nccl is None else nccl.dump(active)
    ask = _asker(backend)
    return {} if ask is None else ask(False)


def _end_s(backend: str) -> float:
    """Seconds until the end of a collective is noted."""
    return _END_S if backend in ("gloo", "nccl", "shm") else _END_BY_HOOK_S


def _asker(backend: str) -> Callable[[bool], Dump] | None:
    """What dumps a backend's collectives, with their frames or without; None if nothing that we may ask notes them."""
    if backend == "shm":
        ours: Callable[[bool], Dump] = _C.flights
        return ours
    if backend == "gloo":
        return lambda frames: pickle.loads(_dump(includeStackTraces=frames))
    if backend != "nccl" and _BY_NAME:
        return lambda frames: pickle.loads(_dump(includeStackTraces=frames, backend=backend))
    return None


@functools.lru_cache(maxsize=4)
def _frames(backend: str, record: int) -> list[tuple[str, int]]:
    """File and line of each frame of the call that made a record, innermost first; none of NCCL's. The first time
    takes some tenths of a second, in which no Python code of this process runs.
    """
    ask = _asker(backend)
    if ask is None:
        return []
    with _without_inductor():
        found = [one for one in ask(True)["entries"] if one["record_id"] == record]
    return [(str(frame["filename"]), int(frame["line"])) for one in found for frame in one["frames"]]


class _NoInductor:
    """Stands for `torch._inductor`: this thread finds nothing in it, other threads the module, which they load."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Torch looks up frames of compiled code, too, and loads its compiler to ask it: for seconds, in which this rank
    would not answer. As long as it is not loaded there is no such code."""
    if "torch._inductor" in sys.modules:
        yield
        return
    stand_in = _NoInductor()
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:  # another thread may have loaded it
            del vars(torch)["_inductor"]


class NcclRecorder:
    """Asks one process's recorder; the server starts with the first question.

    Args:
        folder: where a folder with the socket is made, which only this user may enter.
        handler: of torch's control plane.
        seconds: for which it is waited for.
    """

    def __init__(self, folder: Path, handler: str = _HANDLER, seconds: float = _NCCL_S) -> None:
        self._path = folder / f"recorder-{os.getpid()}" / "socket"
        self._handler, self._seconds = handler, seconds
        self._server: Any = None
        self._not_before = 0.0

    def dump(self, active: bool = False) -> dict[str, Any]:
        """The recorder's dump; empty if there is no such recorder, or no answer in time.

        Args:
            active: only what has not ended.
        """
        if self._handler not in c10d._get_handler_names():  # type: ignore[attr-defined, unused-ignore]
            return {}
        if time.monotonic() < self._not_before:
            return {}
        if self._server is None:
            self._path.parent.mkdir(mode=0o700)
            self._server = c10d._WorkerServer(str(self._path))  # type: ignore[attr-defined, unused-ignore]
        try:
            answer = self._ask("?onlyactive=true" if active else "")
        except OSError:  # late, or it did not even connect
            self._not_before = time.monotonic() + _AFTER_LATE_S
            return {}
        made: dict[str, Any] = json.loads(answer) if answer else {}
        return made

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
            shutil.rmtree(self._path.parent)

    def _ask(self, options: str) -> bytes:
        connection = _UnixConnection(self._path, self._seconds)
        try:
            connection.request("POST", f"/handler/{self._handler}{options}")
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        return answer if response.status == _FOUND else b""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path, self._seconds = path, seconds

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self._seconds)
        self.sock.connect(str(self._path))
