"""What a rank answers while it runs a script: there are no cells, and its groups were made without us."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ...engine.groups import registry
from ..sources.script import Job
from . import examine, own_collectives

__all__ = ["ScriptRank", "install"]

_SCRIPT = "script"  # in the place of a cell's id


class _Connection(Protocol):
    """To who examines the rank: its telemetry."""

    def on_control(self, op: str, handler: Callable[[dict[str, Any]], dict[str, Any]], /) -> None: ...


class ScriptRank:
    """This process as a rank that runs a script, from construction on.

    Attributes:
        failed: how the script failed; "" while it has not.
    """

    def __init__(self) -> None:
        self._main, self._began = threading.main_thread().ident or 0, (_SCRIPT, time.monotonic_ns())
        self.failed = ""

    def answer(self, *, whole: bool = True) -> dict[str, Any]:
        """What it does now: ``state``, ``why``, and the value of `examine.examine`. On any thread."""
        registry.adopt()
        state = {"state": "lost" if self.failed else "running", "why": self.failed}
        return {**state, **examine.examine(self._main, _SCRIPT, self._began, whole=whole)}


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

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        return {"rank": rank, "pid": os.getpid(), "job": asdict(job), **script.answer(whole=bool(request.get("whole")))}

    telemetry.on_control("examine", answer)
    telemetry.on_control("entered_at", examine.entered_at)
    return script
