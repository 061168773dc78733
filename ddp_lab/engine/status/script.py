"""What a rank answers while it runs a script: there are no cells, and its groups were made without us."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...protocol.messages import SCRIPT, Examination, Examine, FindCallSite
from ..groups import registry
from ..telemetry import Telemetry
from . import examine, flights


def install(telemetry: Telemetry, folder: Path, rank: int, job: Mapping[str, Any]) -> Callable[[str], None]:
    """Answers the client's examinations; call it before the script makes a group.

    Args:
        telemetry: connection to the client.
        folder: where a folder with a socket may be created.
        rank: this one.
        job: see `job_of`.

    Returns:
        What to call when the script has failed, with how it did: from then on the rank says so.
    """
    flights.install(folder, smaller=False)
    main, began, failed = threading.main_thread().ident or 0, (SCRIPT, time.monotonic_ns()), [""]

    def answer(request: Examine) -> Examination:
        registry.adopt()
        seen = examine.examine(main, SCRIPT, began, whole=request.whole)
        state = "lost" if failed[0] else "running"
        return Examination(state, seen, why=failed[0], rank=rank, pid=os.getpid(), job=job)

    def fail(how: str) -> None:
        failed[0] = how

    telemetry.on_control(Examine, answer)
    telemetry.on_control(FindCallSite, examine.find_call_site)
    return fail


def job_of(given: Mapping[str, str]) -> dict[str, Any]:
    """What torch's agent has said of the job in these variables: where its store is, this node and all ranks."""
    return {
        "host": given.get("MASTER_ADDR", ""),
        "port": int(given.get("MASTER_PORT", 0)),
        "node": int(given.get("GROUP_RANK", 0)),
        "nodes": int(given.get("GROUP_WORLD_SIZE", 1)),
        "world_size": int(given.get("WORLD_SIZE", 1)),
        "attempt": f"{given.get('TORCHELASTIC_RUN_ID', '')}/{given.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        "of_script": False,
    }
