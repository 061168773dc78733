"""`ddp-lab doctor`: why a job that runs, or has left dumps, makes no progress."""

from __future__ import annotations

from typing import Any

from ..command_line import seconds
from ..doctor.command import EXIT_CODES, doctor

__all__ = ["add"]


def add(commands: Any) -> None:
    """Adds the command to the parser of `ddp-lab`."""
    made = commands.add_parser(
        "doctor",
        help="say why a training that was started without ddp_lab hangs",
        description="Says which rank waits where and for whom, in a job that was started without ddp_lab: from dumps "
        f"of torch's Flight Recorder, from torch's debug server, or from its processes on this host. {EXIT_CODES}",
        examples=(
            "ddp-lab doctor /tmp/dumps          # files of TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            "ddp-lab doctor node7:25999         # torch's debug server, or ddp_lab.serve_doctor()",
            "ddp-lab doctor $(pgrep torchrun)   # its ranks, read by py-spy",
        ),
    )
    made.add_argument(
        "of",
        nargs="+",
        metavar="JOB",
        help="a folder or files with dumps, HOST:PORT of a debug server, or ids of processes: ranks, or their launcher",
    )
    made.add_argument(
        "--seconds",
        type=seconds,
        default=3.0,
        metavar="S",
        help="how long to observe a running job; ranks that move meanwhile are not stuck (default: %(default)g)",
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.set_defaults(call=doctor)
