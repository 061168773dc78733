"""`ddp-lab doctor`: one command for jobs that we did not start, whatever is known of them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import DdpLabError
from ..formatting import duration
from ..printable import printable_lines
from .dumps import diagnose_dumps
from .report import HangReport
from .snapshot import RankSnapshot
from .sources import dump_files
from .sources.debug_server import DebugServer
from .sources.py_spy import SpiedProcesses

__all__ = ["EXIT_CODES", "doctor", "snapshot_job"]

EXIT_CODES = (
    "Exit code 0: nothing is stuck; 1: ranks are stuck, and the sentence says why; 2: the job can't be examined."
)
_STUCK, _FAILED = 1, 2
_ADDRESS = re.compile(r"^(\[.+\]|[^/:]+):\d+$")


def doctor(arguments: argparse.Namespace) -> int:
    """Examines the job, prints why it hangs, and returns the exit code."""
    try:
        report = snapshot_job(arguments.of, arguments.seconds)
    except DdpLabError as error:
        print(f"ddp-lab doctor: {printable_lines(str(error))}", file=sys.stderr)
        return _FAILED
    waited = _waited(report, arguments.seconds)
    if arguments.json:
        print(json.dumps(_as_dict(report, waited), indent=2))
    else:
        since = f"no progress for {duration(waited)}: " if report.diagnosis.stuck and waited else ""
        print(printable_lines(f"{since}{report}"))
    return _STUCK if report.diagnosis.stuck else 0


def snapshot_job(of: Sequence[str], seconds: float) -> HangReport:
    """The report on a job.

    Args:
        of: files or folders with dumps, one ``HOST:PORT`` of torch's debug server, or ids of processes.
        seconds: for which a job that runs is looked at.

    Raises:
        DdpLabError: the job can't be examined, and why.
    """
    if all(Path(one).exists() for one in of):
        return HangReport(*diagnose_dumps(dump_files.read([Path(one) for one in of])))
    if all(one.isdigit() for one in of):
        return HangReport.of(SpiedProcesses([int(one) for one in of], seconds).snapshots())
    if len(of) == 1 and _ADDRESS.match(of[0]):
        return HangReport.collect(DebugServer(of[0]), seconds=seconds)
    missing = next((one for one in of if not Path(one).exists() and not one.isdigit()), of[0])
    raise DdpLabError(
        f"{missing!r} is not a file or folder, HOST:PORT or a process id; give arguments of one of these kinds"
    )


def _waited(report: HangReport, seconds: float) -> float:
    """For how many seconds a rank has waited, at least; 0 if its dump says it in the sentence, or none waits."""
    waiting = [one for one in report.ranks if one.waits]
    known = [flight.seconds for one in waiting for group in one.flights for flight in group.open]
    return max(known, default=seconds if waiting else 0.0)


def _as_dict(report: HangReport, waited: float) -> dict[str, Any]:
    found = report.diagnosis
    return {"stuck": found.stuck, **asdict(found), "seconds": waited, "ranks": [_rank(one) for one in report.ranks]}


def _rank(one: RankSnapshot) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "state": one.state,
        "does": str(one),
        "waits": one.waits,
        "in_flight": one.in_flight,
        "stack": [{"file": each.file, "line": each.line, "function": each.function} for each in one.stack],
    }
