"""What the command lines of the benchmarks have in common: how they begin, and where their results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...command_line import Parser, file_to_write, percent, write_json
from ..telling import noise

__all__ = ["add_noise", "add_picture", "aligned", "fresh_sets", "new_parser", "show", "show_sound"]


def new_parser(program: str, about: str | None) -> Parser:
    """A parser for a benchmark that knows ``--json``.

    Args:
        program: how the benchmark is called, for example ``"ddp-lab bench cell"``.
        about: the docstring of its module: the first line is shown; None: it has none, as under ``python -OO``.
    """
    parser = Parser(prog=program, description=about and about.split("\n")[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the full result here")
    return parser


def _share(text: str) -> float:
    return percent(text) / 100


def add_noise(parser: argparse.ArgumentParser) -> None:
    """Adds ``--keep-noise`` and ``--tolerance``; see [Note: too noisy to tell]."""
    parser.add_argument("--keep-noise", action="store_true", help="show figures that are too noisy, too")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=noise.TOLERANCE,
        metavar="PERCENT",
        help=f"how far a figure's uncertainty may reach to each side ({100 * noise.TOLERANCE:.0f} %%)",
    )


def add_picture(parser: argparse.ArgumentParser) -> None:
    """Adds ``--picture``."""
    parser.add_argument("--picture", type=file_to_write, metavar="FILE.html", help="draw the result as a page")


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


def fresh_sets(count: int) -> str:
    """Returns how many sets of processes there were, in words."""
    return f"{count} fresh set{'' if count == 1 else 's'} of processes"


def show(result: dict[str, Any], table: str, path: Path | None) -> None:
    """Prints the table, and writes the result as JSON if a path was given."""
    sys.stdout.write(table + "\n")
    if path is not None:
        write_json(path, result)


def show_sound(result: dict[str, Any], table: str, path: Path | None, keep: bool) -> int:
    """As `show`, with what was too noisy below the table; returns the exit code."""
    show(result, "\n".join([table, *noise.epilogue(result, keep)]), path)
    return noise.exit_code(result, keep)
