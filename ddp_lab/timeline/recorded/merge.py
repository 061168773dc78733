"""Many files of a run become one timeline: `ddp-lab report FILE…`, `Timeline.load([...])`, and the end of a run.

A rank that was restarted has a file for each of its processes. Ranks on one host share a clock; those of another host
are moved onto the first rank's, see [Note: buckets as barriers].
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...analysis.clocks import ClockOffset, Moments, clock_offset
from ...diagnosis.crashes import Failure, first_sentence
from ...formatting import label_of, label_of_ranges
from ...protocol import archive as archives
from ...protocol import journal
from ...protocol.events import Batch, Kind
from ...protocol.journal import SUFFIX, Opening, files_in, is_journal
from ..clocks import TIMES
from ..event_tables import TimelineModel
from .ends import failure_of

__all__ = ["check_ranks", "find_files", "read", "read_path"]

_Timeline = TypeVar("_Timeline", bound=TimelineModel)
_EVENTS = 1_000_000  # that a timeline keeps at least
_GOOD_ENDS = ("finished", "saved")
_ALL_OR_A_PART = "Give the files of all ranks, or accept a part of them (--partial, partial=True)"
_WAITS = re.compile("_?(allreduce|allgather|reduce_scatter|alltoall|barrier)")
_NOTHING = (
    "nothing to report: the recorded processes entered no collective and built no DistributedDataParallel (a model on "
    "one process needs none; ranks that the script starts itself are recorded only if multiprocessing starts them)"
)


@dataclass(frozen=True)
class Recording(Opening):
    """The recording of one process of one rank.

    Attributes:
        how: how the program ended: "finished", "interrupted", an error; "killed" if the file does not say.
        ended_ns: when, on its host's wall clock; 0 if the file does not say.
        last_words: what it did last, e.g. a warning that it logged, with its line; "" if unknown.
        batches: events, oldest first.
        descriptions: what they refer to.
        damage: sentences about damaged or missing parts.
        moved: the offset by which the times were moved to another host's clock; None if they were not.
    """

    how: str = ""
    ended_ns: int = 0
    last_words: str = ""
    batches: list[Batch] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    moved: ClockOffset | None = None


def read_path(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], make: type[_Timeline], *, partial: bool
) -> tuple[_Timeline, tuple[str, ...]]:
    """The timeline of `Timeline.load`, and sentences about damaged or missing parts of the files; see there."""
    files = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(file) for file in path]
    several = len(files) != 1 or files[0].is_dir() or files[0].suffix == SUFFIX
    made, _, damage = read(files, make, partial=partial or not several)
    return made, damage


def read(
    paths: Sequence[str | os.PathLike[str]], make: type[_Timeline], *, partial: bool = False
) -> tuple[_Timeline, tuple[str, ...], tuple[str, ...]]:
    """Merges files that ranks wrote, with their times on one clock.

    Args:
        paths: files, or folders that hold them.
        make: creates an empty timeline for them.
        partial: report ranks without a file in a notice instead of an error.

    Returns:
        The timeline; sentences for its reader: which ranks are missing or failed, how the clocks were aligned, which
        files are damaged; those of them about damaged or missing parts of the files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not a recording or has another schema version; two files are of the same rank, or of
            different runs; a rank of a model has no file.
    """
    files, left_out = find_files([Path(path) for path in paths])
    if len(files) == 1 and not is_journal(files[0]):
        if files[0].suffix == SUFFIX:
            raise ValueError(f"{files[0]} is not a journal of `ddp-lab run`: it does not begin as one")
        return _of_saved(files[0], make, partial, left_out)
    recordings: list[Recording] = []
    notices = [*left_out]
    for path in files:
        try:
            recordings += [_journal(path)] if is_journal(path) else _saved(path)
        except ValueError as error:
            if not partial:
                raise
            notices.append(f"ignored: {error}")
    if not recordings:
        raise ValueError("; ".join(notices) or "there is nothing to read")
    check_ranks(recordings)
    missing = _missing(recordings)
    if missing:
        text = (
            f"there is no file of {label_of_ranges(missing)}, which belongs to the run: the {len(files)} given files "
            f"are of {label_of({one.rank for one in recordings})}"
        )
        if not partial:
            both = "; ".join([*left_out, text])
            raise ValueError(f"{both}. {_ALL_OR_A_PART}")
        notices.append(text)
    damage = [sentence for one in recordings for sentence in one.damage]
    notices += [*damage, *_early_ends(recordings)]
    recordings, said = _on_one_clock(recordings)
    timeline = make(max_events=max(_EVENTS, sum(len(batch.events) for one in recordings for batch in one.batches)))
    _put(recordings, timeline)
    timeline.failure = _failure(recordings, make, timeline)
    is_told = timeline.failure is not None and timeline.failure.cause is not None
    nothing = () if is_told or timeline.reducers() or timeline.groups() else (_NOTHING,)
    return timeline, (*notices, *said, *nothing), tuple(damage)


def _failure(recordings: Sequence[Recording], make: type[_Timeline], timeline: _Timeline) -> Failure | None:
    """Why the last attempt ended early, or one at the same time: what was started again begins to count anew."""
    attempts: dict[int, list[Recording]] = {}
    for one in recordings:
        attempts.setdefault(one.restart, []).append(one)
    if len(attempts) == 1:
        return failure_of(timeline)
    last = max(attempts)
    begun_ns = min(one.session for one in attempts[last])
    for attempt, ranks in sorted(attempts.items(), reverse=True):
        if attempt == last or any(one.ended_ns > begun_ns for one in ranks):
            timeline = make()
            _put(ranks, timeline)
            if (failure := failure_of(timeline)) is not None:
                return failure
    return None


def _of_saved(
    path: Path, make: type[_Timeline], partial: bool, notices: list[str]
) -> tuple[_Timeline, tuple[str, ...], tuple[str, ...]]:
    """What `read` returns, of a timeline that was saved."""
    archive = archives.read(path)
    timeline = make(max_events=max(_EVENTS, sum(len(events) for _, events in archive.chunks)))
    timeline.restore(archive)
    present = {rank.rank for rank in timeline.ranks()}
    missing = {rank for model in timeline.reducers() for rank in model.ranks} - present
    if missing:
        text = f"{path} holds only {label_of(present)}, without {label_of(missing)}"
        if not partial:
            raise ValueError(f"{text}. {_ALL_OR_A_PART}")
        notices.append(text)
    return timeline, tuple(notices), ()


def _early_ends(recordings: Sequence[Recording]) -> list[str]:
    """The ranks that did not finish, in the order of their ends: the first brought down the others. Those that torch's
    agent then killed could not say when."""
    early = [one for one in recordings if one.how not in _GOOD_ENDS]
    early.sort(key=lambda one: (one.restart, not one.ended_ns, one.ended_ns, one.rank))
    count = Counter(one.rank for one in early)
    who = [f"rank {one.rank}" + (f" (process {one.pid})" if count[one.rank] > 1 else "") for one in early]
    return [f"{rank} ended early: {first_sentence(one.how)}" for rank, one in zip(who, early, strict=True)]


def check_ranks(recordings: Sequence[Opening]) -> None:
    """Rejects files that can't be of one run.

    Raises:
        ValueError: two files are of the same rank, or of different runs.
    """
    known: dict[tuple[int, int], Opening] = {}
    runs: dict[str, Opening] = {}
    for one in recordings:
        other = known.setdefault((one.rank, one.restart), one)
        if other is not one:
            raise ValueError(f"two files are of rank {one.rank}: {other.path} and {one.path}. Give only one of them")
        if one.run:
            runs.setdefault(one.run, one)
    if len(runs) > 1:
        first, second = list(runs.values())[:2]
        raise ValueError(
            f"{first.path} (rank {first.rank}) and {second.path} (rank {second.rank}) are of different runs, "
            f"{first.run} and {second.run}. Give the files of one run"
        )


def _missing(recordings: Iterable[Recording]) -> list[range]:
    """Ranks that took part according to the other files, and have no file.

    Ranges, and no more than there are files: how many ranks there were is only what a file says.
    """
    world, present, members = 0, set(), set()
    for one in recordings:
        present.add(one.rank)
        world = max(world, one.world_size)
        for description in one.descriptions:
            members.update(description.get("group_ranks", ()))
    edges = [-1, *sorted(rank for rank in present if rank < world), world]
    gaps = [range(before + 1, after) for before, after in itertools.pairwise(edges)]
    return [*filter(len, gaps), *(range(rank, rank + 1) for rank in sorted(members - present) if rank >= world)]


# ---- files, one by one ----------------------------------------------------------------------------------


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The given files, and of each folder its journals, or else its ``.npz`` files.

    Returns:
        The files, and sentences about files in a folder that have such a name but are not recordings.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a folder contains no recording.
    """
    found: list[Path] = []
    others: list[str] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist")
            found.append(path)
            continue
        inside = []
        for suffix, is_one in ((SUFFIX, is_journal), (".npz", archives.is_archive)):
            for one in files_in(path) if suffix == SUFFIX else sorted(path.glob(f"*{suffix}")):
                try:
                    why = "" if is_one(one) else "it is not a recording"
                except ValueError as error:
                    why = str(error)
                if why:
                    others.append(f"{one} is ignored: {why}")
                else:
                    inside.append(one)
            if inside:
                break
        if not inside:
            raise ValueError("; ".join([f"{path} contains no recording: neither *{SUFFIX} nor *.npz", *others]))
        found += inside
    return found, others


def _journal(path: Path) -> Recording:
    contents = journal.read(path)
    opening, end = contents.opening, contents.end
    damage = [*contents.damage]
    missing = max(sum(batch.dropped for batch in contents.batches), end.missing if end is not None else 0)
    if missing:
        why = f": {end.why}" if end is not None and end.why else ""
        damage.append(f"{missing:,} events of rank {opening.rank} could not be recorded{why}")
    made = Recording(
        **vars(opening), how="killed", batches=contents.batches, descriptions=contents.descriptions, damage=damage
    )
    return made if end is None else replace(made, how=end.how, ended_ns=end.ended_ns, last_words=end.last_words)


def _saved(path: Path) -> list[Recording]:
    """Several of a timeline that was saved."""
    archive = archives.read(path)
    by_rank = {rank: Recording(path, rank, how="saved") for rank in archive.ranks}
    for rank, description in archive.described:
        by_rank[rank].descriptions.append(description)
    following: dict[int, int] = {}
    for rank, chunk in archive.chunks:
        if len(chunk):
            first = int(chunk["sequence"][0])
            if first < following.get(rank, 0):
                raise ValueError(f"{path} holds several processes of rank {rank}. It can be reported, but not merged")
            following[rank] = int(chunk["sequence"][-1]) + 1
            by_rank[rank].batches.append(Batch(rank, 0, first, 0, chunk))
    return list(by_rank.values())


# ---- clocks ---------------------------------------------------------------------------------------------


def _on_one_clock(recordings: Sequence[Recording]) -> tuple[list[Recording], list[str]]:
    """Aligns the times of other hosts with the clock of the first rank; returns sentences about it."""
    first = min(recordings, key=lambda one: one.rank)
    clocks: dict[str, list[Recording]] = defaultdict(list)
    for one in recordings:
        clocks[one.clock or first.clock].append(one)
    if len(clocks) == 1:
        return list(recordings), []
    reference = _moments(clocks[first.clock])
    moved, said = list(clocks[first.clock]), []
    for clock, members in clocks.items():
        if clock == first.clock:
            continue
        offset = clock_offset(reference, _moments(members))
        said.append(_clock_text(first.host, members, offset))
        moved += [_shifted(one, offset) for one in members] if offset else members
    return moved, said


def _clock_text(first: str, members: Sequence[Recording], offset: ClockOffset | None) -> str:
    who = f"{label_of({one.rank for one in members})} on {members[0].host}"
    if offset is None:
        return f"no collective was shared by {first} and {who}, so the times of the two hosts can't be compared"
    return (
        f"{who}: clock-aligned with {first} by {offset.ns / 1e6:+.3f} ms ± {offset.uncertain_ns / 1e6:.3f} ms "
        f"(from {offset.buckets} collectives)"
    )


def _moments(recordings: Sequence[Recording]) -> Moments:
    """Last launch and first completion of each bucket, and of each collective that waits for all, among ranks of one
    clock."""
    launched = _by_key(recordings, Kind.BUCKET_LAUNCHED, Kind.COLLECTIVE_ENTERED, np.maximum)
    reduced = _by_key(recordings, Kind.BUCKET_REDUCED, Kind.COLLECTIVE_ENDED, np.minimum)
    keys, a, b = np.intersect1d(launched[0], reduced[0], assume_unique=True, return_indices=True)
    return Moments(keys, launched[1][a], reduced[1][b])


def _by_key(
    recordings: Sequence[Recording], kind: Kind, of_groups: Kind, pick: np.ufunc
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Keys (restart, reducer, step and bucket in one number), ascending, and the time that `pick` picks for each."""
    keys, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for one in recordings:
        for batch in one.batches:
            chosen = batch.events[batch.events["kind"] == kind]
            model = (one.restart << 12) + chosen["reducer"].astype(np.int64)
            keys.append((model << 44) + (chosen["step"] << 12) + chosen["bucket"])
            times.append(chosen["host_ns"].astype(np.int64))
        for key, time in _of_groups(one, of_groups):
            keys.append(key)
            times.append(time)
    every_key, every_time = np.concatenate(keys), np.concatenate(times)
    order = np.argsort(every_key, kind="stable")
    found, starts = np.unique(every_key[order], return_index=True)
    return found, pick.reduceat(every_time[order], starts) if len(found) else every_time


def _of_groups(recording: Recording, kind: Kind) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Keys and times of the collectives that no rank can complete before all have entered; keys are not a bucket's."""
    described = recording.descriptions
    waits = [one["index"] for one in described if one.get("type") == "call" and _WAITS.match(one["operation"])]
    groups = np.zeros(1 + max((one["index"] for one in described if one.get("type") == "group"), default=0), np.int64)
    for one in described:
        if one.get("type") == "group":
            named = f"{recording.restart} {one['name']} {one['ranks']}"
            groups[one["index"]] = zlib.crc32(named.encode()) >> 10
    for batch in recording.batches:
        known = (batch.events["kind"] == kind) & np.isin(batch.events["parameter"], waits)
        number = batch.events["process_group"]
        chosen = batch.events[known & (number >= 0) & (number < len(groups))]
        at = np.where(chosen["device_end_ns"] != 0, chosen["device_end_ns"], chosen["host_ns"]).astype(np.int64)
        yield (1 << 62) + (groups[chosen["process_group"]] << 40) + (chosen["step"] & ((1 << 40) - 1)), at


def _shifted(recording: Recording, by: ClockOffset) -> Recording:
    batches = []
    for batch in recording.batches:
        events = batch.events.copy()
        for name in TIMES:
            events[name][events[name] != 0] += by.ns
        batches.append(replace(batch, events=events))
    return replace(recording, batches=batches, moved=by)


# ---- merging --------------------------------------------------------------------------------------------


def _put(recordings: Sequence[Recording], timeline: TimelineModel) -> None:
    timeline.recorded = True
    for one in sorted(recordings, key=lambda one: (one.restart, one.rank)):
        session = one.restart + 1
        status: dict[str, Any] = {"state": one.how, "pid": one.pid, "host": one.host, "session": session}
        about = {"began_ns": one.session, "torch": one.torch, "script": one.script, "last_words": one.last_words}
        status |= {name: value for name, value in about.items() if value}
        if one.moved is not None:
            moved = {"offset_ns": one.moved.ns, "uncertain_ns": one.moved.uncertain_ns, "drift": one.moved.drift}
            status["clock"] = {"host": one.host, **moved}
        timeline.set_status(one.rank, status)
        for description in one.descriptions:
            timeline.describe(one.rank, {**description, "session": session})
        for batch in one.batches:
            timeline.extend(Batch(one.rank, session, batch.first, batch.dropped, batch.events))
