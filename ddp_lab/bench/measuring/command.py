"""Benchmarks as commands: their options, and the output of table and JSON."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...command_line import Parser, count, file_to_write, percent, write_json
from . import noise

__all__ = ["RANKS", "SETS", "THREADS", "Option", "aligned", "new_parser", "option", "run", "show"]

Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names of an option, and how `argparse` treats it."""


def option(*names: str, **how: Any) -> Option:
    """An option of a benchmark, as `argparse.ArgumentParser.add_argument` takes it; `run` adds the default."""
    return names, how


RANKS = option("--ranks", type=count, help="number of ranks")
SETS = option("--sets", type=count, help="number of fresh sets of processes")
THREADS = option("--threads", type=count, help="intra-op threads of each rank")


def new_parser(program: str, about: str | None) -> Parser:
    """A parser for a benchmark that knows ``--json``.

    Args:
        program: how the benchmark is called, for example ``"ddp-lab bench step"``.
        about: the docstring of its module: the first line is shown; None: it has none, as under ``python -OO``.
    """
    parser = Parser(prog=program, description=about and about.split("\n")[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the full result to this file")
    return parser


def run(
    program: str,
    about: str | None,
    measure: Callable[..., dict[str, Any]],
    table: Callable[..., str],
    options: Iterable[Option],
    argv: Sequence[str] | None,
    *,
    check: Callable[[Parser, argparse.Namespace], None] | None = None,
) -> int:
    """The command line of a benchmark.

    Args:
        program: see `new_parser`.
        about: see `new_parser`.
        measure: its parameters have the names of the options, and hold their defaults; one that has a ``tolerance``
            judges its figures ([Note: too noisy to tell]).
        table: a result as text; of one that is judged it gets whether to tell what is too noisy, too.
        options: its own, beside ``--json`` and, if it is judged, ``--keep-noise`` and ``--tolerance``.
        argv: what was given; None: the process's.
        check: refuses values that do not go together.

    Returns:
        The exit code.
    """
    parser = new_parser(program, about)
    parser.set_defaults(keep_noise=False)
    parameters = inspect.signature(measure).parameters
    for names, how in options:
        added = parser.add_argument(*names, **how)
        usual = parameters[added.dest].default
        added.default = None if usual is inspect.Parameter.empty else list(usual) if isinstance(usual, tuple) else usual
        added.help = _help(added)
    if "tolerance" in parameters:
        _add_noise(parser)
    given = parser.parse_args(argv)
    if check is not None:
        check(parser, given)
    found = measure(**{one: value for one, value in vars(given).items() if one in parameters})
    keep = given.keep_noise
    told = table(found, keep) if "tolerance" in parameters else table(found)
    show(found, "\n".join([told, *noise.epilogue(found, keep)]), given.json)
    return noise.exit_code(found, keep)


def _help(one: argparse.Action) -> str | None:
    """What an option is for, and its default."""
    if one.default is None or one.default is False:
        return one.help
    usual = one.default if isinstance(one.default, list) else [one.default]
    every = len(usual) > 1 and usual == list(one.choices or ())
    words = "all" if every else " ".join(f"{value:g}" if isinstance(value, float) else f"{value}" for value in usual)
    return f"{one.help or ''} ({words})".lstrip()


def _add_noise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-noise", action="store_true", help="also show values that are too noisy")
    parser.add_argument(
        "--tolerance",
        type=lambda text: percent(text) / 100,
        default=noise.TOLERANCE,
        metavar="PERCENT",
        help=f"largest uncertainty of a value, as ± percent ({100 * noise.TOLERANCE:.0f} %%)",
    )


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns lines of cells as text, as wide as they need to be.

    Args:
        lines: equally many cells each, headings first.
        left: how many of the first columns are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def show(result: dict[str, Any], table: str, path: Path | None) -> None:
    """Prints the table, and writes the result as JSON if a path was given."""
    sys.stdout.write(table + "\n")
    if path is not None:
        write_json(path, result)
