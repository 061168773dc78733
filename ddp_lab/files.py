"""Files: only regular ones are read, and writing replaces a file completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; nothing else, because reading a pipe could block forever.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is a pipe, a device or a folder.
    """
    refusal = f"{os.fspath(path)} is not a regular file: pipes, devices and folders are not read"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a socket
            raise
        raise ValueError(refusal) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(refusal)
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a new file, which replaces `path` at the end; after an error `path` is unchanged.

    A link is kept: its target is replaced. Anything but a regular file (``/dev/stdout``, a pipe) is written directly.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full.
    """
    target = Path(os.path.realpath(path))
    try:
        before = target.stat()
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with target.open("wb") as file:
            yield file
        return
    beside = target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex[:12]}")
    try:
        with beside.open("xb") as file:
            if before is not None:
                os.chmod(file.fileno(), stat.S_IMODE(before.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())  # some disks report only now that they are full
        beside.replace(target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(beside)):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text (UTF-8) as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())
