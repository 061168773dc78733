"""Event kinds, the numpy dtype of an event, and the encoding of event batches (shared by ranks and client).

`DTYPE` is the byte layout of `csrc/record/event.h`; a test compares the two. A batch travels as two frames: a
fixed header (`_HEADER`) and the raw bytes of an array of `DTYPE`, so that the reader decodes it with one
`numpy.frombuffer`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 1


class Kind(enum.IntEnum):
    """The fact that an event states (see `csrc/record/event.h`)."""

    NONE = 0
    FORWARD_BEGIN = 1
    FORWARD_END = 2
    BACKWARD_BEGIN = 3
    GRAD_READY = 4
    BUCKET_READY = 5
    BUCKET_LAUNCHED = 6
    BUCKET_REDUCED = 7
    FINALIZE_BEGIN = 8
    BACKWARD_END = 9
    MARK = 10
    REBUILT = 11
    DEVICE_SPAN = 12
    ABANDONED = 13
    ACTIVITY = 14
    SAMPLE = 15
    COLLECTIVE_ENTERED = 16
    COLLECTIVE_ENDED = 17
    COLLECTIVE_FAILED = 18
    WAIT_BEGIN = 19
    WAIT_END = 20
    END_UNSEEN = 21


OF_GROUPS = Kind.COLLECTIVE_ENTERED
"""From this kind on, events are about an operation of a process group: step and bucket are not those of a model."""


DTYPE = np.dtype(
    [
        ("sequence", "<u8"),
        ("host_ns", "<i8"),
        ("device_begin_ns", "<i8"),
        ("device_end_ns", "<i8"),
        ("bytes", "<i8"),
        ("step", "<i8"),
        ("reducer", "<i4"),
        ("process_group", "<i4"),
        ("bucket", "<i4"),
        ("parameter", "<i4"),
        ("kind", "u1"),
        ("reserved", "u1"),
        ("generation", "<u2"),
        ("thread", "<u4"),
    ]
)

# magic, schema version, rank, session (one life of a rank's process), first sequence number, dropped, count
_HEADER = struct.Struct("<4sHixxQQQI")
_MAGIC = b"DDPL"

# Readers make tables as wide as the largest number, so impossible numbers are refused. Steps stay exact in JSON.
MOST_BUCKETS, MOST_PARAMETERS = 1 << 14, 1 << 17
_BOUNDS = {"step": 1 << 53, "reducer": 1 << 20, "bucket": MOST_BUCKETS, "parameter": MOST_PARAMETERS}


@dataclass(frozen=True)
class Batch:
    """Events of one rank that were sent together.

    Attributes:
        rank: the rank that recorded them.
        session: identifies one life of the rank's process: sequence numbers start again with a new one.
        first: sequence number of ``events[0]`` (of the next event if there are none).
        dropped: how many events before the first one were overwritten before they were drained.
        events: array of shape ``[n]`` and dtype `DTYPE`, read-only when decoded.
    """

    rank: int
    session: int
    first: int
    dropped: int
    events: npt.NDArray[np.void]


def encode(batch: Batch) -> list[bytes]:
    """Returns the two frames of a batch: header and raw events."""
    if batch.events.dtype != DTYPE:
        raise TypeError(f"events must have dtype ddp_lab.protocol.events.DTYPE, got {batch.events.dtype}")
    header = _HEADER.pack(
        _MAGIC, SCHEMA_VERSION, batch.rank, batch.session, batch.first, batch.dropped, len(batch.events)
    )
    return [header, batch.events.tobytes()]


def decode(frames: Sequence[bytes | memoryview]) -> Batch:
    """Returns the batch that `encode` made; the events share memory with the second frame.

    Raises:
        ValueError: the frames are not a batch, have another schema version, or contain impossible events.
    """
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise ValueError(f"an event batch has a header of {_HEADER.size} bytes and a body; got {len(frames)} frames")
    magic, version, rank, session, first, dropped, count = _HEADER.unpack(frames[0])
    if magic != _MAGIC:
        raise ValueError(f"not an event batch: it starts with {magic!r}, not {_MAGIC!r}")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"rank {rank} sends events of schema version {version}, this client reads version {SCHEMA_VERSION}: "
            "install the same ddp_lab on both sides"
        )
    if rank < 0:
        raise ValueError(f"an event batch has the rank {rank}, but ranks start at 0")
    if len(frames[1]) != count * DTYPE.itemsize:
        raise ValueError(
            f"the batch of rank {rank} announces {count} events of {DTYPE.itemsize} bytes "
            f"but contains {len(frames[1])} bytes"
        )
    events = np.frombuffer(frames[1], dtype=DTYPE)
    check(events, f"the batch of rank {rank}")
    return Batch(rank, session, first, dropped, events)


def check(events: npt.NDArray[np.void], where: str) -> None:
    """Refuses numbers that no rank records, because they would make a reader's tables huge.

    Args:
        events: of dtype `DTYPE`.
        where: their container, for the error.

    Raises:
        ValueError: a number is impossible; the message names the field and the number.
    """
    if not len(events):
        return
    for field, bound in _BOUNDS.items():
        values = events[field]
        low, high = int(values.min()), int(values.max())
        if field == "parameter" and high >= bound:  # for a mark it is the index of its name
            high = int(values[events["kind"] == Kind.GRAD_READY].max(initial=-1))
        if low < -1 or high >= bound:
            raise ValueError(
                f"{where} contains an event with {field} {low if low < -1 else high}, not from -1 to {bound - 1}"
            )
