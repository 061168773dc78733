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

__all__ = ["AGENT_EXITED", "let_examine", "started", "write_endpoint"]

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


def let_examine(
    invitation: Path, rank: int, given: Mapping[str, str], ranks_of_script: int = 0
) -> Callable[[str], None]:
    """Connects to the process that made this file, which can then ask what this rank does.

    Args:
        invitation: the file.
        rank: this one.
        given: the variables of torch's agent.
        ranks_of_script: if the script has started the ranks, how many there are. Then this one's name on the wire is
            its process id: the agent's only rank, the script itself, has the name 0.

    Returns:
        What ends it: to be called with how the program ended.
    """
    from ..diagnosis.on_rank import script
    from ..engine.telemetry import Telemetry

    job, name = Job.of(given), rank
    if ranks_of_script:
        job, name = replace(job, world_size=ranks_of_script, of_script=True), os.getpid()
    telemetry = Telemetry(json.loads(invitation.read_text()), name, publishes=False)
    rank_of_script = script.install(telemetry, invitation.parent, rank, job)
    stop = started(telemetry)

    def end(how: str) -> None:
        if how == AGENT_EXITED:
            shutil.rmtree(invitation.parent, ignore_errors=True)
        elif how == "finished":  # who says goodbye has
            stop(how)
        else:
            rank_of_script.failed = how

    return end


def started(telemetry: Telemetry) -> Callable[[str], None]:
    """Starts it; returns what ends it, in this process alone."""
    telemetry.start()
    pid = os.getpid()
    return lambda how: telemetry.stop() if os.getpid() == pid else None
