"""`ddp-lab mcp`: tools for assistants, over the Model Context Protocol."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..command_line import Parser, count, tell
from ..errors import DdpLabError

__all__ = ["add"]

_INTERRUPTED = 130  # exit code


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    made = commands.add_parser(
        "mcp",
        help="let an assistant read a notebook's cluster or a recorded run",
        description="Serves tools over the Model Context Protocol, on standard input and output: an assistant starts "
        "this command. It finds the notebook in which you ran `%cluster mcp`. Reading is all that it allows, unless "
        "both this command and the notebook got --allow-run. Exit code 1: the recording can't be read, or the `mcp` "
        "library is missing.",
        examples=("ddp-lab mcp", "ddp-lab mcp --recording run-a", "ssh gpu-server ddp-lab mcp"),
    )
    made.add_argument(
        "--recording",
        type=Path,
        metavar="PATH",
        help="serve a recorded run instead: a folder of `ddp-lab run` or a file of `lab.timeline.save(path)`",
    )
    made.add_argument(
        "--process", type=count, metavar="PID", help="process id of the notebook's kernel, if several serve assistants"
    )
    made.add_argument(
        "--allow-run", action="store_true", help="offer the tool that runs a cell, if the notebook allows it"
    )
    made.set_defaults(call=lambda arguments: _serve(arguments, made))


def _serve(arguments: argparse.Namespace, parser: Parser) -> int:
    """Serves until the assistant closes the input."""
    from ..assistants import stdio

    if arguments.recording is not None and (arguments.process is not None or arguments.allow_run):
        parser.error("--recording serves files: --process and --allow-run are for a notebook")
    if sys.stdin.isatty():
        tell("waits for an assistant on standard input; Ctrl-D ends it (`ddp-lab docs how_to/assistants` explains it)")
    try:
        if arguments.recording is not None:
            stdio.serve_recording(arguments.recording)
        else:
            stdio.serve_notebook(arguments.process, arguments.allow_run)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except FileNotFoundError as error:
        raise DdpLabError(f"{error.filename or arguments.recording} does not exist") from error
    except (ValueError, OSError) as error:
        raise DdpLabError(str(error)) from error
    return 0
