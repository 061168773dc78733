"""Names and outputs that would be markup, in Chromium: dashboard and JupyterLab show them as text, no script runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.browser import NotebookPage
from tests.browser.bare_page import BarePage
from tests.browser.waiting import says
from tests.security.markup import FLAG, NAME, TEXT, training

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.benchmarks.browser import Lab

# The findings' own bold gains are the only ones.
_STRANGE = """() => document.querySelectorAll(
    'body script, body img, body b:not(.ddp-gain > b), body [onload], body [onerror]').length"""


def test_names_are_text_in_every_tab(browser: Browser) -> None:
    """A class and parameters called `<script>…` are readable as such wherever the dashboard says them."""
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    page = context.new_page()
    shown = BarePage(page, training())
    try:
        shown.until(lambda: shown.page.locator(".ddp-tab:visible").count(), "the tabs")
        said = {}
        for title in shown.titles():
            shown.open(title)
            shown.until(lambda: page.locator(".ddp-main").inner_text(), "something to read")
            said[title] = page.locator("body").inner_text()
            assert page.evaluate(_STRANGE) == 0, title
        shown.open("Stragglers")
        shown.says(".ddp-places tbody", NAME)
        shown.open("Buckets")
        page.locator(".ddp-buckets .ddp-chart").click(position={"x": 30, "y": 34 * 2 + 60})
        shown.says(".ddp-detail", NAME)
        page.locator(".ddp-buckets .ddp-chart").hover(position={"x": 30, "y": 34 * 2 + 60})
        assert page.evaluate(_STRANGE) == 0
        assert page.evaluate(f"() => window.{FLAG} === undefined")
        assert any(NAME in text for text in said.values())
    finally:
        shown.close()
        context.close()


CELLS = (
    "%load_ext ddp_lab\n%cluster start -n 2",
    f"%%distributed\nimport sys\nprint({TEXT!r})\nprint({TEXT!r}, file=sys.stderr)",
    f"%%distributed\nclass Named:\n    def __repr__(self): return {TEXT!r}\nNamed()",
    f"%%distributed\nraise type('Error' + {NAME!r}, (Exception,), {{}})({TEXT!r})",
    "%cluster status",
    "%cluster doctor",
    "%cluster stop",
)


def test_outputs_are_text_in_jupyterlab(lab_page: Page, lab: Lab) -> None:
    """What ranks print, return and raise in a notebook is readable as it is, and no script of it runs."""
    page = lab_page
    notebook = NotebookPage(page, lab, lab.write(*CELLS))
    notebook.start_kernel()
    try:
        for index in range(len(CELLS) - 1):
            notebook.run_cell(index)
        for index in (1, 2, 3):
            says(page.locator(".jp-Cell").nth(index).locator(".jp-OutputArea"), NAME)
        assert page.locator(".jp-OutputArea-output [onerror], .jp-OutputArea-output [onload]").count() == 0
        assert page.locator(".jp-OutputArea-output script").count() == 0
        assert page.evaluate(f"() => window.{FLAG} === undefined")
    finally:
        notebook.run_cell(len(CELLS) - 1)
        notebook.shut_down()
