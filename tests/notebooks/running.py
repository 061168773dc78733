"""Finds, reads and runs the stored notebooks."""

from __future__ import annotations

import base64
import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from nbclient import NotebookClient

from tests.waiting import TEST_LIMIT_S
from tests.zygotes import offered

PROJECT = Path(__file__).resolve().parents[2]
QUICKSTART = PROJECT / "notebooks" / "quickstart.ipynb"
LESSONS = sorted((PROJECT / "tutorials").glob("*.ipynb"))
NOTEBOOKS = [*sorted((PROJECT / "notebooks").glob("*.ipynb")), *LESSONS]
WIDGET = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"
GPU_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),  # this checkout
}
# Two CPU ranks, whatever the machine has, which compete as equals with the tests beside them.
KERNEL_ENVIRONMENT = GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "DDP_LAB_GIVE_WAY": "0"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Notebook = Any  # nbformat's NotebookNode
Cell = Any


def read(path: Path) -> Notebook:
    """The notebook as stored."""
    return nbformat.read(path, as_version=4)


def module_of(lesson: str) -> str:
    """The name that the checks and, after `test_`, the tests of a lesson have: `lesson_01`, `appendix_a`.

    Args:
        lesson: its file's stem.
    """
    number, _, _ = lesson.partition("_")
    return f"lesson_{number}" if number.isdigit() else f"appendix_{number.lower()}"


def cell(notebook: Notebook, name: str) -> Cell:
    """The cell with this id."""
    return next(one for one in notebook.cells if one.id == name)


def tags(of: Cell) -> list[str]:
    return list(of.metadata.get("tags", []))


def tagged(notebook: Notebook, tag: str) -> Cell:
    """The one cell with this tag."""
    [found] = [one for one in notebook.cells if tag in tags(one)]
    return found


def copy_of(original: Cell, source: str | None = None, name: str | None = None) -> Cell:
    """A new cell like `original`, with another source where one is given."""
    made = copy.deepcopy(original)
    made.id = name or f"{original.id}-again"
    made.source = original.source if source is None else source
    return made


def execute(notebook: Notebook, folder: Path, environment: Mapping[str, str] = KERNEL_ENVIRONMENT) -> Notebook:
    """Runs all cells in a new kernel, as "Run all" does: a cell tagged `raises-exception` may fail."""
    client = NotebookClient(notebook, timeout=TEST_LIMIT_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, **offered(environment)})
    return notebook


def text(of: Cell) -> str:
    """What a cell's outputs say, without colours and rank labels' rules."""
    parts = []
    for output in of.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.data.get("text/plain", ""))
    return _COLOUR.sub("", "\n".join(parts))


def mime_types(of: Cell) -> set[str]:
    return {kind for output in of.outputs for kind in output.get("data", {})}


def figure(of: Cell) -> Any:
    """The one plotly figure that a cell shows: a dictionary with `data` and `layout`."""
    [found] = [output.data[PLOTLY] for output in of.outputs if PLOTLY in output.get("data", {})]
    return found


def numbers(values: Any) -> list[float]:
    """A trace's numbers as plotly writes them: a list, or an array in base 64."""
    if isinstance(values, list):
        return [float(value) for value in values]
    return list(map(float, np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])))
