"""The quickstart notebook in a real JupyterLab: real engines, real training, a live dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.browser import PROJECT, NotebookPage, open_tab
from tests.browser.waiting import press
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.benchmarks.browser import Lab

QUICKSTART = PROJECT / "notebooks" / "quickstart.ipynb"
_CANVAS = "() => document.querySelector('.ddp-main canvas')?.toDataURL()"
_STATISTICS = "() => document.querySelector('.ddp-lab')?.statistics()"


def _index_of(notebook: NotebookPage, text: str) -> int:
    """The first code cell that contains `text`."""
    cells = notebook.lab.read(notebook.name).cells
    return next(index for index, cell in enumerate(cells) if cell.cell_type == "code" and text in cell.source)


def test_quickstart_draws_the_training_while_it_runs(lab_page: Page, lab: Lab) -> None:
    """Quickstart trains in JupyterLab: the canvas changes meanwhile, steps can be chosen, and the picture is kept."""
    page = lab_page
    name = lab.copy(QUICKSTART)
    copied = lab.notebooks / name
    copied.write_text(copied.read_text().replace("epochs = 12", "epochs = 5"))
    notebook = NotebookPage(page, lab, name)
    notebook.start_kernel()
    training = _index_of(notebook, "%%distributed --dashboard")
    try:
        for index in notebook.code_cells():
            if index < training:
                notebook.run_cell(index)
        notebook.run_cell(training, wait=False)
        page.wait_for_selector(".ddp-lab")
        open_tab(page, "Timeline")
        page.locator(".ddp-lab").scroll_into_view_if_needed()
        _sees_the_canvas_change(page, notebook, training)
        wait_until(lambda: notebook.executions(training), "the end of the training")
        _chooses_steps(page)
        _compares_gradients(page)
        assert not notebook.errors
        _keeps_the_picture(page, notebook, training)
    finally:
        notebook.run_cell(_index_of(notebook, "%cluster stop"))
        notebook.shut_down()


def _sees_the_canvas_change(page: Page, notebook: NotebookPage, training: int) -> None:
    """Asserts that at least five different pictures were drawn while the cell ran."""
    pictures: set[str] = set()

    def enough() -> bool:
        pictures.add(page.evaluate(_CANVAS))
        return len(pictures) >= 5

    wait_until(enough, "five pictures of the timeline")
    assert notebook.executions(training) is None, "the cell had ended when the fifth picture was seen"


def _last_step(page: Page) -> int:
    """Waits until the page shows the last step that it holds, and returns its number."""
    newest = page.get_by_role("spinbutton", name="step number")
    wait_until(lambda: page.evaluate(_STATISTICS)["step"] == int(newest.get_attribute("max") or -1), "the last step")
    return int(newest.get_attribute("max") or -1)


def _chooses_steps(page: Page) -> None:
    """Asserts that the step selector, by keyboard, shows an earlier step and stops following."""
    last = _last_step(page)
    slider = page.get_by_role("slider", name="step")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    wait_until(lambda: page.evaluate(_STATISTICS)["step"] < last, "an earlier step")
    assert not page.get_by_label("follow latest").is_checked()
    page.get_by_label("follow latest").check()
    wait_until(lambda: page.evaluate(_STATISTICS)["step"] == last, "the latest step")


def _compares_gradients(page: Page) -> None:
    """Asserts that the ranks find their gradients equal."""
    press(page.get_by_role("button", name="Compare gradients"))
    verdict = page.locator(".ddp-verdict")
    wait_until(lambda: "equal on all 2 ranks" in verdict.inner_text(), "the comparison of gradients")


def _keeps_the_picture(page: Page, notebook: NotebookPage, training: int) -> None:
    """Asserts that the saved training cell holds the picture of the last step, below the live view."""
    last = _last_step(page)
    outputs = notebook.save().cells[training].outputs
    kept = [output for output in outputs if "ddp-lab-static" in output.get("data", {}).get("text/html", "")]
    assert len(kept) == 1
    assert f"–{last}:" in kept[0].data["text/plain"]
