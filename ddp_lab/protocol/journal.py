"""The file that a rank of `ddp-lab run` writes while it trains: the data messages of the wire, one after the other.

[Note: a journal survives its rank]
Messages are appended within 20 ms, so whatever ends the process (an exception, a signal, the kernel), the file contains
the events recorded until then; a partly written message is ignored. The first message identifies the rank, the last one
says how the program ended: without it, the process was killed. The first one reserves space for that as well, in case
the disk is full.

[Note: a journal survives its disk]
Each message begins with a mark, its number, its size and two checksums, so that readers find the next one after damaged
bytes, and know how many are missing. Damaged bytes are read once more before they are skipped: a writer on a full disk
removes a partly written message, and a reader that follows may have seen that part. The effort of finding the next
message is proportional to the number of bytes read, whatever they contain.

The file is `MAGIC`, then messages. A message is a header (`_HEADER`) and a body: its number of frames (one byte), then
for each frame its length (four bytes, little-endian) and its bytes. Frames are those of the wire: an event batch
(`ddp_lab.protocol.events.encode`), or ``b"j"`` and a JSON object. `Reader` finds the messages, `Decoder` checks them,
of a complete file and of one that still grows.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..files import open_regular
from ..printable import printable, printable_json, printable_lines, what_is_wrong
from . import descriptions, events

MAGIC = b"DDPLJNL2"
SUFFIX = ".journal"
_OF_CHILD = ".child"
# How a rank ended that could not say it: when another one had failed, or by itself, by os._exit for example.
ENDED_WITH_RUN = "ended with the run"
BEFORE_ITS_END = "before the end of the program"
EXITED = f"exited with code 0 {BEFORE_ITS_END}"
JSON_FRAME = b"j"
MOST_BYTES = 64 << 20  # of a message; the wire has the same limit

_MARK = b"\xddJ\xf1\n"
# mark, number of the message in this file, bytes of its body, their CRC-32, CRC-32 of the header up to here
_HEADER = struct.Struct("<4sIIII")
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 20
# Limits of the search for the next message: bytes read again, and further ones for each new byte.
_EFFORT, _EFFORT_PER_BYTE, _EFFORT_OF_A_TRY = 64 << 20, 4, 1024
_MOST_DOUBTS = 20


def path_of(folder: Path, rank: int, restart: int = 0, *, of_child: bool = False) -> Path:
    """The path of a rank's journal.

    Args:
        folder: of the run.
        rank: which.
        restart: how often torch's agent has restarted the workers.
        of_child: the rank was started by the script, not by the agent.
    """
    return folder / f"rank{rank}{f'.restart{restart}' if restart else ''}{_OF_CHILD if of_child else ''}{SUFFIX}"


def files_in(folder: Path) -> list[Path]:
    """The journals of a run, in the order of their names; without the script's own if the script has started ranks."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in found if path.name.endswith(f"{_OF_CHILD}{SUFFIX}")] or found


def pack(frames: Sequence[bytes], number: int) -> bytes:
    """One message as bytes of the file.

    Args:
        frames: its contents.
        number: number of messages before it.
    """
    body = bytes([len(frames)]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    header = _HEADER.pack(_MARK, number, len(body), zlib.crc32(body), 0)[: -_LENGTH.size]
    return header + _LENGTH.pack(zlib.crc32(header)) + body


def json_frames(kind: str, **fields: Any) -> list[bytes]:
    """The frames of a message that is a JSON object."""
    return [JSON_FRAME, json.dumps({"type": kind, **fields}).encode()]


def event_messages(described: Iterable[Mapping[str, Any]], batches: Iterable[events.Batch]) -> list[list[bytes]]:
    """The messages of event batches, behind those of the descriptions to which they refer."""
    made = [json_frames("describe", descriptions=[one]) for one in described]
    return [*made, *([bytes(frame) for frame in events.encode(batch)] for batch in batches)]


def _frames(body: memoryview) -> list[bytes]:
    """The frames of a message.

    Raises:
        ValueError: they do not fill it.
    """
    found, at = [], 1
    for _ in range(body[0] if len(body) else 0):
        if at + _LENGTH.size > len(body):
            break
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        found.append(bytes(body[at : at + size]))
        at += size
    if at != len(body) or len(found) != body[0]:
        raise ValueError("the frames of a message do not fill it")
    return found


class Reader:
    """Extracts messages from a journal's bytes as they arrive, and continues after damaged ones.

    Attributes:
        offset: offset in the file of the bytes that it needs next; after a place that looks damaged, the same ones
            once more.
        places: offsets of bytes that are not messages.
        bytes: how many those are.
        missing: number of missing messages, from the numbers of the others.
        gave_up: whether the rest is damaged in so many places that it was skipped.
    """

    def __init__(self) -> None:
        self.offset = self.places = self.bytes = self.missing = 0
        self.gave_up = False
        self._data = bytearray()
        self._number = 0  # of the next message
        self._effort = _EFFORT
        self._doubted, self._doubts = -1, 0  # offset of bytes that were read once more; how often
        self._skipped = 0  # bytes since the last complete message
        self._cut = False  # those may be the beginning of a message whose rest was never written

    def feed(self, data: bytes, *, last: bool = False) -> list[list[bytes]]:
        """The messages that are complete with these further bytes of the file.

        Args:
            data: bytes from `offset` on.
            last: whether there are no more.

        Raises:
            ValueError: the file is not a journal, or a message was not written by this project.
        """
        self._data += data
        begin = self.offset - (len(self._data) - len(data))
        self._effort += _EFFORT_PER_BYTE * len(data)
        found, at = [], self._magic(begin)
        while not self.gave_up and len(self._data) - at >= _HEADER.size:
            number, size, checksum = self._announced(at)
            end = at + _HEADER.size + size
            if size and end > len(self._data):
                if not last:
                    break
                self._cut |= not self._skipped
            elif size:
                with memoryview(self._data)[at + _HEADER.size : end] as body:
                    if zlib.crc32(body) == checksum and number >= self._number:
                        found.append(_frames(body))
                        self._took(number)
                        at = end
                        continue
            if not last and not self._skipped and self._doubted != begin + at and self._doubts < _MOST_DOUBTS:
                self._doubted, self._doubts = begin + at, self._doubts + 1
                del self._data[at:]
                break
            at = self._skip(at, size if end <= len(self._data) else 0)
        if last or self.gave_up:
            if self._skipped and not self._cut:
                self._skipped += len(self._data) - at
                self._note_damage()
            at = len(self._data)
        del self._data[:at]
        self.offset = begin + at + len(self._data)
        return found

    def _magic(self, begin: int) -> int:
        """How many bytes at the file's beginning are processed."""
        if begin or len(self._data) < len(MAGIC):
            return 0
        if not self._data.startswith(MAGIC):
            raise ValueError("it is not a journal of `ddp-lab run`: its first bytes differ")
        return len(MAGIC)

    def _announced(self, at: int) -> tuple[int, int, int]:
        """Number, size and checksum of the message that begins there; size 0 if none does."""
        mark, number, size, checksum, own = _HEADER.unpack_from(self._data, at)
        header = self._data[at : at + _HEADER.size - _LENGTH.size]
        whole = mark == _MARK and 0 < size <= MOST_BYTES and zlib.crc32(header) == own
        return (number, size, checksum) if whole else (0, 0, 0)

    def _took(self, number: int) -> None:
        if self._skipped:
            self._note_damage()
        self.missing += number - self._number
        self._number = number + 1

    def _note_damage(self) -> None:
        self.places += 1
        self.bytes += self._skipped
        self._skipped, self._cut = 0, False

    def _skip(self, at: int, read: int) -> int:
        """Where the next message may begin after `at`, where none does; `read`: bytes read to determine that."""
        self._effort -= _EFFORT_OF_A_TRY + read
        self.gave_up = self._effort < 0
        following = self._data.find(_MARK, at + 1)
        if following < 0:
            following = len(self._data) - len(_MARK) + 1  # the mark may be cut off here
        self._skipped += following - at
        return following


def chunks(path: Path, reader: Reader) -> Iterator[bytes]:
    """The bytes of a file that `reader` needs next, and which the caller passes to it; the last ones are empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a pipe, a device or a folder.
    """
    data = b"-"
    with open_regular(path) as file:
        while data:
            file.seek(reader.offset)
            data = file.read(_PIECE)
            yield data


def messages(path: Path) -> Iterator[list[bytes]]:
    """The complete messages of a journal.

    Raises:
        ValueError: the file is not a journal.
    """
    reader = Reader()
    for data in chunks(path, reader):
        yield from reader.feed(data, last=not data)


def is_journal(path: Path) -> bool:
    """Whether a file is a journal, or the beginning of one, by its first bytes.

    Raises:
        ValueError: it is not a file.
    """
    with open_regular(path) as file:
        begin = file.read(len(MAGIC))
    return begin == MAGIC or (path.suffix == SUFFIX and MAGIC.startswith(begin))


@dataclass(frozen=True)
class Piece:
    """A part of a journal that a reader does not have.

    Attributes:
        name: of the file.
        life: changes if the file was rewritten; readers of the former then start from the beginning.
        offset: where in the file it begins.
        data: bytes, 1 MiB at most.
    """

    name: str
    life: int
    offset: int
    data: bytes


def news(folder: Path, have: Mapping[str, tuple[int, int]]) -> list[Piece]:
    """The parts of a folder's journals that a reader does not have.

    Args:
        folder: of `ddp-lab run`.
        have: name of a file -> its life, and the offset up to which it was read.

    Raises:
        ValueError: a journal's path is not a file.
    """
    found = []
    for path in files_in(folder):
        try:
            file = open_regular(path)
        except FileNotFoundError:  # it existed when the folder was listed
            continue
        with file:
            life = os.fstat(file.fileno()).st_ino
            known, offset = have.get(path.name, (life, 0))
            offset = offset if known == life else 0
            file.seek(offset)
            data = file.read(_PIECE)
        if data:
            found.append(Piece(path.name, life, offset, data))
    return found


# ---- what its messages say ---------------------------------------------------------------------------


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
        return (
            [] if self.recorded is None else [events.Batch(rank, session, self.recorded, 0, np.empty(0, events.DTYPE))]
        )


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
        self.reader = Reader()
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
        for data in chunks(self._path, self.reader):
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
                raise ValueError(f"{name} is damaged: {what_is_wrong('a message', error)}") from error
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
        if not frames or frames[0] != JSON_FRAME:
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


@dataclass(frozen=True)
class Contents:
    """What a complete journal says.

    Attributes:
        opening: whose it is.
        end: how the program ended; None if it was killed.
        batches: events, oldest first.
        descriptions: what they refer to.
        damage: sentences about damaged or missing parts.
    """

    opening: Opening
    end: End | None
    batches: list[events.Batch]
    descriptions: list[dict[str, Any]]
    damage: list[str]


def read(path: Path) -> Contents:
    """Reads a whole journal.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a journal, or a message is not valid.
    """
    decoder = Decoder(path)
    said = list(decoder.read())
    opening = decoder.opening
    assert opening is not None  # else the decoder has refused the file
    batches = [one for one in said if isinstance(one, events.Batch)]
    end = next((one for one in reversed(said) if isinstance(one, End)), None)
    if end is None and opening.end is not None:
        end = opening.end
        batches += end.rest(opening.rank, opening.session)
    return Contents(opening, end, batches, [one for one in said if isinstance(one, dict)], decoder.notices())
