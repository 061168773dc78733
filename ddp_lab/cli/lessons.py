"""`ddp-lab lessons`: lists the lessons, copies them for a class, and judges what students hand in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import teaching
from ..command_line import Parser, file_to_write, folder_to_write, seconds, write_json
from ..errors import DdpLabError
from ..files import write_text

__all__ = ["add"]

_INTERRUPTED = 130  # exit code
_WITH_CHECK = ("cell_timeout", "timeout", "json", "csv")


def add(commands: Any) -> None:
    """Adds the command to the parser of `ddp-lab`."""
    limits = teaching.Limits()
    made = commands.add_parser(
        "lessons",
        help="list the lessons, copy them for a class, or check what students hand in",
        description="Without options: lists the lessons. Exit code 1: the folder to check holds no notebook, or an "
        "edited notebook would be overwritten.",
        examples=(
            "ddp-lab lessons",
            "ddp-lab lessons --student class",
            "ddp-lab lessons --check handed_in --csv all.csv",
        ),
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--student", type=folder_to_write, metavar="DIR", help="copy the lessons here, without the solutions"
    )
    what.add_argument(
        "--solutions", type=folder_to_write, metavar="DIR", help="copy the lessons here, with the solutions"
    )
    what.add_argument(
        "--check",
        type=_folder,
        metavar="DIR",
        help="run the notebooks here and print a table of the solved exercises; DIR holds a folder or a notebook for "
        "each student",
    )
    made.add_argument(
        "--cell-timeout", type=seconds, metavar="S", help=f"interrupt a cell after S seconds (default: {limits.cell:g})"
    )
    made.add_argument(
        "--timeout", type=seconds, metavar="S", help=f"end a notebook after S seconds (default: {limits.notebook:g})"
    )
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write the results of --check here")
    made.add_argument("--csv", type=file_to_write, metavar="FILE", help="write them as a table for spreadsheets")
    made.set_defaults(call=lambda arguments: lessons(arguments, made))


def lessons(arguments: argparse.Namespace, parser: Parser) -> int:
    """Does what the options ask for."""
    given = [name for name in _WITH_CHECK if getattr(arguments, name) is not None]
    if arguments.check:
        return _check(arguments)
    if given:
        parser.error(f"--{given[0].replace('_', '-')} needs --check DIR")
    if arguments.student or arguments.solutions:
        folder = arguments.student or arguments.solutions
        copied = teaching.copy_lessons(folder, solutions=arguments.student is None)
        print(f"{len(copied)} lessons {'without' if arguments.student else 'with'} solutions are in {folder}")
        return 0
    print(_listed())
    return 0


def _listed() -> str:
    """A line for each lesson."""
    rows = [["lesson", "minutes", "read first", "title"]]
    for one in teaching.lessons():
        rows.append([one.number, str(one.minutes or ""), ", ".join(one.before), one.title])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _check(arguments: argparse.Namespace) -> int:
    """Judges the notebooks of a class; Ctrl-C ends that, and the results so far are kept."""
    usual, judged, code = teaching.Limits(), [], 0
    limits = teaching.Limits(arguments.cell_timeout or usual.cell, arguments.timeout or usual.notebook)
    try:
        for one in teaching.judge(arguments.check, limits):
            judged.append(one)
            print(_line(one), flush=True)
    except KeyboardInterrupt:
        print("interrupted: the following notebooks have not run")
        code = _INTERRUPTED
    print(f"\n{teaching.as_text(judged)}")
    if arguments.json:
        write_json(arguments.json, teaching.as_json(judged))
    if arguments.csv:
        try:
            arguments.csv.parent.mkdir(parents=True, exist_ok=True)
            write_text(arguments.csv, teaching.as_csv(judged))
        except OSError as error:
            raise DdpLabError(f"can't write {arguments.csv}: {error.strerror}") from error
    return code


def _line(one: teaching.Judged) -> str:
    """What came of a notebook, in short."""
    passed = sum(mark.state == teaching.PASSED for mark in one.marks)
    what = f"{passed} of {len(one.marks)} exercises passed in {one.seconds:.0f} s" if one.marks else one.problem
    return f"{one.notebook}: {what}"


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path
