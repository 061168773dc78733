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
    """This process as a rank that runs a script, from construction on.

    Attributes:
        failed: how the script failed; "" while it has not.
    """

    def __init__(self) -> None:
        self._main, self._began = threading.main_thread().ident or 0, (SCRIPT, time.monotonic_ns())
        self.failed = ""

    def answer(self, *, whole: bool = True) -> Examination:
        """What it does now. On any thread."""
        registry.adopt()
        seen = examine.examine(self._main, SCRIPT, self._began, whole=whole)
        return Examination("lost" if self.failed else "running", seen, why=self.failed)


def install(telemetry: _Connection, folder: Path, rank: int, job: Job) -> ScriptRank:
    """Answers the client's examinations; call it before the script makes a group.

    Args:
        telemetry: connection to the client.
        folder: where a folder with a socket may be created.
        rank: this one.
        job: of which it is a rank.

    Returns:
        The rank. Note in it how the script has failed: from then on the rank says so.
    """
    own_collectives.install(folder, smaller=False)
    script = ScriptRank()

    def answer(request: Examine) -> Examination:
        return replace(script.answer(whole=request.whole), rank=rank, pid=os.getpid(), job=asdict(job))

    telemetry.on_control(Examine, answer)
    telemetry.on_control(FindCallSite, examine.find_call_site)
    return script
