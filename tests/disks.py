"""Disks that are full, for tests: with root's rights a small one, without them a limit of this process."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["full", "small_disk"]


@contextlib.contextmanager
def full(size: int) -> Iterator[None]:
    """Within: no file of this process grows beyond so many bytes, and what is written is cut there, as on a full disk.

    The error is EFBIG ("File too large") instead of ENOSPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # what is imported meanwhile would be cut, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = compiled


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=1m") -> Iterator[Path]:
    """Within: a folder that is a disk of its own, of one megabyte. Skips the test where that can't be made."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a disk of 1 MB can't be mounted here (that takes root's rights): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
