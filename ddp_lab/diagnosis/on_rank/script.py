"""What a rank answers while it runs a script: there are no cells, and its groups were made without us."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from ...engine.groups import registry
from ...protocol.messages import SCRIPT, Examination, Examine, FindCallSite, Message
from ..sources.script import Job
from . import examine, own_collectives

__all__ = ["ScriptRank", "install"]


class _Connection(Protocol):
    """To who examines the rank: its telemetry."""

    def on_control(self, kind: type[Message], handler: Callable[[Any], Any], /) -> None: ...


class ScriptRank:
    """This process as one that runs a script, from construction on.

    Args:
        rank: its rank; None while it is none.
        job: of which it is a rank.

    Attributes:
        failed: how the script failed; "" while it has not.
    """

    def __init__(self, rank: int | None = None, job: Job | None = None) -> None:
        self._main, self._began = threading.main_thread().ident or 0, (SCRIPT, time.monotonic_ns())
        self._joined = rank, job
        self.failed = ""

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Makes it a rank of those that the script has started and that meet there."""
        _, job = self._joined
        assert job is not None
        self._joined = rank, replace(job, world_size=size, meeting=meeting)

    def answer(self, *, whole: bool = True) -> Examination:
        """What it does now. On any thread."""
        registry.adopt()
        seen = examine.examine(self._main, SCRIPT, self._began, whole=whole)
        rank, job = self._joined
        return Examination(
            "lost" if self.failed else "running",
            seen,
            why=self.failed,
            rank=rank,
            pid=os.getpid(),
            job={} if job is None else asdict(job),
        )


def install(telemetry: _Connection, folder: Path, rank: int | None, job: Job) -> ScriptRank:
    """Answers the client's examinations; call it before the script makes a group.

    Args:
        telemetry: connection to the client.
        folder: where a folder with a socket may be created.
        rank: this one; None while it is none.
        job: of which it is a rank.

    Returns:
        The rank. Note in it how the script has failed: from then on the rank says so.
    """
    own_collectives.install(folder, smaller=False)
    script = ScriptRank(rank, job)
    telemetry.on_control(Examine, lambda request: script.answer(whole=request.whole))
    telemetry.on_control(FindCallSite, examine.find_call_site)
    return script
