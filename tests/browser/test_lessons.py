"""Lessons in a real JupyterLab: found in the launcher, and gone through from the first cell to the last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from ddp_lab.lesson_files import VERDICT
from tests.benchmarks.browser import PROJECT, Lab, NotebookPage
from tests.browser.conftest import Shared
from tests.notebooks import running
from tests.waiting import wait_until

_SCREENSHOTS = "DDP_LAB_SCREENSHOTS"  # folder that pictures of the lessons are written to
_CARD = ".jp-LauncherCard:is([title^='Lesson '], [title^='Appendix '])"


@pytest.fixture(scope="module", autouse=True)
def lessons(lab: Lab) -> Iterator[None]:
    """A copy of the notebooks and lessons in JupyterLab's folder."""
    copies = [lab.notebooks / folder for folder in ("notebooks", "tutorials")]
    for copy in copies:
        shutil.copytree(PROJECT / copy.name, copy, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    yield
    for copy in copies:
        shutil.rmtree(copy)


def _picture(page: Page, tmp_path: Path, name: str) -> None:
    folder = Path(os.environ.get(_SCREENSHOTS) or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")


def test_the_launcher_opens_lessons(page: Page, lab: Lab, tmp_path: Path) -> None:
    """A card for the quickstart and for each lesson, in order; a click opens the notebook itself. Both kernels, too."""
    page.goto(f"{lab.url}lab/workspaces/launcher?reset&token={lab.token}")
    cards = page.locator(_CARD)
    wait_until(lambda: cards.count() == len(running.LESSONS), "a card for each lesson")
    titles = [str(card.get_attribute("title")) for card in cards.all()]
    assert [title.split(":")[0] for title in titles] == [
        running.module_of(path.stem).replace("_0", " ").replace("_", " ").title() for path in running.LESSONS
    ]
    assert page.locator(".jp-LauncherCard[title='The whole path once']").count() == 1
    assert page.locator(".jp-LauncherCard[data-category='Notebook'][title^='Python 3 (ddp_lab)']").count() == 1
    cards.first.scroll_into_view_if_needed()
    _picture(page, tmp_path, "launcher")
    cards.first.click()
    opened = "() => window.jupyterapp.shell.currentWidget?.context?.path"
    wait_until(lambda: page.evaluate(opened) == f"tutorials/{running.LESSONS[0].name}", "the lesson")
    lesson = NotebookPage(page, lab, f"tutorials/{running.LESSONS[0].name}")
    lesson.start_kernel()
    lesson.shut_down()


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    ["01_ranks_and_cells", "06_buckets_and_overlap", "11_why_does_my_cell_hang", "15_fsdp2_and_when_ddp_is_not_enough"],
)
def test_a_lesson_from_start_to_end(page: Page, lab: Lab, tmp_path: Path, name: str) -> None:
    """Every cell runs; those that fail do so on purpose; each check waits for the reader."""
    notebook = NotebookPage(page, lab, f"tutorials/{name}.ipynb")
    notebook.start_kernel()
    try:
        for index in notebook.code_cells():
            notebook.run_cell(index)
            _picture(page, tmp_path, f"{name}-{index:02}")
        after = notebook.save()
        for cell in after.cells:
            if cell.cell_type == "code" and "raises-exception" not in running.tags(cell):
                assert "error" not in {output.output_type for output in cell.outputs}, running.text(cell)
            if any(tag.startswith("check-") for tag in running.tags(cell)):
                assert "Not yet: " in running.text(cell)
        assert not notebook.errors
    finally:
        notebook.shut_down()


def test_a_verdict_is_shown_as_a_badge(shared: Shared, lab: Lab) -> None:
    """JupyterLab shows what a check says, not the data that stands beside it for `ddp-lab lessons --check`."""
    checks = 'Checks(lambda answer: "Right: it is.", lambda answer: "Not yet: look again.")'
    imports = f'import sys\nsys.path.insert(0, "tutorials")\nfrom checks import Checks\nanswer, check = 1, {checks}'
    with shared.notebook(imports, "check(1)", "check(2)", run=3) as notebook:
        shown = notebook.page.locator(".jp-OutputArea-output")
        wait_until(lambda: shown.count() == 2, "two verdicts")
        right, wrong = (one.inner_text() for one in shown.all())
        assert right.split() == ["✓", "Right:", "it", "is.", "1", "of", "2", "exercises", "solved"]
        assert wrong.split() == ["✗", "Not", "yet:", "look", "again.", "1", "of", "2", "exercises", "solved"]
        for output in notebook.save().cells[1].outputs:
            assert VERDICT in output.data
