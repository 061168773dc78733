"""Why the ranks of a job make no progress, from dumps of their Flight Recorders alone.

[Note: who is missing in a dump]
A dump says what a rank has given to its groups, not what it does now. So the cause is sought in the collectives: first
the first one that is not the same on all ranks. Else, of each group, the first collective in flight: the members that
have not entered it are missing. A missing rank that itself waits on another group is not the cause: the rank that is
missing there is. If only such ranks are missing, they use their groups in different orders.

The ranks of a group stand in NCCL's dumps. Gloo's name them for no group but the default one: then a rank that is in no
collective at all is taken for the one that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..formatting import duration, enumeration
from .collectives_in_flight import (
    Collective,
    Entry,
    Flight,
    GroupFlights,
    entries_of,
    numbered,
    on_group,
    tensors_in_words,
)
from .mismatch import mismatch_of
from .rules import SAME_CALLS, Diagnosis, diagnose_mismatch
from .snapshot import Place, RankSnapshot, label
from .stacks import is_library

__all__ = ["Dump", "diagnose_dumps", "flights_by_rank"]

_STALE_S = 5.0  # a collective that has been in flight for less may be on its way
_DEFAULT_GROUP = "default_pg"
_SHOWN = 3  # of the ranks that are missing
_JOB = "job"  # in the place of a cell's id
_Members = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dump:
    """What the recorders of one rank held.

    Attributes:
        rank: its rank.
        recorders: the dumps, a mapping for each recorder (NCCL's, Gloo's); see `flight_recorder.entries_of`.
        at_ns: when it was written (wall clock).
    """

    rank: int
    recorders: tuple[Mapping[str, Any], ...]
    at_ns: int


class _Recorded(NamedTuple):
    """One rank's collectives: by group, and all in order."""

    flights: tuple[GroupFlights, ...]
    entries: Mapping[tuple[str, str], Mapping[int, Entry]]
    newest: Entry | None
    messages: tuple[Entry, ...]  # sends and receives in flight


def _members_of(dumps: Sequence[Dump]) -> dict[str, tuple[int, ...]]:
    """Group -> its global ranks, of those groups whose ranks the dumps say."""
    found: dict[str, tuple[int, ...]] = {}
    everyone = tuple(dump.rank for dump in dumps)
    for recorder in (each for dump in dumps for each in dump.recorders):
        for one in (recorder.get("pg_config") or {}).values():
            ranks = tuple(int(rank) for rank in str(one.get("ranks", "")).strip("[]").split(",") if rank.strip())
            if ranks:
                found[str(one["name"])] = ranks
        for entry in recorder.get("entries") or ():
            name, description = entry["process_group"]
            if description == _DEFAULT_GROUP:
                found.setdefault(str(name), everyone)
    return found


def _recorded(dump: Dump, members: _Members) -> _Recorded:
    flights: list[GroupFlights] = []
    entries: dict[tuple[str, str], Mapping[int, Entry]] = {}
    everything: list[Entry] = []
    for recorder in dump.recorders:
        own = entries_of(recorder)
        everything += own
        for key, one in numbered(own, recorder.get("pg_status") or {}, {entry.group: 0 for entry in own}).items():
            entries[key] = one.entries
            flights.append(_flights(key, one.known, one.entries, members, dump.at_ns))
    newest = max(everything, key=lambda one: one.created_ns, default=None)
    return _Recorded(tuple(flights), entries, newest, tuple(e for e in everything if e.point_to_point and not e.done))


def _flights(
    key: tuple[str, str], known: bool, entries: Mapping[int, Entry], members: _Members, at_ns: int
) -> GroupFlights:
    kinds: dict[tuple[str, str, int], Collective] = {}
    made = {number: _collective(one, kinds) for number, one in entries.items()}
    undone = sorted(number for number, one in entries.items() if not one.done)
    newest = max(entries)
    return GroupFlights(
        group=key[0],
        backend=key[1],
        ranks=members.get(key[0], ()),
        entered=newest if known else None,
        sequence=entries[newest].sequence,
        begun=min(entries),
        entries=made if known else {},
        open=tuple(Flight(number, made[number], _age_s(entries[number], at_ns), "") for number in undone),
        open_count=len(undone),
        description=entries[newest].description,
    )


def _collective(one: Entry, kinds: dict[tuple[str, str, int], Collective]) -> Collective:
    key = (one.name, tensors_in_words(one.dtypes, one.shapes), one.bytes)
    return kinds.setdefault(key, Collective(*key))


def _age_s(one: Entry, at_ns: int) -> float:
    return max(0.0, (at_ns - one.created_ns) / 1e9)


def _place_of(entry: Entry) -> Place | None:
    """The user's line that entered a collective; None if the dump has no frames, or none of the user's."""
    for frame in entry.frames:
        if not is_library(str(frame["filename"])):
            return Place(str(frame["filename"]), int(frame["line"]), str(frame["name"]), "", users=True)
    return None


def _called(one: Entry, number: int, members: _Members) -> str:
    """E.g. ``"all_reduce #5 of 4 MiB (float32 [1048576]) on mesh dimension tp (ranks 0–3) at train.py:40"``."""
    what = Collective(one.name, tensors_in_words(one.dtypes, one.shapes), one.bytes).called(number)
    place = _place_of(one)
    at = f" at {place}" if place is not None else ""
    return f"{what}{on_group(one.description, members.get(one.group, ()))}{at}"


class _Wait(NamedTuple):
    """A collective that some members of a group wait in and others have not entered.

    ``known`` says whether the dumps name the group's ranks; if not, each rank may be missing that is in no collective.
    """

    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    words: str
    seconds: float
    known: bool


def _waits(recorded: Mapping[int, _Recorded], members: _Members) -> list[_Wait]:
    """Of each group the first collective that is in flight, the oldest first."""
    found = []
    keys = {one.key for each in recorded.values() for one in each.flights if one.open}
    free = [rank for rank, each in recorded.items() if not any(one.open for one in each.flights)]
    for key in sorted(keys):
        of_group = {rank: one for rank, each in recorded.items() for one in each.flights if one.key == key}
        number = min(one.open[0].number for one in of_group.values() if one.open)
        waiting = {rank: one.open[0] for rank, one in of_group.items() if one.open and one.open[0].number == number}
        known = members.get(key[0])
        missing = [rank for rank in known or free if not _has_entered(of_group.get(rank), number)]
        words = _called(recorded[min(waiting)].entries[key][number], number, members)
        seconds = max(one.seconds for one in waiting.values())
        found.append(_Wait(tuple(sorted(waiting)), tuple(missing), words, seconds, known is not None))
    return sorted(found, key=lambda one: -one.seconds)


def _has_entered(one: GroupFlights | None, number: int) -> bool:
    return one is not None and (one.entered is None or one.entered >= number)


def diagnose_dumps(dumps: Sequence[Dump]) -> tuple[Diagnosis, tuple[RankSnapshot, ...]]:
    """The diagnosis, and each rank. See [Note: who is missing in a dump].

    Args:
        dumps: one for each rank that left one; at least one.
    """
    members = _members_of(dumps)
    recorded = {one.rank: _recorded(one, members) for one in dumps}
    ranks = tuple(_examined(rank, one, members) for rank, one in sorted(recorded.items()))
    absent = sorted({rank for one in members.values() for rank in one} - set(recorded))
    without = f" There is no dump of {label(absent)}." if absent else ""
    if (found := mismatch_of(ranks)) is not None:
        placed = [_entered_at(one, recorded[one.rank], found.group, found.number) for one in ranks]
        different = diagnose_mismatch(placed, found)
        return Diagnosis(different.kind, f"{different.sentence}{without}", different.remedy), tuple(placed)
    diagnosis = _of_waits(_waits(recorded, members), recorded, members) or _of_messages(recorded) or _nothing(ranks)
    return Diagnosis(diagnosis.kind, f"{diagnosis.sentence}{without}", diagnosis.remedy, diagnosis.stuck), ranks


def _of_waits(waits: Sequence[_Wait], recorded: Mapping[int, _Recorded], members: _Members) -> Diagnosis | None:
    """What follows from who waits and who is missing. See [Note: who is missing in a dump]."""
    if not waits:
        return None
    stuck = max(one.seconds for one in waits) >= _STALE_S
    unmet = [one for one in waits if one.missing]
    waiting = {rank for one in unmet for rank in one.waiting}
    roots = [one for one in unmet if not waiting.issuperset(one.missing)]
    apart = unmet or ([] if all(one.known for one in waits) else waits)
    if not roots and len({one.waiting for one in apart}) > 1:
        each = "; ".join(f"{label(one.waiting)} in {one.words}" for one in apart)
        remedy = "Ranks that are in several groups must use them in the same order."
        return Diagnosis("groups", f"Ranks wait for each other in different groups: {each}.", remedy, stuck)
    if not unmet:
        one = waits[0]
        are, rest = ("is", "; all others have finished it") if len(one.waiting) == 1 else ("are all", "")
        sentence = f"{label(one.waiting)} {are} in {one.words}, for {duration(one.seconds)}{rest}."
        return Diagnosis("slow", sentence, "All have entered it: the network or a GPU is slow, or stuck.", stuck)
    one = (roots or unmet)[0]
    culprits = [rank for rank in one.missing if rank not in waiting] or list(one.missing)
    last = enumeration([_last(rank, recorded.get(rank), members) for rank in culprits[:_SHOWN]])
    them, several = label(culprits), len(culprits) > 1
    not_there = f"{'have' if several else 'has'} not entered it"
    if not one.known:
        not_there = f"{'are' if several else 'is'} in no collective (the dumps do not name the group's ranks)"
    wait = "waits" if len(one.waiting) == 1 else "wait"
    sentence = f"{label(one.waiting)} {wait} in {one.words}, for {duration(one.seconds)}; {them} {not_there}: {last}."
    return Diagnosis("busy", sentence, f"See what {them} did after that. {SAME_CALLS}", stuck)


def _last(rank: int, one: _Recorded | None, members: _Members) -> str:
    """What a rank did last, to follow a colon."""
    if one is None:
        return f"rank {rank} left no dump"
    if one.newest is None:
        return f"rank {rank} has recorded no collective"
    key = (one.newest.group, one.newest.backend)
    number = next((n for n, e in one.entries.get(key, {}).items() if e is one.newest), one.newest.sequence)
    ended = "ended" if one.newest.done else "is in flight"
    return f"the last call of rank {rank}, {_called(one.newest, number, members)}, {ended}"


def _of_messages(recorded: Mapping[int, _Recorded]) -> Diagnosis | None:
    """Sends and receives that have not ended, if no collective is in flight."""
    each = [f"rank {rank} {_in_message(one.messages[0])}" for rank, one in recorded.items() if one.messages]
    if not each:
        return None
    remedy = "Every send needs a matching recv: the same two ranks, in the same order."
    return Diagnosis("peer", f"Messages have not ended: {'; '.join(each)}.", remedy)


def _in_message(message: Entry) -> str:
    place = _place_of(message)
    return f"is in {message.name}{f' at {place}' if place is not None else ''}"


def _nothing(ranks: Sequence[RankSnapshot]) -> Diagnosis:
    return Diagnosis("working", f"Nothing was in flight on {label(one.rank for one in ranks)}.", stuck=False)


def _examined(rank: int, one: _Recorded, members: _Members) -> RankSnapshot:
    """A rank as its dump shows it: what it does now is unknown."""
    flying = [(each.open[0], each) for each in one.flights if each.open]
    if flying:
        oldest, group = max(flying, key=lambda pair: pair[0].seconds)
        entry = one.entries[group.key][oldest.number]
        why = f"waits in {_called(entry, oldest.number, members)}, for {duration(oldest.seconds)}"
    elif one.messages:
        why = _in_message(one.messages[0])
    else:
        why = f"has nothing in flight: {_last(rank, one, members)}"
    return RankSnapshot(rank, "recorded", why=why, flights=one.flights, last_cell=_JOB, runs="script")


def _entered_at(rank: RankSnapshot, one: _Recorded, group: str, number: int) -> RankSnapshot:
    for key, entries in one.entries.items():
        if key[0] == group and number in entries:
            return replace(rank, entered_at=_place_of(entries[number]))
    return rank


def flights_by_rank(dumps: Sequence[Dump]) -> dict[int, tuple[GroupFlights, ...]]:
    """Rank -> its collectives by group."""
    members = _members_of(dumps)
    return {one.rank: _recorded(one, members).flights for one in dumps}
