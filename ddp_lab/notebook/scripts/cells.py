"""Where the cells of a script come from: what has run in this notebook, or a notebook's file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DdpLabError
from ...files import open_regular
from ...output import quick_nbformat

__all__ = ["NotebookCell", "executed_cells", "load", "read_cells", "read_notebook", "unload"]

_LOSES_VARIABLES = re.compile(r"^\s*%cluster\s+(?:stop|restart)\b", re.MULTILINE)
_ON_RANKS = "%%distributed"


@dataclass(frozen=True)
class NotebookCell:
    """A code cell.

    Attributes:
        text: as in the notebook, with its magics.
        name: its name in messages and in the script: ``"cell [3]"``.
        left_out: why it can't be part of a script; "" if it can.
    """

    text: str
    name: str
    left_out: str = ""


@dataclass(frozen=True)
class _Run:
    """One execution of a cell: `cell_id` is Jupyter's, None in a terminal."""

    text: str
    number: int
    cell_id: str | None
    succeeded: bool


class _Executed:
    """Notes how each cell of a shell ended."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.runs: list[_Run] = []

    def begin(self) -> None:
        self.shell.events.register("post_run_cell", self._note)

    def _note(self, result: Any) -> None:
        """Called by IPython after each cell."""
        info = result.info
        if result.execution_count is not None and info is not None and info.store_history:
            number = int(result.execution_count)
            self.runs.append(_Run(info.raw_cell, number, getattr(info, "cell_id", None), bool(result.success)))

    def all_runs(self) -> list[_Run]:
        """All executions, also those before this object existed, of which it is not known how they ended."""
        history: Sequence[str] = self.shell.history_manager.input_hist_raw
        first = self.runs[0].number if self.runs else len(history) - 1
        return [_Run(history[number], number, None, True) for number in range(1, first)] + self.runs

    def end(self) -> None:
        if self._note in self.shell.events.callbacks["post_run_cell"]:
            self.shell.events.unregister("post_run_cell", self._note)


_executed: _Executed | None = None


def load(shell: Any) -> None:
    """From now on notes which cells of an IPython shell succeed."""
    global _executed
    unload(shell)
    if _executed is None or _executed.shell is not shell:
        _executed = _Executed(shell)
    _executed.begin()


def unload(shell: Any) -> None:
    """Undoes that; what is noted stays, for a shell that loads the extension again."""
    if _executed is not None:
        _executed.end()


def executed_cells(every_run: bool = False) -> list[NotebookCell]:
    """The cells that have run in this notebook.

    A cell that ran several times is there once: with the text of its last run that succeeded, at the place of its first
    one. What ran on a cluster before it was stopped or restarted is not part of what its ranks hold.

    Args:
        every_run: whether each run counts, in the order of the runs.
    """
    runs = [] if _executed is None else _executed.all_runs()
    before = _last_restart(runs)
    found: dict[Any, NotebookCell] = {}
    for index, run in enumerate(runs):
        key = index if every_run or run.cell_id is None else run.cell_id
        name = f"cell [{run.number}]"
        if not run.succeeded:
            found.setdefault(key, NotebookCell(run.text, name, "it failed"))
            continue
        why = "it ran before the cluster was stopped or restarted" if index < before and _on_ranks(run) else ""
        if key in found and found[key].left_out == "it failed":
            del found[key]  # its first run that succeeded counts
        found[key] = NotebookCell(run.text, name, why)
    return list(found.values())


def _on_ranks(run: _Run) -> bool:
    return _ON_RANKS in run.text and run.text.lstrip().startswith("%%")


def _last_restart(runs: Sequence[_Run]) -> int:
    """The index of the last run that ended the ranks' processes and was followed by a cell on ranks; 0 if none was."""
    later = False
    for index in reversed(range(len(runs))):
        if later and _LOSES_VARIABLES.search(runs[index].text) and runs[index].succeeded:
            return index
        later = later or (_on_ranks(runs[index]) and runs[index].succeeded)
    return 0


def read_cells(path: Path) -> list[NotebookCell]:
    """The code cells of a notebook's file, in its order; of any format that jupytext reads.

    Left out are those whose stored output is an error, and those tagged ``raises-exception`` that have not run.

    Raises:
        DdpLabError: the file does not exist or is not a notebook.
    """
    try:
        with open_regular(path) as file:
            notebook = read_notebook(file.read().decode(), path.suffix)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return [_of_file(cell, number) for number, cell in enumerate(cells, start=1)]
    except FileNotFoundError as error:
        raise DdpLabError(f"{path} does not exist: give the file of a notebook") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DdpLabError(f"{path} is not a notebook: save it as .ipynb, or as a format of jupytext") from error


def read_notebook(text: str, extension: str, **how: Any) -> Any:
    """The notebook that a text is.

    Args:
        text: the file's content.
        extension: of the file: ``".ipynb"``, or that of a format of jupytext.
        how: options of that format.

    Raises:
        ValueError: it is none.
    """
    quick_nbformat.install()
    import jupytext
    from nbformat import ValidationError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of what is no notebook of today
            return jupytext.reads(text, {"extension": extension, **how})
    except (ValidationError, UserWarning) as error:
        raise ValueError(str(error)) from error


def _of_file(cell: Any, number: int) -> NotebookCell:
    failed = any(output.output_type == "error" for output in cell.outputs)
    why = "it failed" if failed else ""
    if not failed and "raises-exception" in cell.metadata.get("tags", []) and cell.execution_count is None:
        why = "it is tagged raises-exception"
    return NotebookCell(cell.source, f"cell {number}", why)
