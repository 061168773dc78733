"""The options of the magics' lines: what a line may say, and errors that name the option."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError

from .. import command_line
from ..cluster.processes.host_commands import LAUNCHERS
from ..formatting import parse_ranks
from ..output.by_rank import VIEWS

__all__ = [
    "Parser",
    "add_export_options",
    "add_import_options",
    "add_ranks",
    "add_start_options",
    "distributed_parser",
    "rank_or_off",
]


class Parser(command_line.Parser):
    """A parser whose errors are `UsageError`s that name the option and what is valid."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def parse_line(self, line: str) -> argparse.Namespace | None:
        """The options of a magic's line; None if it asked for help, which has been printed."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{error} in {line!r}")
        try:
            return self.parse_args(words)
        except SystemExit:  # --help
            return None

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError` with the usage."""
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise UsageError(f"{self.prog}: {message}\nusage: {usage}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (1, 2, ...)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds (for example 30 or 0.5)")
    return seconds


def _ranks(text: str) -> list[int]:
    try:
        return list(parse_ranks(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rank_or_off(text: str) -> int | str:
    """The argument of `%cluster debug`."""
    if text == "off" or text.isdigit():
        return text if text == "off" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a rank (0, 1, ...) and not `off`")


def _devices(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not name devices (for example 0,2)") from None


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _file(text: str) -> Path:
    return Path(text).expanduser()


def add_ranks(
    parser: argparse.ArgumentParser, option: str = "--ranks", text: str = "these ranks only (default: all)"
) -> None:
    """Adds an option that names ranks."""
    parser.add_argument(option, type=_ranks, metavar="0,2-3", help=text)


def add_start_options(start: argparse.ArgumentParser) -> None:
    """Adds the options of `%cluster start`."""
    start.add_argument("-n", type=_count, metavar="N", help="number of ranks (default: one per GPU, else 2)")
    start.add_argument("--devices", type=_devices, metavar="0,2", help="indices of the GPUs to use (default: all)")
    start.add_argument(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the ranks; may be repeated",
    )
    start.add_argument(
        "--backend",
        choices=["auto", "nccl", "gloo", "shm", "mpi"],
        default="auto",
        help="backend of the process group (default: auto)",
    )
    start.add_argument(
        "--hosts",
        metavar="a:4,b:4",
        help="hosts and their numbers of ranks; localhost is this machine, allocation the hosts that a batch system "
        "has allocated to this job (default: only this machine; with --launcher of a batch system, the allocation)",
    )
    start.add_argument(
        "--launcher",
        "--engines",
        choices=LAUNCHERS,
        default="ssh",
        help="how ranks on other hosts are started (default: ssh)",
    )
    start.add_argument("--python", metavar="PATH", help="path of Python on other hosts (default: the same as here)")
    start.add_argument(
        "--client-address", "--address", metavar="IP", help="address of this machine for the hosts (default: detected)"
    )
    start.add_argument("--detach", action="store_true", help="the ranks outlive this notebook, until %%cluster stop")
    start.add_argument("--name", metavar="NAME", help="name of the cluster, also for `%%cluster attach NAME`")
    start.add_argument(
        "--idle-timeout",
        "--lease",
        type=_seconds,
        metavar="S",
        help="seconds that a detached cluster lives while no notebook is attached (default: 3600)",
    )


def add_export_options(export: argparse.ArgumentParser) -> None:
    """Adds the options of `%cluster export`."""
    export.add_argument("script", type=_file, metavar="SCRIPT", help="file to write, for example train.py")
    export.add_argument(
        "--notebook",
        type=_file,
        metavar="FILE",
        help="export the cells of this file (default: those that have run here)",
    )
    export.add_argument(
        "--every-run", action="store_true", help="export each run of a cell (default: its last run that succeeded)"
    )
    export.add_argument("--force", action="store_true", help="replace an existing file")


def add_import_options(imported: argparse.ArgumentParser) -> None:
    """Adds the options of `%cluster import`."""
    imported.add_argument("script", type=_file, metavar="SCRIPT", help="training script to read")
    imported.add_argument(
        "--output", type=_file, metavar="FILE", help="notebook to write (default: SCRIPT with the ending .ipynb)"
    )
    imported.add_argument(
        "-n",
        type=_count,
        metavar="N",
        help="number of ranks (default: as the script's text says, else one per GPU, else 2)",
    )
    imported.add_argument("--force", action="store_true", help="replace an existing file")


def distributed_parser() -> Parser:
    """The parser of a `%%distributed` line."""
    parser = Parser("%%distributed", "Runs the cell on the ranks; starts a cluster with defaults if none is running.")
    parser.add_argument("--cluster", metavar="NAME", help="cluster to run on (default: the current one)")
    add_ranks(parser)
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the ranks after S seconds")
    parser.add_argument("--dashboard", "--watch", action="store_true", help="show the dashboard above the output")
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="return at once; the cell runs in the background, and its end is shown here",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="the cell's name in tracebacks and in `lab.results`")
    parser.add_argument(
        "--view",
        choices=VIEWS,
        metavar="VIEW",
        help="the ranks' output merged, in tabs or side-by-side (default: as chosen last)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no outputs, only errors")
    return parser
