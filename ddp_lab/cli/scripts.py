"""`ddp-lab export` and `ddp-lab import`: a notebook as a script, a script as a notebook."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..command_line import count, file_to_write

__all__ = ["add"]


def add(commands: Any) -> None:
    """Adds the commands to the parser of `ddp-lab`."""
    made = commands.add_parser(
        "export",
        help="write a notebook's cells as a script for torchrun",
        description="Writes the %%distributed cells of a notebook as a script for torchrun. Plain cells are left out, "
        "unless their first line is `# export`. Exit code 1: nothing was written, and why.",
        examples=("ddp-lab export train.ipynb train.py", "ddp-lab export train.ipynb train.py --force"),
    )
    made.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the notebook to read")
    made.add_argument("script", type=file_to_write, metavar="SCRIPT", help="the script to write")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.set_defaults(call=export)
    made = commands.add_parser(
        "import",
        help="write a training script's cells as a notebook",
        description="Writes a notebook that starts a cluster and runs a training script in %%distributed cells. Exit "
        "code 1: nothing was written, and why.",
        examples=("ddp-lab import train.py", "ddp-lab import train.py --output cells.ipynb -n 4"),
    )
    made.add_argument("script", type=Path, metavar="SCRIPT", help="the script to read")
    made.add_argument(
        "--output", type=file_to_write, metavar="FILE", help="the notebook to write (default: SCRIPT with .ipynb)"
    )
    made.add_argument(
        "-n",
        type=count,
        metavar="N",
        help="number of ranks (default: as the script's text says, else one per GPU, else 2)",
    )
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.set_defaults(call=import_)


def export(arguments: argparse.Namespace) -> int:
    """Writes a notebook's script, and prints what was written and what was left out."""
    from ..notebook.scripts import export_notebook

    print("\n".join(export_notebook(arguments.notebook, arguments.script, force=arguments.force)))
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Writes a script's notebook, and prints what was written."""
    from ..notebook.scripts import import_script

    lines = import_script(arguments.script, arguments.output, n=arguments.n, force=arguments.force)
    print("\n".join(lines))
    return 0
