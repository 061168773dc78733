"""The panel's button Export in a real JupyterLab: the cells that have run become a script beside the notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.browser import NotebookPage
from tests.browser.waiting import has, says

if TYPE_CHECKING:
    from tests.benchmarks.browser import Lab
    from tests.browser.conftest import Shared

CELLS = ("%load_ext ddp_lab\n%cluster start -n 2 --backend gloo", "%%distributed\nx = 41 + 1", "lab", "%cluster stop")
SCRIPT = "import os; print(open(os.path.splitext(os.environ['JPY_SESSION_NAME'].split('/')[-1])[0] + '.py').read())"


def test_the_button_writes_the_script(shared: Shared, lab: Lab) -> None:
    """It has the notebook's name, and holds the cell; a second press refuses to replace it, and says what to do."""
    with shared.page() as page:
        notebook = NotebookPage(page, lab, lab.write(*CELLS, SCRIPT))
        notebook.start_kernel()
        for cell in (0, 1, 2):
            notebook.run_cell(cell)
        has(page.locator(".ddp-cluster-ranks tbody tr"), 2)
        button = page.locator(".ddp-cluster").get_by_role("button", name="Export", exact=True)
        status = page.locator(".ddp-cluster > .ddp-status").last
        button.click()
        says(status, "from 1 cell of this notebook")
        button.click()
        says(status, "exists: add --force to replace it")
        notebook.run_cell(4)
        [output] = notebook.save().cells[4].outputs
        assert "x = 41 + 1" in output.text
        notebook.run_cell(3)
        notebook.shut_down()
        assert not notebook.errors
