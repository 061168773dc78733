"""The switch between the views of a cell's output in a real JupyterLab: merged, tabs, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Locator

from tests.benchmarks.browser import Lab, NotebookPage
from tests.browser.conftest import Shared
from tests.browser.waiting import has, says
from tests.security.markup import FLAG, NAME, TEXT
from tests.waiting import wait_until

START = "%load_ext ddp_lab\n%cluster start -n 4 --backend gloo"
SILENT = "%%distributed\nx = 1\nif rank == 1: print('alone')"
PRINT = "%%distributed\nprint('epoch 1')\nif rank < 2: print('loss', rank)"
FIGURES = """%%distributed --view side-by-side
%matplotlib inline
import matplotlib.pyplot as plt, pandas as pd
print("line\\n" * (rank + 1))
plt.plot([rank, 2, 1]); plt.show()
pd.DataFrame({"loss": [rank, 2]})
"""
WAIT = """%%distributed --view tabs
import os, time
for line in range(100_000):
    print("line", line, "of rank", rank)
    time.sleep(0.01)
    if os.path.exists({gate!r}): break
"""
FAIL = "%%distributed --view tabs\nprint('own', rank)\nif rank == 2: raise ValueError('end of data')\ndist.barrier()"


# What would be markup if it were not shown as text.
MARKUP = (
    f"%%distributed\nimport sys\nprint({TEXT!r})\nprint({TEXT!r}, file=sys.stderr)",
    f"%%distributed\nclass Named:\n    def __repr__(self): return {TEXT!r}\nNamed()",
    f"%%distributed\nraise type('Error' + {NAME!r}, (Exception,), {{}})({TEXT!r})",
    "%cluster status",
    "%cluster doctor",
)
SCRIPT = "import os; print(open(os.path.splitext(os.environ['JPY_SESSION_NAME'].split('/')[-1])[0] + '.py').read())"


@pytest.fixture(scope="module")
def notebook(shared: Shared, lab: Lab, gate: Path) -> Iterator[NotebookPage]:
    """A notebook with four ranks."""
    wait = WAIT.format(gate=str(gate))
    with shared.notebook(START, SILENT, PRINT, PRINT, FIGURES, wait, FAIL, "lab", SCRIPT, *MARKUP, run=1) as opened:
        yield opened
        gate.touch()


def _cell(notebook: NotebookPage, index: int) -> Locator:
    return notebook.page.locator(".jp-CodeCell").nth(index)


def _merged(cell: Locator) -> Locator:
    """The displays of the merged output."""
    return cell.locator(".jp-OutputArea-child:not(:has(ddp-lab-output)) [data-mime-type='text/plain']")


def _choose(cell: Locator, view: str) -> None:
    cell.get_by_role("radio", name=view).check(force=True)  # it lies invisibly over its label


def test_a_cell_of_one_rank_has_no_switch(notebook: NotebookPage) -> None:
    """Output of one rank makes no place for a switch."""
    notebook.run_cell(1)
    says(_merged(_cell(notebook, 1)), "rank 1 │ alone")
    assert notebook.page.locator("ddp-lab-output").count() == 0


def test_the_panels_button_writes_the_script(notebook: NotebookPage) -> None:
    """It has the notebook's name, and holds the cell; a second press refuses to replace it, and says what to do."""
    notebook.run_cell(7)
    has(notebook.page.locator(".ddp-cluster-ranks tbody tr"), 4)
    button = notebook.page.locator(".ddp-cluster").get_by_role("button", name="Export", exact=True)
    status = notebook.page.locator(".ddp-cluster > .ddp-status").last
    button.click()
    says(status, "from 1 cell of this notebook")
    button.click()
    says(status, "exists: add --force to replace it")
    notebook.run_cell(8)
    [output] = notebook.save().cells[8].outputs
    assert "if rank == 1: print('alone')" in output.text


def test_outputs_that_would_be_markup_are_text(notebook: NotebookPage) -> None:
    """What ranks print, return and raise is readable as it is, and no script of it runs."""
    cells = range(9, 9 + len(MARKUP))
    for index in cells:
        notebook.run_cell(index)
    for index in cells[:3]:
        says(_cell(notebook, index).locator(".jp-OutputArea"), NAME)
    found = notebook.page.locator(".jp-OutputArea-output").locator("[onerror], [onload], script")
    assert found.count() == 0
    assert notebook.page.evaluate(f"() => window.{FLAG} === undefined")


def test_the_switch(notebook: NotebookPage) -> None:
    """From merged to tabs and back; the choice holds for the next cell; ranks with the same output share a tab."""
    notebook.run_cell(2)
    cell = _cell(notebook, 2)
    has(cell.get_by_role("radiogroup"), 1)
    assert _merged(cell).is_visible()
    _choose(cell, "tabs")
    wait_until(lambda: not _merged(cell).is_visible(), "tabs in place of the merged output")
    assert cell.get_by_role("tab").all_inner_texts() == ["rank 0", "rank 1", "ranks 2–3"]
    says(cell.get_by_role("tabpanel"), "epoch 1\nloss 0")
    notebook.run_cell(3)
    following = _cell(notebook, 3)
    says(following.get_by_role("tabpanel"), "epoch 1\nloss 0")
    _choose(cell, "merged")
    wait_until(lambda: _merged(cell).is_visible(), "the merged output")
    assert cell.get_by_role("tab").count() == 0
    assert following.get_by_role("tab").count() == 3  # a cell keeps its view


def test_tabs_by_keyboard(notebook: NotebookPage) -> None:
    """Arrow keys go from tab to tab, and from view to view."""
    cell = _cell(notebook, 3)
    cell.get_by_role("tab", name="rank 0").focus()
    notebook.page.keyboard.press("ArrowLeft")
    says(cell.get_by_role("tabpanel"), "epoch 1")
    wait_until(lambda: "loss" not in cell.get_by_role("tabpanel").inner_text(), "the last tab")
    assert notebook.page.evaluate("() => document.activeElement.textContent") == "ranks 2–3"
    cell.get_by_role("radio", name="tabs").focus()
    notebook.page.keyboard.press("ArrowRight")
    has(cell.locator(".ddp-rank-page"), 3)


def _tops(boxes: Locator) -> list[int]:
    """The upper edges of elements."""
    return [round(box["y"]) for one in boxes.all() if (box := one.bounding_box()) is not None]


def test_figures_and_tables_side_by_side(notebook: NotebookPage) -> None:
    """Cells of one size, labelled; what ranks displayed at the same place is in one row, though their texts differ."""
    notebook.page.set_viewport_size({"width": 2000, "height": 1000})
    notebook.run_cell(4)
    cell = _cell(notebook, 4)
    pages = cell.locator(".ddp-rank-page")
    has(pages, 4)
    has(cell.locator("ddp-lab-output img"), 4)
    has(cell.locator("ddp-lab-output table"), 4)
    assert pages.locator(".ddp-rank-name").all_inner_texts() == [f"rank {rank}" for rank in range(4)]
    rows = [_tops(pages), _tops(cell.locator("ddp-lab-output img")), _tops(cell.locator("ddp-lab-output table"))]
    assert len({*zip(*rows, strict=True)}) == len({*rows[0]}), "what stands in one row of ranks does so in each part"
    assert len({round(box["width"]) for box in (one.bounding_box() for one in pages.all()) if box is not None}) == 1
    merged = cell.locator(".jp-OutputArea-child:not(:has(ddp-lab-output)) img")
    assert not any(one.is_visible() for one in merged.all())
    notebook.page.set_viewport_size({"width": 500, "height": 1000})
    wait_until(
        lambda: pages.nth(1).bounding_box()["x"] == pages.nth(0).bounding_box()["x"], "ranks one below the other"
    )  # type: ignore[index]
    notebook.page.set_viewport_size({"width": 1360, "height": 1000})


def test_a_running_cell(notebook: NotebookPage, gate: Path) -> None:
    """Tabs are live while ranks print hundreds of lines a second; a tab that is opened shows its rank from then on."""
    notebook.run_cell(5, wait=False)
    cell = _cell(notebook, 5)
    has(cell.get_by_role("tab"), 4)
    cell.get_by_role("tab", name="rank 2").click()
    panel = cell.get_by_role("tabpanel")
    wait_until(lambda: "lines not shown here" in panel.inner_text(), "many lines")
    before = panel.inner_text()
    wait_until(lambda: panel.inner_text() != before, "more lines")
    assert "of rank 2" in before
    assert "of rank 1" not in before
    gate.touch()
    wait_until(lambda: notebook.executions(5) is not None, "the end of the cell")
    says(cell.get_by_role("tab", name="rank 2"), "true", attribute="aria-selected")


def test_a_rank_that_fails(notebook: NotebookPage) -> None:
    """Its tab says so and has its traceback; the cell's error stays below."""
    notebook.run_cell(6)
    cell = _cell(notebook, 6)
    says(cell.get_by_role("tab", name="rank 2"), "rank 2 ✗")
    says(cell.get_by_role("tab", name="rank 0"), "rank 0 ■")
    cell.get_by_role("tab", name="rank 2").click()
    says(cell.get_by_role("tabpanel"), "ValueError: end of data")
    error = cell.locator(
        ".jp-OutputArea-child:not(:has(ddp-lab-output)) [data-mime-type='application/vnd.jupyter.stderr']"
    )
    says(error, "rank 2 failed")
    assert error.is_visible()


def test_a_page_that_is_loaded_again(notebook: NotebookPage) -> None:
    """Each cell has the view that it had, with its output by rank."""
    notebook.save()
    notebook.reload()
    says(_cell(notebook, 6).get_by_role("tabpanel"), "own 0")
    has(_cell(notebook, 4).locator("ddp-lab-output img"), 4)
    has(_cell(notebook, 2).get_by_role("radiogroup"), 1)
    assert _merged(_cell(notebook, 2)).is_visible()


def test_readers_without_the_kernel(notebook: NotebookPage) -> None:
    """The saved notebook and its HTML have the merged output; so has the page once another kernel runs."""
    page, _ = HTMLExporter().from_notebook_node(notebook.save())
    assert "ranks 0–3 │ epoch 1" in page
    assert "radiogroup" not in page
    notebook.command("kernelmenu:restart")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    notebook.wait_for_status("idle")
    notebook.reload()
    cell = _cell(notebook, 3)
    wait_until(lambda: _merged(cell).is_visible(), "the merged output")
    assert cell.get_by_role("radiogroup").count() == 0
