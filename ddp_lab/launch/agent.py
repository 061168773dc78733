"""`ddp-lab run`: torch's elastic agent with our worker between it and the user's program; then the report.

[Note: a recorded run]
Whatever torchrun understands is understood here, since its own parser reads the options. Its agent starts
`ddp_lab.launch.worker`, which begins a journal and runs the program. When the agent has ended, however it did, the
journals of this host's ranks are merged, and `ddp-lab run` ends with torchrun's exit code (130 after Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import journal
from ..errors import DdpLabError
from . import reports

__all__ = ["main", "put_worker_between", "run_agent", "torchrun_parser"]

_INTERRUPTED = 130
_TERMINATED = 143


def torchrun_parser(program: str) -> argparse.ArgumentParser:
    """torchrun's parser, under the name of a command of ours."""
    from torch.distributed.run import get_args_parser

    made = get_args_parser()
    made.prog = program
    return made


def parser() -> argparse.ArgumentParser:
    """torchrun's parser, and our options."""
    made = torchrun_parser("ddp-lab run")
    made.description = (
        "Runs a training script as torchrun does, records what DistributedDataParallel does on each rank, and reports."
    )
    ours = made.add_argument_group("ddp_lab", "what is recorded, and where it goes")
    ours.add_argument(
        "--observe", action="store_true", help="observe torch's own DistributedDataParallel instead of replacing it"
    )
    ours.add_argument(
        "--record", metavar="DIR", help="folder for the ranks' journals and the merged timeline (ddp-lab-DATE-TIME)"
    )
    ours.add_argument("--report", metavar="PATH", help="the HTML page to write (report.html in that folder)")
    ours.add_argument(
        "--serve",
        nargs="?",
        const="127.0.0.1",
        metavar="HOST[:PORT]",
        help="let `ddp_lab.attach` follow the run over the network: listen there (127.0.0.1, a free port); the folder "
        "holds address and token in attach.json",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code.

    Raises:
        DdpLabError: it can't be recorded, or the folder holds another run.
    """
    given = parser().parse_args(argv)
    folder = _unused_folder(given.record)
    put_worker_between(given, "--folder", str(folder), *(["--observe"] if given.observe else []))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with _served(given.serve, folder):
        code = run_agent(given)
    _report(folder, Path(given.report or folder / "report.html"))
    return code


def _report(folder: Path, page: Path) -> None:
    """Reports what was recorded, however little; the exit code stays the program's."""
    if not any(folder.glob(f"*{journal.SUFFIX}")):
        print(f"ddp-lab: no rank began, so nothing was recorded in {folder}", file=sys.stderr)
        return
    try:
        run = reports.show([folder], page, partial=True)
    except ValueError as error:
        print(f"ddp-lab: {error}", file=sys.stderr)
        return
    run.timeline.save(folder / "timeline.npz")
    print(f"recorded in {folder}; `ddp-lab report {folder}` shows it again")


def _unused_folder(name: str | None) -> Path:
    folder = Path(name or time.strftime("ddp-lab-%Y%m%d-%H%M%S")).absolute()
    if any(folder.glob(f"*{journal.SUFFIX}")):
        raise DdpLabError(f"{folder} holds the journals of another run: choose another folder with --record")
    return folder


def put_worker_between(given: argparse.Namespace, *ours: str) -> None:
    """Changes torchrun's arguments so that it starts our worker with these options, which runs the program."""
    if given.no_python or given.run_path:
        option = "--no-python" if given.no_python else "--run-path"
        raise DdpLabError(f"{option}: only Python programs that torchrun starts itself can be recorded")
    if not given.module and not Path(given.training_script).is_file():
        raise DdpLabError(f"there is no script {given.training_script!r}")
    options = ["--module"] if given.module else []
    agent = ("--agent", str(os.getpid()))
    given.training_script_args = [*ours, *agent, *options, given.training_script, *given.training_script_args]
    given.training_script = "ddp_lab.launch.worker"
    given.module = True


@contextlib.contextmanager
def _served(address: str | None, folder: Path) -> Iterator[None]:
    """Within: whoever holds the token can attach, if that was asked for."""
    if address is None:
        yield
        return
    from .serve import JournalServer

    server = JournalServer(folder, address)
    print(
        f"ddp-lab: in a notebook, ddp_lab.attach({str(folder)!r}) follows this run; on another host "
        f"ddp_lab.attach({server.address!r}, token), with the token in {server.invitation}",
        file=sys.stderr,
    )
    try:
        yield
    finally:
        server.close()


def run_agent(given: argparse.Namespace) -> int:
    """Runs torch's agent; returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(given)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)  # as torchrun does: which ranks failed, and how
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SignalException as stopped:
        return _INTERRUPTED if stopped.sigval.name == "SIGINT" else _TERMINATED
    return 0
