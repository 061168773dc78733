"""What the command lines of the benchmarks have in common: how they begin, and where their results go."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["new_parser", "show"]


def new_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for ``ddp-lab bench NAME`` that knows ``--json``.

    Args:
        name: of the benchmark.
        about: the docstring of its module, whose first line is shown.
    """
    parser = argparse.ArgumentParser(prog=f"ddp-lab bench {name}", description=about.splitlines()[0] if about else None)
    parser.add_argument("--json", type=Path, help="write the full result here")
    return parser


def show(result: dict[str, Any], table: str, path: Path | None) -> None:
    """Prints the table, and writes the result as JSON if a path was given."""
    sys.stdout.write(table + "\n")
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
