"""Files that ranks wrote, read one by one: journals of `ddp-lab run`, `recording.save`, `Timeline.save`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...analysis.clocks import ClockOffset
from ...protocol import events, journal
from . import journal_messages
from . import saved as timeline_files

__all__ = ["Recording", "find_files", "read"]


@dataclass
class Recording:
    """What one process of one rank recorded.

    Attributes:
        path: the file.
        rank: the rank.
        run: what torch's agent calls the run; empty if unknown.
        restart: how often its process had been restarted.
        world_size: how many ranks the run had; None if unknown.
        host: name of its host.
        clock: the same for ranks with one clock; empty if unknown.
        pid: its process.
        session: when it began, in nanoseconds since 1970; None if unknown.
        torch: the version of torch; empty if unknown.
        script: what it ran; empty if unknown.
        how: how the program ended: "finished", "interrupted", an error; "killed" if the file does not say.
        batches: events, oldest first.
        descriptions: what they refer to.
        damage: sentences on what of it is damaged or missing.
        moved: by how much the times were moved onto another host's clock; None: they were not.
    """

    path: Path
    rank: int
    run: str = ""
    restart: int = 0
    world_size: int | None = None
    host: str = ""
    clock: str = ""
    pid: int | None = None
    session: int | None = None
    torch: str = ""
    script: str = ""
    how: str = ""
    batches: list[events.Batch] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    moved: ClockOffset | None = None


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files that are meant: those given, and of each folder the journals, or else the ``.npz`` files.

    Returns:
        The files, and in words what in a folder has such a name and is no recording.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a folder holds no recording.
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
        for suffix, is_one in ((journal.SUFFIX, journal.is_journal), (".npz", timeline_files.is_saved)):
            for one in sorted(path.glob(f"*{suffix}")):
                try:
                    why = "" if is_one(one) else "it is no recording"
                except ValueError as error:
                    why = str(error)
                if why:
                    others.append(f"{one} is left out: {why}")
                else:
                    inside.append(one)
            if inside:
                break
        if not inside:
            raise ValueError("; ".join([f"{path} holds no recording: neither *{journal.SUFFIX} nor *.npz", *others]))
        found += inside
    return found, others


def read(path: Path) -> list[Recording]:
    """What a file holds: one recording, or several of a timeline that was saved.

    Raises:
        ValueError: it is no recording, or of another schema version.
    """
    return [_journal(path)] if journal.is_journal(path) else list(_saved(path))


def _journal(path: Path) -> Recording:
    decoder = journal_messages.Decoder(path)
    batches: list[events.Batch] = []
    described: list[dict[str, Any]] = []
    end = None
    for said in journal_messages.read(path, decoder):
        if isinstance(said, events.Batch):
            batches.append(said)
        elif isinstance(said, dict):
            described.append(said)
        elif isinstance(said, journal_messages.End):
            end = said
    opening = decoder.opening
    assert opening is not None  # else the decoder has refused the file
    if end is None and opening.end is not None:
        end = opening.end
        batches += end.rest(opening.rank, opening.session)
    damage = decoder.notices()
    missing = max(sum(batch.dropped for batch in batches), end.missing if end is not None else 0)
    if missing:
        why = f": {end.why}" if end is not None and end.why else ""
        damage.append(f"{missing:,} events of rank {opening.rank} could not be recorded{why}")
    return Recording(
        path, opening.rank, opening.run, opening.restart, opening.world_size, opening.host, opening.clock, opening.pid,
        opening.session, opening.torch, opening.script,
        how="killed" if end is None else end.how, batches=batches, descriptions=described, damage=damage,
    )  # fmt: skip


def _saved(path: Path) -> Iterator[Recording]:
    saved = timeline_files.read(path)
    by_rank = {rank: Recording(path, rank, how="saved") for rank in saved.ranks}
    for rank, description in saved.described:
        by_rank[rank].descriptions.append(description)
    following: dict[int, int] = {}
    for rank, chunk in saved.chunks:
        if len(chunk):
            first = int(chunk["sequence"][0])
            if first < following.get(rank, 0):
                raise ValueError(f"{path} holds several processes of rank {rank}: it can be reported, but not merged")
            following[rank] = int(chunk["sequence"][-1]) + 1
            by_rank[rank].batches.append(events.Batch(rank, 0, first, 0, chunk))
    return iter(by_rank.values())
