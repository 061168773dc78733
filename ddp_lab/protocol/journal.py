"""The file that a rank of `ddp-lab run` writes while it trains: the data messages of the wire, one after the other.

[Note: a journal survives its rank]
Messages are appended within 20 ms, so whatever ends the process (an exception, a signal, the kernel), the file holds
what was recorded until then; of a message that was being written, the part that is there is left out. The first message
says whose journal it is, the last one how the program ended: without it, the process was killed. The first one has room
for that as well, where the disk takes no more.

[Note: a journal survives its disk]
Each message begins with a mark, its number, its size and two checksums, so that readers find the next one behind bytes
that are damaged, and know how many are missing. What is damaged is read once more before it is given up: a writer on
a full disk takes the part that it has written back, and somebody who follows may have seen that part. Looking for the
next message takes effort in proportion to the bytes that came, whatever they say.

The file is `MAGIC`, then messages. A message is a header (`_HEADER`) and a body: its number of frames (one byte), then
for each frame its length (four bytes, little-endian) and its bytes. Frames are those of the wire: an event batch
(`ddp_lab.protocol.events.encode`), or ``b"j"`` and a JSON object.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import open_regular

MAGIC = b"DDPLJNL2"
SUFFIX = ".journal"
JSON_FRAME = b"j"
MOST_BYTES = 64 << 20  # of a message; the wire takes no larger ones either

_FORMER_MAGIC = b"DDPLJNL1"
_MARK = b"\xddJ\xf1\n"
# mark, number of the message in this file, bytes of its body, their CRC-32, CRC-32 of the header up to here
_HEADER = struct.Struct("<4sIIII")
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 20
# What looking for the next message may cost: so many bytes read again, and for each byte that came so many more.
_EFFORT, _EFFORT_PER_BYTE, _EFFORT_OF_A_TRY = 64 << 20, 4, 1024
_MOST_DOUBTS = 20


def path_of(folder: Path, rank: int, restart: int = 0) -> Path:
    """Where a rank writes; `restart`: how often torch's agent has restarted the workers."""
    return folder / f"rank{rank}{f'.restart{restart}' if restart else ''}{SUFFIX}"


def pack(frames: Sequence[bytes], number: int) -> bytes:
    """One message, as it stands in the file.

    Args:
        frames: what it says.
        number: how many messages stand before it.
    """
    body = bytes([len(frames)]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    header = _HEADER.pack(_MARK, number, len(body), zlib.crc32(body), 0)[: -_LENGTH.size]
    return header + _LENGTH.pack(zlib.crc32(header)) + body


def json_frames(kind: str, **fields: Any) -> list[bytes]:
    """The frames of a message that is a JSON object."""
    return [JSON_FRAME, json.dumps({"type": kind, **fields}).encode()]


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
    """Takes the messages out of a journal's bytes as they come, and goes on behind what is damaged.

    Attributes:
        offset: where in the file the bytes begin that it wants next; behind a place that looks damaged it wants the
            same ones once more.
        places: where bytes stand that are no message.
        bytes: how many those are.
        missing: messages that are not there, by the numbers of the others.
        gave_up: the rest is damaged in so many places that it is left out.
    """

    def __init__(self) -> None:
        self.offset = self.places = self.bytes = self.missing = 0
        self.gave_up = False
        self._data = bytearray()
        self._number = 0  # of the next message
        self._effort = _EFFORT
        self._doubted, self._doubts = -1, 0  # offset of what was read once more; how often that was
        self._skipped = 0  # bytes since the last message that was whole
        self._cut = False  # those may be the beginning of a message, of which the rest was never written

    def feed(self, data: bytes, *, last: bool = False) -> list[list[bytes]]:
        """The messages that are whole with this further bytes of the file.

        Args:
            data: from `offset` on.
            last: there are no more.

        Raises:
            ValueError: the file is no journal, or a message is none that this project writes.
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
        """How many bytes of the file's beginning are at hand and done with."""
        if begin or len(self._data) < len(MAGIC):
            return 0
        if self._data.startswith(_FORMER_MAGIC):
            raise ValueError(
                "it was written by an earlier ddp_lab, without checksums, and can't be read by this one: read "
                "timeline.npz in the same folder, or use the ddp_lab that wrote it"
            )
        if not self._data.startswith(MAGIC):
            raise ValueError("it is no journal of `ddp-lab run`: it does not begin as one")
        return len(MAGIC)

    def _announced(self, at: int) -> tuple[int, int, int]:
        """Number, size and checksum of the message that begins there; of size 0 if none does."""
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
        """Where the next message may begin behind `at`, where none does; `read`: bytes that this took to know."""
        self._effort -= _EFFORT_OF_A_TRY + read
        self.gave_up = self._effort < 0
        following = self._data.find(_MARK, at + 1)
        if following < 0:
            following = len(self._data) - len(_MARK) + 1  # the mark may be cut here
        self._skipped += following - at
        return following


def chunks(path: Path, reader: Reader) -> Iterator[bytes]:
    """The bytes of a file that `reader`, which the caller feeds with them, wants next; the last ones are none.

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
    """The messages of a journal that are whole.

    Raises:
        ValueError: the file is no journal.
    """
    reader = Reader()
    for data in chunks(path, reader):
        yield from reader.feed(data, last=not data)


def is_journal(path: Path) -> bool:
    """Whether a file is a journal, or the beginning of one, by its first bytes.

    Raises:
        ValueError: it is no file.
    """
    with open_regular(path) as file:
        begin = file.read(len(MAGIC))
    return begin in (MAGIC, _FORMER_MAGIC) or (path.suffix == SUFFIX and MAGIC.startswith(begin))


@dataclass(frozen=True)
class Piece:
    """A part of a journal that somebody has not read.

    Attributes:
        name: of the file.
        life: another one if the file was written anew; who has read the former reads it from the beginning.
        offset: where in the file it begins.
        data: bytes, 1 MiB at most.
    """

    name: str
    life: int
    offset: int
    data: bytes


def news(folder: Path, have: Mapping[str, tuple[int, int]]) -> list[Piece]:
    """What journals in a folder hold beyond what somebody has read.

    Args:
        folder: of `ddp-lab run`.
        have: name of a file -> its life, and the offset up to which it was read.

    Raises:
        ValueError: what is called a journal is no file.
    """
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            file = open_regular(path)
        except FileNotFoundError:  # it was there when the folder was listed
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
