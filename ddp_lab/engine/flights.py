"""Collectives that this rank has given to its groups: the newest ones, and those that have not ended.

Torch's Flight Recorder notes each of them in C++, whoever starts it, also the reducer, for about a microsecond. It is
on by default; `install` only makes its ring smaller, so that a look at all of it takes a few milliseconds. Our own
backends have a log of their own, as that one takes no others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import _dump_fr_trace as _dump  # type: ignore[attr-defined, unused-ignore]

from .. import native
from ..insight.flight_recorder import Entry, Numbered, entries_of, numbered, tensors_in_words
from ..parallel.inspection import live_models
from . import groups
from .gpu_flights import GpuFlights

__all__ = ["flights", "frames_of", "in_flight", "install", "left"]

_RING = "TORCH_FR_BUFFER_SIZE"
_FORMER_RING = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "512"
_MOST_OPEN = 100  # of a group: the oldest ones
_NOTED_S = 0.2  # until a collective that a group has counted is noted
_END_S = 0.05  # until the end of a collective is noted

_C = native.load()
_gpu: GpuFlights | None = None


class _Known(NamedTuple):
    """One living group's collectives."""

    record: groups.GroupRecord
    backend: str
    numbered: Numbered


class _Look(NamedTuple):
    """A look at all groups: how much they had counted, since when that was seen, when it was taken, what it found."""

    state: Any
    since: float
    at: float
    found: list[_Known]


_last = _Look(None, 0.0, 0.0, [])


def install(folder: Path) -> None:
    """Sets the size of the recorders' rings, if the user has not; before the first group is made.

    Args:
        folder: where a folder with a socket may be made.
    """
    global _gpu
    _gpu = _gpu or GpuFlights(folder)
    if _FORMER_RING not in os.environ:
        os.environ.setdefault(_RING, _ENTRIES)


def flights(began_ns: int | None) -> list[dict[str, Any]]:
    """What every living group of this rank was given, as JSON can hold it. Any thread may ask.

    Args:
        began_ns: when the rank's last cell began (host time in ns); None if it has run none.

    Returns:
        For each ``group`` and ``backend``: its ``ranks`` (empty: all), ``entered`` (how many collectives; None if
        unknown), ``sequence`` (its backend's number, in which sends and receives may count), ``begun`` (the number of
        the first that was entered in the last cell; None if none was), ``kinds``: triples of name, tensors in words
        and bytes, ``entries``: pairs of number and index in ``kinds``, ``open``: of the collectives that have not
        ended, the oldest ones: number, index in ``kinds``, seconds since it was launched, bucket in words; and
        ``open_count``: how many there are.
    """
    wall = time.time_ns()
    since = wall if began_ns is None else wall - (time.monotonic_ns() - began_ns)
    return [_described(known, since) for known in _look(active=False)]


def in_flight() -> dict[str, Any]:
    """How many collectives of this rank have not ended (``count``), and of the ``oldest`` its ``name``, ``number``,
    ``bytes``, ``seconds`` since it was launched, and ``bucket`` in words ("" if it is none).
    """
    found = [
        (number, one) for known in _look(active=True) for number, one in known.numbered.entries.items() if not one.done
    ]
    if not found:
        return {"count": 0, "oldest": None}
    number, oldest = min(found, key=lambda each: each[1].created_ns)
    bucket = _buckets([oldest]).get(oldest.record, "")
    words = {"name": oldest.name, "number": number, "bytes": oldest.bytes, "seconds": _age(oldest), "bucket": bucket}
    return {"count": len(found), "oldest": words}


def frames_of(group: str, number: int) -> list[tuple[str, int]]:
    """File and line of each frame of the call that entered a collective on a CPU group, innermost first; empty if it is
    not known any more. The first time takes some tenths of a second, in which no Python code of this process runs.
    """
    for known in _look(active=True):
        if known.record.name == group and known.backend in _DUMPS and number in known.numbered.entries:
            return _frames(known.backend, known.numbered.entries[number].record)
    return []


def _torchs(frames: bool) -> Mapping[str, Any]:
    dump: Mapping[str, Any] = pickle.loads(_dump(includeStackTraces=frames))
    return dump


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
    would answer nobody. As long as it is not loaded there is no such code."""
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


# Backend of a CPU group -> what dumps its collectives, with their frames or without.
_DUMPS: dict[str, Callable[[bool], Mapping[str, Any]]] = {"gloo": _torchs, "shm": _C.flights}


@functools.lru_cache(maxsize=4)
def _frames(backend: str, record: int) -> list[tuple[str, int]]:
    with _without_inductor():
        found = [one for one in _DUMPS[backend](True)["entries"] if one["record_id"] == record]
    return [(str(frame["filename"]), int(frame["line"])) for one in found for frame in one["frames"]]


def left() -> int:
    """How many collectives of this rank are still under way though its cell has ended; those that end now are given
    `_END_S`.
    """
    deadline = time.monotonic() + _END_S
    while (count := in_flight()["count"]) and time.monotonic() < deadline:
        time.sleep(_END_S / 10)
    return int(count)


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
        "sequence": groups.sequences().get(known.record.name),
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
    """Record -> words for the bucket that an all-reduce carries: told from its group and its size."""
    launched, found = list(_launched()), {}
    for one in undone:
        fits = [each for each in launched if one.name == "all_reduce" and each[:2] == (one.group, one.bytes)]
        if fits:
            found[one.record] = fits[0][2]
            launched.remove(fits[0])
    return found


def _launched() -> Iterator[tuple[str, int, str]]:
    """Of each bucket that is launched and not reduced: group, bytes, words."""
    for model in live_models():
        try:
            stages = model.reducer.stage()["buckets"]
        except RuntimeError:  # it is being given new buckets at this moment
            continue
        for number, (members, (_, _, launched, reduced)) in enumerate(zip(model._assignment, stages, strict=False)):
            if launched and not reduced:
                size = sum(model._sizes[index] for index in members)
                yield model.process_group.group_name, size, f"bucket {number} of {type(model.module).__name__}"


def _look(active: bool) -> list[_Known]:
    """All living groups; of a rank that has entered nothing since, what was found then.

    Args:
        active: of GPUs' groups only what has not ended.
    """
    global _last
    living = [record for record in groups.alive() if not record.freed]
    by_nccl = any("nccl" in record.backend for record in living)
    state = [(record.name, record.made_ns, count) for record, count in zip(living, _counts(living), strict=True)]
    now = time.monotonic()
    since = _last.since if state == _last.state else now
    settled = _last.at - since >= _NOTED_S
    if settled and not by_nccl and all(e.done for known in _last.found for e in known.numbered.entries.values()):
        return _last.found
    dumps = [dump(False) for dump in _DUMPS.values()]
    if by_nccl and _gpu is not None:
        dumps.append(_gpu.dump(active))
    made = {record.name: record.made_ns for record in living}
    found = []
    for dump in dumps:
        by_key = numbered(entries_of(dump), dump.get("pg_status") or {}, made)
        found += [_Known(record, key[1], by_key[key]) for record in living for key in by_key if key[0] == record.name]
    heard = {known.record.name for known in found}
    for record, count in zip(living, _counts(living), strict=True):
        if record.name not in heard and count == 0 and "," not in record.backend:
            found.append(_Known(record, record.backend, Numbered(True, {})))
    _last = _Look(state, since, now, found)
    return found


def _counts(living: Iterable[groups.GroupRecord]) -> list[int | None]:
    counts = groups.sequences()
    return [counts.get(record.name) for record in living]
