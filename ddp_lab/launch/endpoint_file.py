"""The file with which a rank finds who watches it, and lets it examine the rank."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..diagnosis.sources.script import Job

if TYPE_CHECKING:
    from ..control.wire import Wire
    from ..engine.telemetry import Telemetry

__all__ = ["AGENT_EXITED", "Examined", "started", "write_endpoint"]

AGENT_EXITED = "the agent exited"
"""How a rank ended: nobody watches it any more."""


def write_endpoint(wire: Wire, folder: Path) -> Path:
    """Writes a file with which a rank can connect to a wire; only this user may read it.

    Args:
        wire: that of this process.
        folder: for the file.
    """
    made = folder / "endpoint.json"
    made.touch(mode=0o600)
    made.write_text(json.dumps(wire.endpoint()))
    return made


class Examined:
    """This process as one that who watches the run can examine, from construction on.

    Args:
        invitation: the watching process's file.
        given: the variables of torch's agent.
        rank: of a process that the agent has started; None for one of the script, whose name on the wire is its
            process id: the agent's only rank, the script itself, has the name 0.

    Raises:
        OSError: the file can't be read.
    """

    def __init__(self, invitation: Path, given: Mapping[str, str], rank: int | None = None) -> None:
        from ..diagnosis.on_rank import script
        from ..engine.telemetry import Telemetry

        self._folder = invitation.parent
        name, job = (os.getpid() if rank is None else rank), replace(Job.of(given), of_script=rank is None)
        telemetry = Telemetry(json.loads(invitation.read_text()), name, publishes=False)
        self._process = script.install(telemetry, self._folder, rank, job)
        self._stop = started(telemetry)

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Notes that this process of the script is a rank from now on.

        Args:
            rank: which.
            size: how many ranks its group has.
            meeting: where these look for each other.
        """
        self._process.join(rank, size, meeting)

    def end(self, how: str) -> None:
        """Ends it; call it with how the program ended."""
        if how == AGENT_EXITED:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif how == "finished":  # who says goodbye has
            self._stop(how)
        else:
            self._process.failed = how


def started(telemetry: Telemetry) -> Callable[[str], None]:
    """Starts it; returns what ends it, in this process alone."""
    telemetry.start()
    pid = os.getpid()
    return lambda how: telemetry.stop() if os.getpid() == pid else None
