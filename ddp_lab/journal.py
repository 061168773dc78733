"""The file that a rank of `ddp-lab run` writes while it trains: the data messages of the wire, one after the other.

[Note: a journal survives its rank]
Messages are appended within 20 ms and never changed, so whatever ends the process (an exception, a signal, the kernel),
the file holds what was recorded until then; of a message that was being written, the part that is there is left out.
The first message says whose journal it is, the last one how the program ended: without it, the process was killed.

A message is its number of frames (one byte), then for each frame its length (four bytes, little-endian) and its bytes.
Frames are those of the wire: an event batch (`ddp_lab.events.encode`), or ``b"j"`` and a JSON object.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["JSON_FRAME", "MAGIC", "SUFFIX", "Piece", "json_message", "messages", "news", "pack", "path_of", "split"]

MAGIC = b"DDPLJNL1"
SUFFIX = ".journal"
JSON_FRAME = b"j"
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 20


def path_of(folder: Path, rank: int, restart: int = 0) -> Path:
    """Where a rank writes; `restart`: how often torch's agent has restarted the workers."""
    return folder / f"rank{rank}{f'.restart{restart}' if restart else ''}{SUFFIX}"


def pack(frames: Sequence[bytes]) -> bytes:
    """One message, as it stands in the file."""
    return bytes([len(frames)]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def json_message(kind: str, **fields: Any) -> bytes:
    """A message that is a JSON object, as it stands in the file."""
    return pack([JSON_FRAME, json.dumps({"type": kind, **fields}).encode()])


def split(data: bytes) -> tuple[list[list[bytes]], int]:
    """The complete messages at the beginning of `data`, and how many bytes they take."""
    found: list[list[bytes]] = []
    taken = 0
    while taken < len(data):
        at, frames = taken + 1, []
        for _ in range(data[taken]):
            if at + _LENGTH.size > len(data):
                return found, taken
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + size
            if at > len(data):
                return found, taken
            frames.append(data[at - size : at])
        found.append(frames)
        taken = at
    return found, taken


def messages(path: Path) -> Iterator[list[bytes]]:
    """The complete messages of a journal.

    Raises:
        ValueError: the file is no journal.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no journal of `ddp-lab run`")
        rest = b""
        while data := file.read(_PIECE):
            rest += data
            found, taken = split(rest)
            rest = rest[taken:]
            yield from found


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
    """
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            life = path.stat().st_ino
            known, offset = have.get(path.name, (life, 0))
            offset = max(offset, len(MAGIC)) if known == life else len(MAGIC)
            file.seek(offset)
            data = file.read(_PIECE)
        if data:
            found.append(Piece(path.name, life, offset, data))
    return found
