"""Collectives that this rank has given to its groups: the newest ones, and those in flight.

Torch's Flight Recorders record each of them in C++, whatever code starts it, including the reducer, in about a
microsecond. They are on by default; `install` only makes their rings smaller, so that a dump takes a few milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ...diagnosis.flight_recorder import Entry, Numbered, entries_of, group_description, numbered, tensors_in_words
from ...parallel.live.model import live_models
from ...protocol.messages import InFlight, OldestFlight
from ..groups import registry
from .recorders import GpuFlights, dump_of, end_s, frames

_RING = "TORCH_FR_BUFFER_SIZE"
_FORMER_RING = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "512"
_MOST_OPEN = 100  # of a group: the oldest ones
_NOTED_S = 0.2  # until a collective that a group has counted is recorded
_PAUSE_S = 0.005  # between looks whether the last ones have ended

_nccl: GpuFlights | None = None


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


_last = _Look(None, 0.0, 0.0, [])


def install(folder: Path, *, smaller: bool = True) -> None:
    """Prepares queries, before the first group is made.

    Args:
        folder: where a folder with a socket may be created.
        smaller: whether to make the recorders' rings smaller, if the user has not set their size.
    """
    global _nccl
    _nccl = _nccl or GpuFlights(folder)
    if smaller and _FORMER_RING not in os.environ:
        os.environ.setdefault(_RING, _ENTRIES)


def flights(began_ns: int | None) -> list[dict[str, Any]]:
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
            found = frames(known.backend, known.numbered.entries[number].record)
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
        if time.monotonic() - began >= max(end_s(one.backend) for _, one in found):
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
    living = [record for record in registry.alive() if not record.freed]
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
        dump = dump_of(backend, active, _nccl)
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
