"""`ddp-lab run`: torch's elastic agent with our worker between it and the user's program; then the report.

[Note: a recorded run]
All options of torchrun are accepted, because its own parser reads them. Its agent starts `ddp_lab.launch.worker`, which
begins a journal and runs the program. When the agent has ended, in whatever way, the journals of this host's ranks are
merged, and `ddp-lab run` exits with torchrun's exit code (130 after Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import os
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..command_line import Parser, file_to_write, folder_of_a_record, seconds_or_never, tell
from ..errors import DdpLabError
from ..machine import no_collector
from ..protocol import journal
from ..protocol.entry_points import WORKER
from . import reports
from .black_boxes import BlackBoxes
from .hang_watch import ACTIONS, HangWatch

__all__ = ["check_torchruns", "main", "run_agent", "torchrun_parser", "wrap_program_in_worker"]

_INTERRUPTED = 130
_TERMINATED = 143


class _TorchrunsHelp(argparse.Action):
    """Prints the options that are torchrun's own."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from torch.distributed.run import get_args_parser

        theirs = get_args_parser()
        theirs.prog = parser.prog
        theirs.print_help()
        parser.exit()


def torchrun_parser(program: str, description: str, examples: Sequence[str]) -> tuple[Parser, argparse._ArgumentGroup]:
    """A parser of torchrun's options, and a group for our command's own options, the only ones in its help."""
    with no_collector():
        from torch.distributed.run import get_args_parser

    theirs = get_args_parser()
    for action in theirs._actions:
        if action.dest != "help":
            action.help = argparse.SUPPRESS
        if not action.option_strings:  # their name in errors
            action.metavar = {"training_script": "SCRIPT"}.get(action.dest, "ARGUMENTS")
            action.required = action.dest == "training_script"
    made = Parser(
        prog=program,
        usage=f"{program} [OPTIONS] [TORCHRUN'S OPTIONS] SCRIPT [ARGUMENTS]",
        description=description,
        examples=examples,
        parents=[theirs],
        conflict_handler="resolve",  # both have --help
    )
    ours = made.add_argument_group("ddp_lab's options")
    rest = made.add_argument_group("and all options of torchrun")
    rest.add_argument("--help-torchrun", action=_TorchrunsHelp, nargs=0, help="show them")
    return made, ours


def parser() -> Parser:
    """torchrun's parser, and our options."""
    made, ours = torchrun_parser(
        "ddp-lab run",
        "Runs a training script as torchrun does, records collectives and models on each rank, and writes a report. "
        "The exit code is torchrun's, or 130 after Ctrl-C.",
        (
            "ddp-lab run --standalone --nproc-per-node 2 train.py --epochs 3",
            "ddp-lab run --record run-a --standalone --nproc-per-node 2 -m package.train",
        ),
    )
    ours.add_argument(
        "--observe", action="store_true", help="observe torch's own DistributedDataParallel instead of replacing it"
    )
    ours.add_argument(
        "--record",
        type=folder_of_a_record,
        metavar="DIR",
        help="folder for the ranks' journals and the merged timeline (default: ddp-lab-DATE-TIME)",
    )
    ours.add_argument(
        "--report",
        type=file_to_write,
        metavar="PATH",
        help="the HTML page to write (default: report.html in that folder)",
    )
    ours.add_argument(
        "--hang-seconds",
        type=seconds_or_never,
        default=10.0,
        metavar="S",
        help="after S seconds without progress, print which rank waits where and for whom (default: %(default)g; "
        "0: never)",
    )
    ours.add_argument(
        "--on-hang",
        choices=ACTIONS,
        default="wait",
        help="what to do then: wait; dump: also write what every rank does into the folder; stop: do that and end the "
        "run with exit code 143 (default: wait)",
    )
    ours.add_argument(
        "--serve",
        nargs="?",
        const="127.0.0.1",
        type=_address,
        metavar="HOST[:PORT]",
        help="let `ddp_lab.follow` follow the run over the network: listen at this address, or without a value at "
        "127.0.0.1 and a free port; attach.json in the folder contains address and token",
    )
    return made


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form HOST or HOST:PORT")
    if not colon and Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is a file: write --serve=127.0.0.1 before the script")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code.

    Raises:
        DdpLabError: it can't be recorded, or the folder contains another run.
    """
    made = parser()
    given = made.parse_args(argv)
    check_torchruns(made, given)
    folder = _unused_folder(given.record)
    with _watched(given, folder) as watch, contextlib.closing(_black_boxes(given)) as boxes:
        options = [*(["--observe"] if given.observe else []), *(["--doctor", str(watch.invitation)] if watch else [])]
        wrap_program_in_worker(given, "--folder", str(folder), "--black-boxes", boxes.option, *options)
        return _recorded(given, folder, watch, boxes)


def _black_boxes(given: argparse.Namespace) -> BlackBoxes:
    from torch.distributed.run import determine_local_world_size

    return BlackBoxes(determine_local_world_size(given.nproc_per_node))


def _recorded(given: argparse.Namespace, folder: Path, watch: HangWatch | None, boxes: BlackBoxes) -> int:
    """Runs the program, and reports on it; returns its exit code."""
    is_new = not folder.exists()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # the ranks try again, and report the result
        tell(f"can't create the folder {folder}: {error.strerror}. The program runs anyway")
    said = io.StringIO()
    try:
        with _served(given.serve, folder):
            code = _run_watched(given, watch, boxes)
        try:
            boxes.complete(folder)
            with contextlib.redirect_stdout(said):
                killed = _report(folder, Path(given.report or folder / "report.html"))
            if watch is not None and boxes.script_started_ranks:
                for process in killed:
                    watch.tell_seen(process)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the program has ended, its exit code is ours
            tell(f"no report was written: {type(error).__name__}: {error}; `ddp-lab report {folder}` tries again")
    finally:
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    _print(said.getvalue())
    return code


@contextlib.contextmanager
def _watched(given: argparse.Namespace, folder: Path) -> Iterator[HangWatch | None]:
    """Who examines the ranks, if it is wanted."""
    if not given.hang_seconds:
        yield None
        return
    watch = HangWatch(folder, given.hang_seconds, given.on_hang)
    try:
        yield watch
    finally:
        watch.close()


def _run_watched(given: argparse.Namespace, watch: HangWatch | None, boxes: BlackBoxes) -> int:
    from torch.distributed.run import determine_local_world_size

    if watch is None:
        return run_agent(given, None, boxes)
    watch.start(determine_local_world_size(given.nproc_per_node))
    code = 1
    try:
        code = run_agent(given, watch, boxes)
    finally:
        watch.stop()
        if code != 0:
            watch.tell_last()
    return code


def _print(text: str) -> None:
    """Prints and flushes: if stdout can't be written, Python would fail at exit, with an exit code of its own."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        tell(f"can't write to stdout: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(folder: Path, page: Path) -> list[int]:
    """Reports the recording, however short; returns the processes of it that were killed by a signal."""
    if not any(folder.glob(f"*{journal.SUFFIX}")):
        tell("nothing was recorded: no rank started, or none could write its journal")
        return []
    try:
        run = reports.read([folder], partial=True)
    except ValueError as error:
        tell(str(error))
        return []
    ends = [one.status for one in run.timeline.ranks()]
    killed = [int(end["pid"]) for end in ends if str(end["state"]).startswith("killed by")]
    if not run.timeline.reducers() and not run.timeline.groups():  # a notice has reported that
        return killed
    timeline = folder / "timeline.npz"
    for path, write in (
        (page, lambda: reports.write_pages(run, page)),
        (timeline, lambda: run.timeline.save(timeline)),
    ):
        try:
            write()
        except OSError as error:
            tell(f"can't write {error.filename or path}: {error.strerror}")
    print(f"recorded in {folder}; `ddp-lab report {folder}` shows it again")
    return killed


def _unused_folder(chosen: Path | None) -> Path:
    folder = Path(chosen or time.strftime("ddp-lab-%Y%m%d-%H%M%S")).absolute()
    if any(folder.glob(f"*{journal.SUFFIX}")):
        raise DdpLabError(f"{folder} contains the journals of another run: choose another folder with --record")
    return folder


def check_torchruns(made: Parser, given: argparse.Namespace) -> None:
    """Exits if torchrun would refuse the options, and sets OMP_NUM_THREADS as torchrun does.

    Args:
        made: the parser that read the options, which reports errors.
        given: the parsed options.
    """
    from torch.distributed import run as torchrun

    try:
        fewest, most = torchrun.parse_min_max_nnodes(given.nnodes)
    except (ValueError, RuntimeError):
        fewest = most = 0
    if not 0 < fewest <= most:
        made.error(f"argument --nnodes: {given.nnodes!r} is not a number of hosts (for example 2, or 1:4)")
    try:
        ranks = torchrun.determine_local_world_size(given.nproc_per_node)
    except ValueError as error:
        made.error(f"argument --nproc-per-node: {error}")
    if ranks < 1:
        made.error(f"argument --nproc-per-node: {given.nproc_per_node!r} is not a number of ranks (1, 2, ...)")
    if given.max_restarts > 0:
        # All attempts would share one store, in which the next one would find the addresses of dead ranks.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # like torchrun, but without its banner of six lines
    try:
        torchrun.config_from_args(given)
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        made.error(f"torchrun refuses its options: {error}")


def wrap_program_in_worker(given: argparse.Namespace, *ours: str) -> None:
    """Changes torchrun's arguments so that it starts our worker with these options; the worker runs the program."""
    if given.no_python or given.run_path:
        option = "--no-python" if given.no_python else "--run-path"
        raise DdpLabError(f"{option} is not supported: only Python programs that torchrun starts can be recorded")
    if not given.module and not Path(given.training_script).is_file():
        raise DdpLabError(f"the script {given.training_script!r} does not exist")
    if not given.module:
        _compile(given.training_script)
    options = ["--module"] if given.module else []
    agent = ("--agent", str(os.getpid()))
    given.training_script_args = [*ours, *agent, *options, given.training_script, *given.training_script_args]
    given.training_script = WORKER
    given.module = True


def _compile(script: str) -> None:
    """Refuses a script with a syntax error, once, instead of on each rank."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            compile(Path(script).read_bytes(), script, "exec")
    except (SyntaxError, ValueError) as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        raise DdpLabError(f"{script} can't be compiled, so no rank was started") from error


@contextlib.contextmanager
def _served(address: str | None, folder: Path) -> Iterator[None]:
    """Inside the block, holders of the token can attach, if requested."""
    if address is None:
        yield
        return
    import zmq

    from .serve import JournalServer

    try:
        server = JournalServer(folder, address)
    except zmq.ZMQError as error:
        raise DdpLabError(
            f"--serve {address}: can't listen there: {error.strerror}; give an address of this host and a free port"
        ) from error
    except OSError as error:
        tell(f"no client can attach over the network: can't write {error.filename}: {error.strerror}")
        yield
        return
    tell(
        f"in a notebook, ddp_lab.follow({str(folder)!r}) follows this run; on another host "
        f"ddp_lab.follow({server.address!r}, token), with the token in {server.invitation}"
    )
    try:
        yield
    finally:
        server.close()


@contextlib.contextmanager
def _second_signal_kills() -> Iterator[None]:
    """Inside the block, a second Ctrl-C or SIGTERM kills the ranks: torch's agent would wait half a minute for each."""
    import torch.distributed.elastic.multiprocessing.api as torchs

    api: Any = torchs
    handle, signals = api._terminate_process_handler, itertools.count(1)

    def kill_ranks_first(number: int, frame: types.FrameType | None) -> None:
        if next(signals) > 1:
            _kill_ranks()
        handle(number, frame)

    api._terminate_process_handler = kill_ranks_first
    try:
        yield
    finally:
        api._terminate_process_handler = handle


def _kill_ranks() -> None:
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has ended
            if WORKER in process.cmdline():
                os.killpg(process.pid, signal.SIGKILL)  # torch's agent has made it the leader of a group
                tell(f"killed process {process.pid}, which had not ended yet")


@contextlib.contextmanager
def _exits_noted(boxes: BlackBoxes | None) -> Iterator[None]:
    """Notes which ranks have exited with code 0 before torch's agent ends the others: it says nothing about them."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    theirs = SubprocessContext._close

    @functools.wraps(theirs)
    def close(context: SubprocessContext, *args: Any, **kwargs: Any) -> None:
        processes = [one.proc for one in context.subprocess_handlers.values()]
        if boxes is not None:
            boxes.exited.update(one.pid for one in processes if one.poll() == 0)
        theirs(context, *args, **kwargs)

    SubprocessContext._close = close  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SubprocessContext._close = theirs  # type: ignore[method-assign]


def run_agent(given: argparse.Namespace, watch: HangWatch | None = None, boxes: BlackBoxes | None = None) -> int:
    """Runs torch's agent, and a watch beside it; returns its exit code.

    Args:
        given: torchrun's arguments.
        watch: is told when the agent has ended.
        boxes: are told how ranks ended.

    Raises:
        DdpLabError: it could not start the ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    try:
        try:
            with _second_signal_kills(), _exits_noted(boxes):
                run(given)
        finally:
            if watch is not None:
                watch.run_has_ended()
    except ChildFailedError as failed:
        if watch is not None and watch.ends_run:  # another node's ranks have ended first
            return _TERMINATED
        if boxes is not None:
            boxes.note(failed.failures)
        rank, first = failed.get_first_failure()
        how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
        starts_ranks = boxes is not None and boxes.script_started_ranks
        who = "the script" if starts_ranks else f"rank {rank}"
        tell(f"{who} (process {first.pid}) {how}, so torch's agent ended the run")
        if watch is not None and first.exitcode < 0 and not starts_ranks:  # it has shown no traceback
            watch.tell_seen(first.pid)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (SignalException, UnboundLocalError) as error:
        # A signal that arrives just as torch begins to time a function: torch's timer then raises that it has no start.
        stopped = error.__context__ if isinstance(error, UnboundLocalError) else error
        if not isinstance(stopped, SignalException):
            raise
        if boxes is not None:
            boxes.note({})
        return _INTERRUPTED if stopped.sigval.name == "SIGINT" else _TERMINATED
    except (RendezvousError, ValueError, RuntimeError, AssertionError, OSError) as error:
        if watch is not None and watch.ends_run:
            return _TERMINATED
        raise DdpLabError(f"torch's agent could not run the ranks: {error}") from error
    return 0
