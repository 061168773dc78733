"""Memory that processes of one host share while large objects are sent between them.

[Note: who owns a segment]
A segment is an anonymous file in memory (`memfd_create`): it has no name that could be guessed, unlinked or left
behind, and disappears with the last process that holds it, in whatever way that ends. The client creates every segment,
for both directions, and closes it when the transfer is over. A rank opens it through ``/proc/PID/fd``, as only
processes of the same user can, checks that it is the expected file, and closes it at once. Only mappings stay
(`mapped`): they are private, so that no process sees another one's changes, and live as long as an array uses them. A
segment is sealed before it is mapped: it can no longer be changed or shortened.

If that is impossible (no memfd, no /proc, other namespaces), `OSError` is raised and the bytes are sent in the message.

[Note: descriptors and interrupts]
Python raises the user's interrupt between any two of its steps, also between opening a file and storing its number;
then it would never be closed. So files are opened into a list, and closed, by one call into C.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_PIECE = 1 << 26  # bytes written at once: an interrupt waits for one piece at most
# Linux's numbers; a Python that was built on an old system lacks the names in `fcntl`.
_ADD_SEALS = 1033
_SEALS = 0b1111  # seal, shrink, grow, write


class Reference(NamedTuple):
    """A segment's address for a peer: a process, its descriptor, and the file that this must be."""

    pid: int
    descriptor: int
    device: int
    inode: int


class Span(NamedTuple):
    """The place of a buffer: its segment's number, its first byte, its size, whether it is read-only."""

    segment: int
    offset: int
    size: int
    readonly: bool


class Segments:
    """Segments of this process; use it as a context manager, or `close` it. See [Note: who owns a segment].

    Args:
        count: number of empty segments to create.

    Raises:
        OSError: this system or this process can't create any.
    """

    def __init__(self, count: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this Python has no memfd_create")
        self.descriptors: list[int] = []
        self._close = weakref.finalize(self, _close, self.descriptors)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            self.descriptors.extend(map(os.memfd_create, itertools.repeat("ddp_lab", count), itertools.repeat(flags)))
        except OSError:
            self.close()
            raise

    def references(self) -> tuple[Reference, ...]:
        """The addresses with which a peer opens them."""
        found = [(each, os.fstat(each)) for each in self.descriptors]
        return tuple(Reference(os.getpid(), each, status.st_dev, status.st_ino) for each, status in found)

    def close(self) -> None:
        """Closes them; mappings stay. No effect the second time."""
        self._close()

    def __enter__(self) -> Segments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def opened(references: Sequence[Reference], write: bool = False) -> Iterator[list[int]]:
    """Descriptors of a peer's segments, until the block ends.

    Raises:
        OSError: a peer's segment can't be opened here, or it is not the expected one.
    """
    descriptors: list[int] = []
    paths = [f"/proc/{each.pid}/fd/{each.descriptor}" for each in references]
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    try:
        descriptors.extend(map(os.open, paths, itertools.repeat(flags)))
        for path, each, descriptor in zip(paths, references, descriptors, strict=True):
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (each.device, each.inode):
                raise OSError(f"{path} is not the expected file")
        yield descriptors
    finally:
        _close(descriptors)


def allot(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Distributes buffers over at most `count` segments, in order.

    Small buffers share segments only with other small ones, so that keeping one small array keeps little memory.

    Returns:
        For each buffer its segment and the byte in it where it begins, at a page.
    """
    share = sum(sizes) / (count - 1) if count > 1 else float("inf")
    places: list[tuple[int, int]] = []
    ends: list[int] = []
    shared: int | None = None
    for size in sizes:
        if size >= share:
            places.append((len(ends), 0))
            ends.append(size)
            continue
        if shared is None or ends[shared] >= share:
            shared = len(ends)
            ends.append(0)
        begin = -(-ends[shared] // mmap.PAGESIZE) * mmap.PAGESIZE
        places.append((shared, begin))
        ends[shared] = begin + size
    return places


def fill(descriptors: Sequence[int], buffers: Sequence[tuple[memoryview, int, int]]) -> tuple[Span, ...]:
    """Writes buffers into segments and seals these.

    Args:
        descriptors: of empty segments.
        buffers: for each its bytes, and the used part (begin, end); the rest reads as zeros.

    Raises:
        OSError: there is no memory for them.
    """
    places = allot([view.nbytes for view, _, _ in buffers], len(descriptors))
    ends: dict[int, int] = {}
    for (segment, offset), (view, begin, end) in zip(places, buffers, strict=True):
        for at in range(begin, end, _PIECE):
            _write(descriptors[segment], view[at : min(end, at + _PIECE)], offset + at)
        ends[segment] = max(ends.get(segment, 0), offset + view.nbytes)
    for segment, size in ends.items():
        os.ftruncate(descriptors[segment], size)
        fcntl.fcntl(descriptors[segment], _ADD_SEALS, _SEALS)
    return tuple(Span(*place, view.nbytes, view.readonly) for place, (view, _, _) in zip(places, buffers, strict=True))


def mapped(descriptors: Sequence[int], spans: Sequence[Span]) -> list[memoryview]:
    """The buffers as private memory of this process, writable unless they are read-only; see `fill`."""
    whole: dict[int, memoryview] = {}
    for span in spans:
        if span.segment not in whole:
            whole[span.segment] = _map(descriptors[span.segment])
    views = [whole[span.segment][span.offset : span.offset + span.size] for span in spans]
    return [view.toreadonly() if span.readonly else view for view, span in zip(views, spans, strict=True)]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _map(descriptor: int) -> memoryview:
    """A private mapping that, unlike Python's, holds no descriptor."""
    size = os.fstat(descriptor).st_size
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mapping {size:,} B: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B")


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _close(descriptors: list[int]) -> None:
    """Closes all of them. See [Note: descriptors and interrupts]."""
    given, descriptors[:] = descriptors[:], []
    collections.deque(map(os.close, given), 0)
