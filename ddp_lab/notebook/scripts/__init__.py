"""A notebook's cells as a script for torchrun, and a script as a notebook: what is read, written and reported.

`cells` says which cells there are and how they ended, `imports` gathers imports, `export` translates the cells and puts
the script together inside its `frame`. `split` makes cells of a script.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import DdpLabError
from ...files import open_regular, write_text
from ...machine import visible_gpus
from ...output import quick_nbformat
from . import cells
from .cells import NotebookCell, executed_cells, read_cells
from .export import export
from .settings import settings_of
from .split import SplitScript, split

__all__ = ["cells", "export_executed", "export_notebook", "import_script"]


def export_executed(
    script: Path, *, world_size: int | None = None, every_run: bool = False, force: bool = False
) -> list[str]:
    """Writes the cells that have run in this notebook as a script.

    Args:
        script: the file to write.
        world_size: of the running cluster, if there is one.
        every_run: whether a cell that ran several times is there as often.
        force: whether an existing file is replaced.

    Returns:
        Lines that report what was written and what was left out.

    Raises:
        DdpLabError: there is nothing to export, or the file exists or can't be written.
    """
    return _export(executed_cells(every_run), script, "this notebook", force, world_size)


def export_notebook(notebook: Path, script: Path, *, force: bool = False) -> list[str]:
    """Writes the cells of a notebook's file as a script; needs no kernel.

    Args:
        notebook: the file to read.
        script: the file to write.
        force: whether an existing file is replaced.

    Returns:
        Lines that report what was written and what was left out.

    Raises:
        DdpLabError: the notebook can't be read or has nothing to export, or the script exists or can't be written.
    """
    return _export(read_cells(notebook), script, notebook.name, force, None)


def _export(found: Sequence[NotebookCell], script: Path, origin: str, force: bool, world_size: int | None) -> list[str]:
    _check_new(script, force)
    made = export(found, settings_of(found, world_size), origin, script.name)
    _write(script, made.text)
    count = "1 cell" if made.cells == 1 else f"{made.cells} cells"
    lines = [f"wrote {script} from {count} of {origin}; run it with", f"    {made.command}"]
    return [*lines, *made.notes]


def import_script(
    script: Path, notebook: Path | None = None, *, n: int | None = None, force: bool = False
) -> list[str]:
    """Writes the cells of a script as a notebook.

    Args:
        script: the file to read.
        notebook: the file to write; None: the script's name with ``.ipynb``.
        n: number of ranks; None: as the script's text says, else one per GPU, else two.
        force: whether an existing file is replaced.

    Returns:
        Lines that report what was written and what remains to do.

    Raises:
        DdpLabError: the script can't be read or is not Python, or the notebook exists or can't be written.
    """
    notebook = script.with_suffix(".ipynb") if notebook is None else notebook
    _check_new(notebook, force)
    try:
        with open_regular(script) as file:
            text = file.read().decode()
    except FileNotFoundError as error:
        raise DdpLabError(f"{script} does not exist: give a Python script") from error
    except (OSError, ValueError) as error:
        raise DdpLabError(f"can't read {script}: {error}") from error
    made = split(text.replace("\r\n", "\n"), script.name)
    if not any(not cell.markdown for cell in made.cells):
        raise DdpLabError(f"{script} has no code for ranks: give a training script")
    _write(notebook, _as_notebook(made, script.name, n))
    count = sum(not cell.markdown for cell in made.cells)
    lines = [f"wrote {notebook}: {count} `%%distributed` {'cell' if count == 1 else 'cells'}; open it in JupyterLab"]
    return [*lines, *(f"note: {note}" for note in made.notes)]


def _as_notebook(made: SplitScript, name: str, n: int | None) -> str:
    """The JSON of a notebook whose first cells start the ranks."""
    n = n or made.n or len(visible_gpus(os.environ)) or 2
    start = f"%cluster start -n {n}" + (f" --backend {made.backend}" if made.backend else "")
    start += "".join(f" --env {shlex.quote(f'{key}={value}')}" for key, value in made.env.items())
    texts = [(f"Imported from `{name}` by ddp_lab.", True), ("%load_ext ddp_lab", False), (start, False)]
    texts += [(cell.text if cell.markdown else f"%%distributed\n{cell.text}", cell.markdown) for cell in made.cells]
    quick_nbformat.install()
    from nbformat import v4, writes

    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    new_cell: dict[bool, Any] = {True: v4.new_markdown_cell, False: v4.new_code_cell}
    written = [new_cell[markdown](text, id=f"cell-{at}") for at, (text, markdown) in enumerate(texts, start=1)]
    notebook = v4.new_notebook(cells=written, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    return f"{writes(notebook)}\n"


def _check_new(path: Path, force: bool) -> None:
    """Refuses to replace a file, unless that is asked for."""
    if path.is_dir():
        raise DdpLabError(f"{path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise DdpLabError(f"{path} exists: add --force to replace it, or give another name")


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DdpLabError(f"can't write {path}: {error.strerror}") from error
