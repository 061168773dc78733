"""Lessons in a real JupyterLab: found in the launcher, predictions clicked, verdicts shown as badges."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from ddp_lab.lesson_files import VERDICT
from tests.benchmarks.browser import PROJECT, Lab, NotebookPage
from tests.browser.conftest import Shared
from tests.notebooks import running
from tests.waiting import wait_until

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


def test_the_launcher_opens_lessons(page: Page, lab: Lab) -> None:
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
    cards.first.click()
    opened = "() => window.jupyterapp.shell.currentWidget?.context?.path"
    wait_until(lambda: page.evaluate(opened) == f"tutorials/{running.LESSONS[0].name}", "the lesson")
    lesson = NotebookPage(page, lab, f"tutorials/{running.LESSONS[0].name}")
    lesson.start_kernel()
    lesson.shut_down()


_CHECKS = """
import sys
sys.path.insert(0, "tutorials")
from checks import Checks, Prediction, Predictions
check = Checks(lambda answer: "Right: it is.", lambda answer: "Not yet: look again.")
predictions = Predictions(Prediction(["a", "b"], lambda: "b"))
answer = 1
"""
_ANOTHER = """
try:
    predictions.predict(1, "c")
except ValueError as error:
    print(error)
"""


def test_a_click_predicts_and_a_verdict_is_shown_as_a_badge(shared: Shared, lab: Lab) -> None:
    """A click on a button predicts; a name that is not a choice raises an error that lists the choices. JupyterLab
    shows what a check says, not the data that stands beside it for `ddp-lab lessons --check`."""
    cells = ("check(1)", "check(2)", "predictions.predict(1)", _ANOTHER, "predictions.compare(1)")
    with shared.notebook(_CHECKS, *cells, run=5) as notebook:
        shown = notebook.page.locator(".jp-OutputArea-output")
        wait_until(lambda: shown.count() == 4, "two verdicts, the buttons and the error")
        right, wrong, _, error = (one.inner_text() for one in shown.all())
        assert right.split() == ["✓", "Right:", "it", "is.", "1", "of", "2", "exercises", "solved"]
        assert wrong.split() == ["✗", "Not", "yet:", "look", "again.", "1", "of", "2", "exercises", "solved"]
        assert "'c' is not a choice: predict one of 'a', 'b'" in error
        for output in notebook.save().cells[1].outputs:
            assert VERDICT in output.data
        shown.nth(2).get_by_label("b").click()
        wait_until(lambda: shown.nth(2).get_by_label("b").is_checked(), "the choice")
        notebook.run_cell(5)
        wait_until(lambda: "As you predicted: b." in " ".join(shown.nth(4).inner_text().split()), "what came true")
