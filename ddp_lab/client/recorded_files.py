"""Files that ranks wrote, read one by one: journals of `ddp-lab run`, `recording.save`, `Timeline.save`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import events, journal
from . import timeline_files

__all__ = ["Recording", "find_files", "is_journal", "read"]


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
        how: how the program ended: "finished", "interrupted", an error; "killed" if the file does not say.
        batches: events, oldest first.
        descriptions: what they refer to.
    """

    path: Path
    rank: int
    run: str = ""
    restart: int = 0
    world_size: int | None = None
    host: str = ""
    clock: str = ""
    pid: int | None = None
    how: str = ""
    batches: list[events.Batch] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: those given, and of each folder the journals, or else the ``.npz`` files.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a folder holds no recording.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist")
            found.append(path)
            continue
        inside = sorted(path.glob(f"*{journal.SUFFIX}")) or sorted(path.glob("*.npz"))
        if not inside:
            raise ValueError(f"{path} holds no recording: neither *{journal.SUFFIX} nor *.npz")
        found += inside
    return found


def read(path: Path) -> list[Recording]:
    """What a file holds: one recording, or several of a timeline that was saved.

    Raises:
        ValueError: it is no recording, or of another schema version.
    """
    return [_journal(path)] if is_journal(path) else list(_saved(path))


def is_journal(path: Path) -> bool:
    """Whether a file is a journal, by its beginning."""
    with path.open("rb") as file:
        return file.read(len(journal.MAGIC)) == journal.MAGIC


def _journal(path: Path) -> Recording:
    made = Recording(path, rank=-1, how="killed")
    for frames in journal.messages(path):
        if frames[0] != journal.JSON_FRAME:
            made.batches.append(events.decode(frames))
            continue
        message = json.loads(frames[1])
        if message["type"] == "journal":
            _check(path, message["schema_version"])
            for name in ("rank", "run", "restart", "world_size", "host", "clock", "pid"):
                setattr(made, name, message[name])
        elif message["type"] == "describe":
            made.descriptions += message["descriptions"]
        elif message["type"] == "end":
            made.how = message["how"]
    if made.rank < 0:
        raise ValueError(f"{path} does not say whose journal it is: its rank was killed while it was being begun")
    return made


def _check(path: Path, version: int) -> None:
    if version != events.SCHEMA_VERSION:
        raise ValueError(
            f"{path} holds events of schema version {version}, this ddp_lab reads {events.SCHEMA_VERSION}: "
            "read it with the ddp_lab that wrote it"
        )


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
