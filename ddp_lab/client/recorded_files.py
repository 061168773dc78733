"""Files that ranks wrote, read one by one: journals of `ddp-lab run`, `recording.save`, `Timeline.save`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import events, journal
from ..insight.clocks import ClockOffset
from . import descriptions, timeline_files

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
    how: str = ""
    batches: list[events.Batch] = field(default_factory=list)
    descriptions: list[dict[str, Any]] = field(default_factory=list)
    moved: ClockOffset | None = None


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
        try:
            _take(made, frames)
        except _OtherSchema:
            raise
        except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
            what = f"a message lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is damaged: {what}") from error
    if made.rank < 0:
        raise ValueError(f"{path} does not say whose journal it is: its rank was killed while it was being begun")
    return made


def _take(made: Recording, frames: list[bytes]) -> None:
    """Adds one message of a journal."""
    if not frames or frames[0] != journal.JSON_FRAME:
        made.batches.append(events.decode(frames))
        return
    message = json.loads(frames[1])
    if message["type"] == "journal":
        _begin(made, message)
    elif message["type"] == "describe":
        for description in message["descriptions"]:
            descriptions.check(description)
            made.descriptions.append(description)
    elif message["type"] == "end":
        descriptions.text(message["how"], "how it ended")
        made.how = message["how"]


def _begin(made: Recording, message: dict[str, Any]) -> None:
    version = message["schema_version"]
    if version != events.SCHEMA_VERSION:
        raise _OtherSchema(
            f"{made.path} holds events of schema version {version}, this ddp_lab reads {events.SCHEMA_VERSION}: "
            "read it with the ddp_lab that wrote it"
        )
    for name, one in _OPENING.items():
        one(message[name], name)
        setattr(made, name, message[name])


class _OtherSchema(ValueError):
    """Another ddp_lab wrote it: nothing is damaged."""


_WHOLE = descriptions.integer(0, 1 << 31)
_OPENING: dict[str, Callable[[Any, str], None]] = {
    "rank": _WHOLE, "run": descriptions.text, "restart": _WHOLE, "world_size": _WHOLE, "host": descriptions.text,
    "clock": descriptions.text, "pid": _WHOLE,
}  # fmt: skip


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
