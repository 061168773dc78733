"""The messages of a journal, checked, for readers of a complete file and of one that still grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...printable import printable, printable_json, printable_lines
from ...protocol import descriptions, events, journal

__all__ = ["Decoder", "End", "Opening"]

_NONE = np.empty(0, events.DTYPE)


@dataclass(frozen=True)
class End:
    """How a program ended.

    Attributes:
        how: "finished", "interrupted", an error.
        missing: events that could not be written.
        why: why not, as reported by the system.
        recorded: sequence number of the event after the last one that was recorded; None if unknown.
        ended_ns: when, on the host's wall clock; 0 if unknown.
        last_words: what it did last, e.g. a warning that it logged, with its line; "" if unknown.
    """

    how: str
    missing: int = 0
    why: str = ""
    recorded: int | None = None
    ended_ns: int = 0
    last_words: str = ""

    def rest(self, rank: int, session: int) -> list[events.Batch]:
        """What comes after the last batch: nothing, but the timeline learns by its number how many are missing."""
        return [] if self.recorded is None else [events.Batch(rank, session, self.recorded, 0, _NONE)]


@dataclass(frozen=True)
class Opening:
    """Whose journal, or other recording, it is.

    Attributes:
        path: the file, as errors call it.
        rank: the rank.
        session: when its process began, in nanoseconds since 1970; 0 if unknown.
        run: what torch's agent calls the run; empty if unknown.
        restart: how often its process had been restarted.
        world_size: how many ranks the run had; 0 if unknown.
        host: name of its host.
        clock: the same for ranks with one clock; empty if unknown.
        pid: its process; None if unknown.
        torch: the version of torch; empty if unknown.
        script: what it runs; empty if unknown.
        end: how the program ended, where the disk had no room for a further message.
    """

    path: Path
    rank: int
    session: int = 0
    run: str = ""
    restart: int = 0
    world_size: int = 0
    host: str = ""
    clock: str = ""
    pid: int | None = None
    torch: str = ""
    script: str = ""
    end: End | None = None


_WHOLE, _COUNT = descriptions.integer(0, 1 << 31), descriptions.integer(0, 1 << 63)
_FIELDS = {
    "rank": _WHOLE, "session": _COUNT, "run": descriptions.text, "restart": _WHOLE,
    "world_size": _WHOLE, "host": descriptions.text, "clock": descriptions.text, "pid": _WHOLE,
}  # fmt: skip
_MAY_LACK = {"torch": descriptions.text, "script": descriptions.text}


class Decoder:
    """Takes a journal's bytes as they come.

    Args:
        path: of the file, for errors and notices.

    Attributes:
        opening: None until it has come.
        offset: where in the file the bytes begin that it wants next.
    """

    def __init__(self, path: Path) -> None:
        self.opening: Opening | None = None
        self.reader = journal.Reader()
        self._path = path

    @property
    def offset(self) -> int:
        """How many bytes of the file have been read."""
        return self.reader.offset

    def read(self) -> Iterator[Opening | End | events.Batch | dict[str, Any]]:
        """Yields the messages of the whole file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a journal, or a message is not valid.
        """
        for data in journal.chunks(self._path, self.reader):
            yield from self.feed(data, last=not data)

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[Opening | End | events.Batch | dict[str, Any]]:
        """Yields the messages in these bytes, in order: the opening, batches, descriptions and the end.

        Args:
            data: the bytes from `offset` on.
            last: whether there are no more.

        Raises:
            ValueError: names the file, and what is wrong with it.
        """
        name = printable(str(self._path))
        try:
            found = self.reader.feed(data, last=last)
        except ValueError as error:
            raise ValueError(f"{name} can't be read: {error}") from error
        for frames in found:
            try:
                yield from self._said(frames)
            except _OtherSchema:
                raise
            except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
                what = f"a message lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{name} is damaged: {what}") from error
        if last and self.opening is None:
            raise ValueError(
                f"{name} has no header: its rank was killed while writing it, the disk was full, or the beginning of "
                "the file is damaged"
            )

    def notices(self) -> list[str]:
        """Sentences about damaged or missing parts."""
        reader, name = self.reader, printable(str(self._path))
        if not (reader.places or reader.missing or reader.gave_up):
            return []
        where = "in one place" if reader.places == 1 else f"in {reader.places:,} places"
        said = [f"{name} is damaged {where} ({reader.bytes:,} bytes)" if reader.places else f"{name} has a gap"]
        if reader.missing:
            said.append(f"{reader.missing:,} of its messages are missing")
        said.append("the rest is ignored" if reader.gave_up else "the parts before and after were read")
        return ["; ".join(said)]

    def _said(self, frames: list[bytes]) -> Iterator[Opening | End | events.Batch | dict[str, Any]]:
        if not frames or frames[0] != journal.JSON_FRAME:
            batch = events.decode(frames)
            if self.opening is None:
                raise ValueError("it does not begin with a header")
            if (batch.rank, batch.session) != (self.opening.rank, self.opening.session):
                raise ValueError(
                    f"it holds events of rank {batch.rank}, but is the journal of rank {self.opening.rank}"
                )
            yield batch
            return
        message = json.loads(frames[1])
        if message["type"] == "journal":
            yield self._begin(message)
        elif self.opening is None:
            raise ValueError("it does not begin with a header")
        elif message["type"] == "describe":
            for description in message["descriptions"]:
                yield descriptions.checked(description)
        elif message["type"] == "end":
            end = _end(message)
            yield end
            yield from end.rest(self.opening.rank, self.opening.session)

    def _begin(self, message: dict[str, Any]) -> Opening:
        version = message["schema_version"]
        if version != events.SCHEMA_VERSION:
            raise _OtherSchema(
                f"{printable(str(self._path))} holds events of schema version {version!r:.40}; this ddp_lab reads "
                f"version {events.SCHEMA_VERSION}. Read it with the ddp_lab that wrote it"
            )
        known = _FIELDS | {name: one for name, one in _MAY_LACK.items() if name in message}
        for name, one in known.items():
            one(message[name], name)
        fields = {name: printable_json(message[name]) for name in known}
        if self.opening is not None:
            raise ValueError(f"it is the journal of rank {self.opening.rank} and, further on, of rank {fields['rank']}")
        self.opening = Opening(self._path, **fields)
        if "how" in message:
            self.opening = replace(self.opening, end=_end(message))
        return self.opening


def _end(message: dict[str, Any]) -> End:
    why, missing, recorded = message.get("why", ""), message.get("missing", 0), message.get("recorded")
    ended_ns, last_words = message.get("ended_ns", 0), message.get("last_words", "")
    descriptions.text(message["how"], "how it ended")
    descriptions.text(why, "why events are missing")
    descriptions.text(last_words, "what it did last")
    _COUNT(missing, "the number of missing events")
    _COUNT(ended_ns, "when it ended")
    if recorded is not None:
        _COUNT(recorded, "the number of recorded events")
    return End(printable_lines(message["how"]), missing, printable(why), recorded, ended_ns, printable(last_words))


class _OtherSchema(ValueError):
    """The file was written by another version of ddp_lab; it is not damaged."""
