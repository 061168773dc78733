"""Collectives that a rank has entered: the entries of torch's Flight Recorders, which record every collective that a
process gives to its groups, and what is in flight of them.

[Note: numbers of collectives]
Collectives of a group are compared by their numbers, which must mean the same on all ranks. Gloo's sequence numbers
do not: they also count sends and receives, which are not recorded. So a group's collectives are numbered by its
sequence numbers only if no group of the process has skipped one; else by counting its entries, while the ring still
holds all of them. Otherwise the numbers are unknown, and nothing is compared. NCCL counts the two kinds separately, as
does torch's hook for nccl2 and others; "shm" counts only collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..formatting import duration, label_of, size
from ..protocol.messages import InFlight

__all__ = ["Collective", "Entry", "Flight", "GroupFlights", "Numbered", "entries_of", "group_description"]
__all__ += ["in_flight_words", "numbered", "on_group", "open_words", "tensors_in_words"]

_NO_DESCRIPTION = {"", "undefined", "default_pg"}  # torch's own words
# torch's name of a dtype in a dump -> as users write it, bytes of an element
_DTYPES = {
    "Byte": ("uint8", 1), "Char": ("int8", 1), "Short": ("int16", 2), "Int": ("int32", 4), "Long": ("int64", 8),
    "UInt16": ("uint16", 2), "UInt32": ("uint32", 4), "UInt64": ("uint64", 8), "Bool": ("bool", 1),
    "Half": ("float16", 2), "BFloat16": ("bfloat16", 2), "Float": ("float32", 4), "Double": ("float64", 8),
    "ComplexHalf": ("complex32", 4), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1), "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e4m3fnuz": ("float8_e4m3fnuz", 1), "Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
}  # fmt: skip
# A recorder's name (NCCL's, nccl2's or Gloo's) -> the function of torch.distributed, where they differ.
_FUNCTIONS = {
    "_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce_coalesced", "allgather_coalesced": "all_gather_coalesced",
    "all_reduce_barrier": "barrier",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One collective, or one send or receive, that was given to a process group.

    Attributes:
        record: its number among all that the process has recorded.
        group: name of the process group.
        backend: its own name: ``"gloo"``, ``"nccl"``, ``"nccl2"``, ``"shm"``, …
        made: number of the backend's group object in this process; several may have had the same name.
        sequence: of its backend's collectives.
        name: e.g. ``"all_reduce"``.
        dtypes: of the tensors that go in, as torch names them.
        shapes: of these tensors.
        created_ns: when it was given to the group (wall clock).
        state: ``"scheduled"``, ``"started"`` (its kernel runs) or ``"completed"``, as far as known.
        done: whether it has ended.
        point_to_point: whether it is a send or receive.
        description: of the group; "" if it has none.
        frames: ``name``, ``filename`` and ``line`` of the call's frames, innermost first; empty without them.
    """

    record: int
    group: str
    backend: str
    made: int
    sequence: int
    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    created_ns: int
    state: str
    done: bool
    point_to_point: bool
    description: str = ""
    frames: Sequence[Mapping[str, Any]] = ()

    @property
    def bytes(self) -> int:
        """Size of the tensors that go in."""
        return sum(
            math.prod(shape) * _DTYPES.get(dtype, ("", 0))[1]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=False)
        )


def entries_of(dump: Mapping[str, Any]) -> list[Entry]:
    """The entries of a dump in the order in which they were recorded.

    Args:
        dump: what `torch._C._distributed_c10d._dump_fr_trace` (unpickled) or its JSON variants returned, or the same
            of another recorder (``ddp_lab/diagnosis/on_rank/own_collectives.py``); version 2.x of the format.
    """
    return sorted((_entry(one) for one in dump.get("entries") or ()), key=lambda entry: entry.record)


def _entry(given: Mapping[str, Any]) -> Entry:
    backend, _, name = given["profiling_name"].rpartition(":")
    state = str(given["state"])
    return Entry(
        record=int(given["record_id"]),
        group=str(given["process_group"][0]),
        backend=backend,
        made=int(given["pg_id"]),
        sequence=int(given["p2p_seq_id" if given.get("is_p2p") else "collective_seq_id"]),
        name=_FUNCTIONS.get(name, name),
        dtypes=tuple(given["input_dtypes"]),
        shapes=tuple(tuple(shape) for shape in given["input_sizes"]),
        created_ns=int(given["time_created_ns"]),
        state=state,
        done=bool(given["retired"]) or state == "completed",
        point_to_point=bool(given.get("is_p2p")),
        description=group_description(str(given["process_group"][1])),
        frames=given.get("frames") or (),
    )


def group_description(given: str) -> str:
    """A group's description as its maker gave it; "" for torch's own words."""
    return "" if given in _NO_DESCRIPTION else given


class Numbered(NamedTuple):
    """The collectives of one group that the ring holds, by number; by sequence number if the numbers are unknown."""

    known: bool
    entries: dict[int, Entry]


def numbered(
    entries: Sequence[Entry], status: Mapping[str, Mapping[str, Any]], made_ns: Mapping[str, int]
) -> dict[tuple[str, str], Numbered]:
    """(group, backend) -> its collectives. See [Note: numbers of collectives].

    Args:
        entries: all of one recorder, in order.
        status: ``pg_status`` of the same dump.
        made_ns: name of each living group -> when it was created (wall clock); entries of older groups are skipped.
    """
    if not entries:
        return {}
    oldest, newest = entries[0], {one.made: one.sequence for one in entries if not one.point_to_point}
    for made, told in status.items():
        newest.setdefault(int(made), max(int(told["last_enqueued_collective"]), 0))
    skipped = oldest.backend == "gloo" and sum(newest.values()) != entries[-1].record + 1
    own: dict[tuple[str, str], list[Entry]] = {}
    for one in entries:
        if not one.point_to_point and one.group in made_ns and one.created_ns >= made_ns[one.group]:
            own.setdefault((one.group, one.backend), []).append(one)
    found = {}
    for key, of_group in own.items():
        if skipped and (oldest.record == 0 or oldest.created_ns < made_ns[key[0]]):
            found[key] = Numbered(True, dict(enumerate(of_group, 1)))
        else:
            found[key] = Numbered(not skipped, {one.sequence: one for one in of_group})
    return found


def tensors_in_words(dtypes: Iterable[str], shapes: Sequence[Sequence[int]]) -> str:
    """E.g. ``"float32 [1048576]"``, as the doctor writes it; "" without tensors."""
    types = "/".join(sorted({_DTYPES.get(dtype, (dtype, 0))[0] for dtype in dtypes}))
    if not shapes:
        return ""
    return f"{types} {list(shapes[0])}" if len(shapes) == 1 else f"{types} {len(shapes)} tensors"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank gave to a group.

    Attributes:
        name: e.g. ``"all_reduce"``.
        what: types and shapes of the tensors; "" without.
        bytes: their size.
    """

    name: str
    what: str
    bytes: int

    def called(self, number: int) -> str:
        """E.g. ``"all_reduce #18 of 4 MiB (float32 [1048576])"``."""
        return f"{self.name} #{number}" + (f" of {size(self.bytes)} ({self.what})" if self.what else "")


@dataclass(frozen=True)
class Flight:
    """A collective in flight: launched and not ended.

    Attributes:
        number: on its group.
        collective: what it is.
        seconds: since it was launched.
        bucket: which bucket it carries, in words; "" if none.
    """

    number: int
    collective: Collective
    seconds: float
    bucket: str

    def __str__(self) -> str:
        carried = f", {self.bucket}," if self.bucket else ""
        of_bytes = f" of {size(self.collective.bytes)}" if self.collective.what else ""
        age = f"{self.seconds * 1e3:.0f} ms" if self.seconds < 0.1 else duration(self.seconds)
        return f"{self.collective.name} #{self.number}{of_bytes}{carried} for {age}"


@dataclass(frozen=True)
class GroupFlights:
    """The collectives of one rank on one group.

    Attributes:
        group: its name.
        backend: its own name, e.g. ``"gloo"`` or ``"nccl2"``.
        ranks: its global ranks; empty: all.
        entered: how many it has entered; None if their numbers are unknown.
        sequence: the backend's own number of its last operation, sends and receives included; None if unknown.
        begun: number of the first that was entered in the rank's last cell; None if there is none.
        entries: number -> collective, of the newest ones.
        open: the oldest of those in flight.
        open_count: how many are in flight.
        description: as its maker gave it; "" for the default group.
    """

    group: str
    backend: str
    ranks: tuple[int, ...]
    entered: int | None
    sequence: int | None
    begun: int | None
    entries: Mapping[int, Collective]
    open: tuple[Flight, ...]
    open_count: int
    description: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What distinguishes it on its rank."""
        return self.group, self.backend

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> GroupFlights:
        """From the rank's answer (`ddp_lab.diagnosis.on_rank.own_collectives`)."""
        kinds = [Collective(*kind) for kind in answer["kinds"]]
        known = {name: answer[name] for name in ("group", "backend", "entered", "sequence", "begun", "open_count")}
        return cls(
            **known,
            ranks=tuple(answer["ranks"]),
            description=answer.get("description", ""),
            entries={number: kinds[kind] for number, kind in answer["entries"]},
            open=tuple(Flight(number, kinds[kind], *more) for number, kind, *more in answer["open"]),
        )


def on_group(description: str, ranks: Sequence[int]) -> str:
    """E.g. ``" on mesh dimension tp (ranks 0–3)"``, to follow a collective; "" without a description.

    Args:
        description: of the group; of one of a DeviceMesh ``"mesh_"`` and the dimension's name.
        ranks: its global ranks, if known.
    """
    if not description:
        return ""
    name = f"mesh dimension {description[5:]}" if description.startswith("mesh_") else description
    return f" on {name} ({label_of(ranks)})" if ranks else f" on {name}"


def open_words(groups: Sequence[GroupFlights]) -> str:
    """As `in_flight_words`, of one rank's groups."""
    found = [one for group in groups for one in group.open]
    if not found:
        return ""
    return _count_words(sum(group.open_count for group in groups), max(found, key=lambda one: one.seconds))


def in_flight_words(told: InFlight) -> str:
    """A rank's collectives in flight, e.g. ``"2, oldest all_reduce #18 of 4 MiB for 3.2 s"``; "" if there are none."""
    oldest = told.oldest
    if oldest is None:
        return ""
    kind = Collective(oldest.name, "?" if oldest.bytes else "", oldest.bytes)
    return _count_words(told.count, Flight(oldest.number, kind, oldest.seconds, oldest.bucket))


def _count_words(count: int, oldest: Flight) -> str:
    return f"{count}, oldest {oldest}" if count > 1 else str(oldest)
