"""Collectives that ranks have entered, side by side: which rank called another one, which is ahead, what is in flight.

[Note: ahead, or only asked later]
Ranks are examined one after the other while they keep running: of two ranks in step, the one that was examined later
seems ahead. So a distance counts only if it never shrank, has grown, and is larger than what the faster rank does in
`SKEW_S`, or if the other rank did not move at all. A rank that catches up shrinks the distance; one whose cell has
ended will not catch up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formatting import duration, label_of, size
from ..protocol.messages import InFlight

__all__ = ["SKEW_S", "Collective", "Distance", "Distances", "Flight", "GroupFlights", "Mismatch", "distances"]
__all__ += ["find_mismatch", "in_flight_words", "on_group", "open_words"]

SKEW_S = 1.0  # between the first and the last answer of one examination
_STANDS = 10  # collectives ahead of a rank that makes no progress
_MOVES = 100  # ahead of one that does
_SAME_TENSORS = {"all_reduce", "broadcast", "reduce", "all_reduce_coalesced"}  # sizes agree on all ranks


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
        return f"{self.collective.name} #{self.number}{of_bytes}{carried} for {_seconds(self.seconds)}"


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
        """From the rank's answer (`ddp_lab.engine.status.flights`)."""
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


@dataclass(frozen=True)
class Mismatch:
    """The first collective that is not the same on all ranks.

    Attributes:
        group: name of the group.
        number: on the group.
        calls: rank -> what it entered under this number.
        sizes: whether only the tensors differ: the name is the same on all ranks.
        where: the group in words, as `on_group` says it.
    """

    group: str
    number: int
    calls: Mapping[int, Collective]
    sizes: bool
    where: str = ""


_Key = tuple[str, str]


def _by_group(ranks: Mapping[int, Sequence[GroupFlights]]) -> dict[_Key, dict[int, GroupFlights]]:
    made: dict[_Key, dict[int, GroupFlights]] = {}
    for rank, flights in sorted(ranks.items()):
        for one in flights:
            made.setdefault(one.key, {})[rank] = one
    return {key: members for key, members in made.items() if len(members) > 1}


def find_mismatch(ranks: Mapping[int, Sequence[GroupFlights]], of_cell: Collection[int]) -> Mismatch | None:
    """The first number under which ranks entered different collectives.

    Args:
        ranks: rank -> its groups.
        of_cell: the ranks whose last cell is the one in question. What all of them had entered before it has been
            reported already.
    """
    for (group, _), members in _by_group(ranks).items():
        begun = [one.begun for rank, one in members.items() if rank in of_cell and one.begun is not None]
        numbers = {number for one in members.values() for number in one.entries}
        for number in sorted(number for number in numbers if begun and number >= min(begun)):
            calls = {rank: one.entries[number] for rank, one in members.items() if number in one.entries}
            names = {call.name for call in calls.values()}
            tensors = {(call.bytes, call.what.partition(" ")[0]) for call in calls.values()}
            if len(names) > 1 or (len(tensors) > 1 and names <= _SAME_TENSORS):
                return Mismatch(group, number, calls, len(names) == 1, _where(members))
    return None


def _where(members: Mapping[int, GroupFlights]) -> str:
    one = next(iter(members.values()))
    return on_group(one.description, one.ranks)


@dataclass(frozen=True)
class Distance:
    """Two ranks that are out of step.

    Attributes:
        ahead: the rank that has entered the most collectives of the group.
        behind: the one that has entered the fewest.
        entered: how many these two have entered.
        missing: the first that the rank behind has not entered; None if no longer known.
        launched: the oldest that the rank ahead has launched, which the other has not entered and which has not ended.
        where: the group in words, as `on_group` says it.
    """

    ahead: int
    behind: int
    entered: tuple[int, int]
    missing: Collective | None
    launched: Flight | None
    where: str = ""

    @property
    def gap(self) -> int:
        """How many collectives they are apart."""
        return self.entered[0] - self.entered[1]


def distances(ranks: Mapping[int, Sequence[GroupFlights]]) -> dict[tuple[str, str], Distance]:
    """(group, backend) -> how far apart its ranks are, for groups whose ranks are out of step."""
    found = {}
    for key, members in _by_group(ranks).items():
        entered = _entered(members)
        if not entered:
            continue
        ahead, behind = max(entered, key=entered.__getitem__), min(entered, key=entered.__getitem__)
        ends = (entered[ahead], entered[behind])
        if ends[0] > ends[1]:
            numbered = ends == (members[ahead].entered, members[behind].entered)
            missing = members[ahead].entries.get(ends[1] + 1) if numbered else None
            launched = next((one for one in members[ahead].open if one.number > ends[1]), None) if numbered else None
            found[key] = Distance(ahead, behind, ends, missing, launched, _where(members))
    return found


def _entered(members: Mapping[int, GroupFlights]) -> dict[int, int]:
    """Rank -> how many it has entered; empty if unknown. With two ranks, sends and receives may count."""
    entered = {rank: one.entered for rank, one in members.items() if one.entered is not None}
    if len(set(entered.values())) > 1 and len(entered) == len(members):
        return entered
    counted = {rank: one.sequence for rank, one in members.items() if one.sequence is not None}
    pair = len(members) == 2 and all(len(one.ranks) in (0, 2) for one in members.values())
    return counted if pair and len(counted) == 2 else {}


@dataclass
class _Course:
    """One group's distance since it began to grow."""

    since: float
    first: Distance
    last: Distance


class Distances:
    """Distinguishes ranks that stay out of step from ranks that are only a few collectives apart.

    See [Note: ahead, or only asked later].

    Args:
        seconds: how long a distance must not shrink.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._courses: dict[tuple[str, str], _Course] = {}

    def add(self, at: float, ranks: Mapping[int, Sequence[GroupFlights]], ended: Collection[int]) -> Distance | None:
        """Adds an examination; returns a distance that will not disappear by itself.

        Args:
            at: time of the examination, in seconds.
            ranks: rank -> its groups.
            ended: ranks that run no cell.
        """
        courses, found = {}, None
        for key, now in distances(ranks).items():
            course = self._courses.get(key)
            if course is None or now.behind != course.last.behind or now.gap < course.last.gap:
                course = _Course(at, now, now)
            course.last, courses[key] = now, course
            if found is None and at - course.since >= self._seconds and self._stays(course, at - course.since, ended):
                found = now
        self._courses = courses
        return found

    def _stays(self, course: _Course, seconds: float, ended: Collection[int]) -> bool:
        first, now = course.first, course.last
        if now.behind in ended:
            late = now.launched is not None and now.launched.seconds >= self._seconds
            return late and now.ahead not in ended
        if now.gap == first.gap:
            return False
        if now.entered[1] == first.entered[1]:
            return now.gap >= _STANDS
        speed = (now.entered[0] - first.entered[0]) / seconds
        return now.gap > _MOVES + speed * SKEW_S


def in_flight_words(told: InFlight) -> str:
    """A rank's collectives in flight, e.g. ``"2, oldest all_reduce #18 of 4 MiB for 3.2 s"``; "" if there are none."""
    oldest = told.oldest
    if oldest is None:
        return ""
    kind = Collective(oldest.name, "?" if oldest.bytes else "", oldest.bytes)
    return _count_words(told.count, Flight(oldest.number, kind, oldest.seconds, oldest.bucket))


def _count_words(count: int, oldest: Flight) -> str:
    return f"{count}, oldest {oldest}" if count > 1 else str(oldest)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 0.1 else duration(value)
