"""Collectives of ranks side by side: which rank entered another one, and which is ahead.

[Note: ahead, or only asked later]
Ranks are examined one after the other while they keep running: of two ranks in step, the one that was examined later
seems ahead. So a distance counts only if it never shrank, has grown, and is larger than what the faster rank does in
`SKEW_S`, or if the other rank did not move at all. A rank that catches up shrinks the distance; one whose cell has
ended will not catch up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..formatting import counted, ordinal
from .collectives_in_flight import Collective, Flight, GroupFlights, on_group
from .snapshot import Place, RankSnapshot, Steps

__all__ = ["SKEW_S", "Distance", "Distances", "Mismatch", "count_backwards", "distances", "find_mismatch"]
__all__ += ["left_out_backward", "mismatch_of", "with_places"]

Ask = Callable[[list[int], str, int], Mapping[int, Mapping[str, Any]]]
SKEW_S = 1.0  # between the first and the last answer of one examination
_STANDS = 10  # collectives ahead of a rank that makes no progress
_MOVES = 100  # ahead of one that does
_SAME_TENSORS = {"all_reduce", "broadcast", "reduce", "all_reduce_coalesced"}  # sizes agree on all ranks


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


def mismatch_of(ranks: Sequence[RankSnapshot]) -> Mismatch | None:
    """The first collective of the running cell, or of the last one, that is not the same on all ranks."""
    running = {one.last_cell for one in ranks if one.state == "running"} or {one.last_cell for one in ranks}
    of_cell = [one.rank for one in ranks if one.last_cell in running]
    return find_mismatch({one.rank: one.flights for one in ranks}, of_cell)


def with_places(ranks: Sequence[RankSnapshot], ask: Ask) -> list[RankSnapshot]:
    """The same; where the ranks entered different collectives, with the line that entered each, if it is known.

    Args:
        ranks: all of them.
        ask: called with ranks, group and number; returns rank -> ``file`` and ``line`` where it entered that one.
    """
    found = mismatch_of(ranks)
    if found is None:
        return list(ranks)
    places = {
        rank: Place(answer["file"], answer["line"], "", "", users=True)
        for rank, answer in ask(list(found.calls), found.group, found.number).items()
        if "file" in answer
    }
    return [replace(one, entered_at=places.get(one.rank)) for one in ranks]


def count_backwards(steps: Mapping[int, Steps]) -> tuple[str, int | None]:
    """How many backwards each rank made, in a sentence, and the first step at which the rank with the fewest made a
    forward without a backward; None if its forwards do not tell.

    Args:
        steps: rank -> its steps, of all ranks concerned.
    """
    most, fewest = (pick(steps, key=lambda rank: steps[rank].backwards) for pick in (max, min))
    more, fewer = steps[most], steps[fewest]
    if more.backwards == fewer.backwards:
        return f"All have begun {counted(more.backwards, 'backward')} of {more.module}.", None
    last = f"is in its {ordinal(more.backwards)}" if more.backwards > more.ended else f"made {more.backwards}"
    told = f"Rank {fewest} made {counted(fewer.ended, 'backward')} of {fewer.module}; rank {most} {last}."
    skipped = _skipped(fewer, more)
    if skipped is not None:
        told += f" Rank {fewest} made a forward at step {skipped} without a backward."
    return told, skipped


def left_out_backward(steps: Mapping[int, Steps]) -> str:
    """The first step of a sharded model whose backward a rank left out, in a sentence; "" if there is none. Others may
    not have begun a backward more: they wait in the forward before it.

    Args:
        steps: rank -> its steps, of all ranks concerned.
    """
    for rank, own in steps.items():
        for other in steps.values():
            more = [step for step in sorted(own.forwards) if own.forwards[step] > other.forwards.get(step, 0) > 0]
            if own.backwards <= other.backwards and more:
                made = counted(own.ended, "backward")
                return (
                    f"Rank {rank} made {made} of {own.module} and left one out at step {more[0]}: it made a forward "
                    "there without a backward."
                )
    return ""


def _skipped(fewer: Steps, more: Steps) -> int | None:
    for step in sorted(fewer.forwards.keys() & more.forwards.keys()):
        with_backward = more.forwards[step] if step < fewer.backwards else 0
        if fewer.forwards[step] > with_backward:
            return step
    return None
