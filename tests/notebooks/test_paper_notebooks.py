"""The paper's figures, run as a reader would, but with less of everything: are they measured, simulated, published?"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import papermill
import pytest

from . import running

_SMALLER = {
    r"^seconds = [\d.]+": "seconds = 0.02",
    r"^parameters = [\d_]+": "parameters = 60_000",
    r"^backwards = \d+": "backwards = 16",
    r"paper\.Settings\(": 'paper.Settings(models=("conv_net",), ',
}
FIGURES = {
    "overlap": {"figure": 6},
    "communication": {"two-figure": 2, "seven-figure": 7, "eight-figure": 8, "twelve-figure": 12},
    "scaling": {"nine-figure": 9, "ten-figure": 10},
    "convergence": {"figure": 11},
}
CLAIMS = {
    "overlap": {"lines": "the same gradients both ways: True", "numbers": "overlap saves 38% of the step without it"},
    "scaling": {"numbers": "every 8: saves 57% of the time"},
    "convergence": {"lines": "all ranks still have the same weights: True", "numbers": "held-out loss"},
}


def executed(name: str, folder: Path) -> running.Notebook:
    """A notebook after papermill has run it with small settings; before the last cell it tells whether it has torch."""
    notebook = running.read(running.PROJECT / "notebooks" / f"paper_{name}.ipynb")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for pattern, smaller in _SMALLER.items():
                cell.source = re.sub(pattern, smaller, cell.source, flags=re.MULTILINE)
    asked = running.copy_of(notebook.cells[-1], "import sys\nprint('torch' in sys.modules)", "torch-there")
    notebook.cells.insert(len(notebook.cells) - 1, asked)
    nbformat.write(notebook, folder / "in.ipynb")
    where = str(running.PROJECT / "notebooks")
    return papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", cwd=where, progress_bar=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", FIGURES)
def test_paper_notebook(name: str, tmp_path: Path) -> None:
    """papermill runs all cells on real ranks; each figure has measured points beside marked simulated and published
    ones; what the essential lines claim is so; the kernel needs no torch."""
    notebook = executed(name, tmp_path)
    for cell, number in FIGURES[name].items():
        figure = running.figure(running.cell(notebook, cell))
        assert figure["layout"]["title"]["text"].startswith(f"Figure {number} of the DDP paper")
        titles = [one["text"] for one in figure["layout"]["annotations"]]
        kinds = {kind for kind in ("measured", "simulated") if any(title.startswith(kind) for title in titles)}
        names = {trace["name"] for trace in figure["data"]}
        if any(one.startswith("published") for one in names):
            kinds.add("published")
        assert kinds == ({"measured"} if number == 11 else {"measured", "simulated", "published"})
    for cell, claim in CLAIMS.get(name, {}).items():
        assert claim in running.text(running.cell(notebook, cell))
    assert running.text(running.cell(notebook, "torch-there")).strip() == "False"
