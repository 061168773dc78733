"""Zygotes for the kernels that tests start, one for each environment: else each kernel imports torch for itself."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ddp_lab.cluster.processes import zygote

_begun: dict[Path, subprocess.Popen[bytes]] = {}


def offered(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, and one by which a process that gets them, beside this one's, finds a zygote."""
    return {**environment, zygote.OFFERED: str(_offer(tuple(sorted(environment.items()))))}


@functools.cache
def _offer(environment: tuple[tuple[str, str], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ddp_lab_zygote-"))
    _begun[folder] = zygote.offer(folder, dict(environment))
    return folder


@atexit.register
def _end() -> None:
    """No kernel needs them any more."""
    for folder, process in _begun.items():
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)  # it may have been in a worker's own folder
