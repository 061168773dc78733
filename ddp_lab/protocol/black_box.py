"""What a rank has left in a file in memory, read by its parent: see [Note: what a dead rank leaves].

The layout is that of `csrc/record/black_box.cpp`: a header, the recorder's slots, descriptions.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .events import DTYPE

__all__ = ["BlackBox", "description_key", "pid_of", "read", "with_ranks_of_groups"]

# magic, process id, offset of the slots, their number, bytes of one, offset of the texts, how many bytes they have
_HEADER = struct.Struct("<8sQQQQQQ")
_MAGIC = b"DDPLBBX1"
_SLOT = np.dtype([("stamp", "<u8"), ("lost", "<u8"), ("words", "<u8", (DTYPE.itemsize // 8 - 1,))])


@dataclass(frozen=True)
class BlackBox:
    """What a process has recorded last.

    Attributes:
        pid: its process id.
        events: the newest ones, of dtype `DTYPE`, in the order of their sequence numbers, of which some may be missing.
        descriptions: in the order in which they were made; those of calls and groups also as C++ found them.
    """

    pid: int
    events: npt.NDArray[np.void]
    descriptions: list[dict[str, Any]]


def read(file: int) -> BlackBox | None:
    """What is in the file; None if no process has begun to use it.

    Raises:
        ValueError: another version of ddp_lab has written it.
    """
    header = os.pread(file, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header[: len(_MAGIC)].strip(b"\0"):
        return None
    magic, pid, slots_at, slots, slot_bytes, texts_at, text_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or slot_bytes != _SLOT.itemsize:
        raise ValueError("what the rank has left was written by another version of ddp_lab")
    texts = os.pread(file, text_bytes, texts_at).splitlines()
    return BlackBox(pid, _events(os.pread(file, slots * slot_bytes, slots_at)), [json.loads(one) for one in texts])


def pid_of(file: int) -> int | None:
    """The process that has begun to use the file; None if none has."""
    header = os.pread(file, _HEADER.size, 0)
    return int(_HEADER.unpack(header)[1]) or None if len(header) == _HEADER.size else None


def with_ranks_of_groups(descriptions: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same, each once: of two of one call or group the later one, which Python has made. C++ does not know the
    ranks of a group: those of the default group."""
    for one in {description_key(one): one for one in descriptions}.values():
        yield {"ranks": list(range(one["size"])), **one} if "size" in one else dict(one)


def description_key(one: Mapping[str, Any]) -> object:
    """What two descriptions of the same thing have in common."""
    return (one["type"], one["index"]) if one.get("type") in ("call", "group") else json.dumps(one, sort_keys=True)


def _events(slots: bytes) -> npt.NDArray[np.void]:
    """Those that were completely written: see [Note: stamps] in `csrc/record/recorder.cpp`."""
    found = np.frombuffer(slots, _SLOT)
    found = found[(found["stamp"] != 0) & (found["stamp"] % 2 == 0)]
    words = np.empty((len(found), DTYPE.itemsize // 8), "<u8")
    words[:, 0] = found["stamp"] // 2 - 1
    words[:, 1:] = found["words"]
    return words[np.argsort(words[:, 0])].view(DTYPE).ravel()
