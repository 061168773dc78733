"""JupyterLab's visual debugger on a rank, in Chromium: the bug, the gutter, the highlighted line, the panel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page

from tests.benchmarks.browser import Lab, NotebookPage
from tests.waiting import wait_until

START, CHOOSE, CELL, STOP = range(4)
_CODE = """%%distributed
x = torch.full((2,), 10.0 * rank)
y = rank + 100
dist.all_reduce(x)
print("sum", x.tolist())"""
_LINE = 3  # of the breakpoint, in the notebook's cell
_VARIABLES = """() => [...document.querySelectorAll('.jp-DebuggerVariables-body .jp-DebuggerVariables-name')]
    .map((name) => [name.textContent, name.parentElement.querySelector('.jp-DebuggerVariables-detail')?.textContent])"""


class Debugged:
    """A notebook whose second cell chooses rank 1, and whose third one runs on the ranks."""

    def __init__(self, page: Page, lab: Lab) -> None:
        name = lab.write("%load_ext ddp_lab\n%cluster start -n 2", "%cluster debug 1", _CODE, "%cluster stop")
        self.page, self.notebook = page, NotebookPage(page, lab, name)
        self.notebook.start_kernel()
        self.notebook.run_cell(START)
        self.notebook.run_cell(CHOOSE)

    def cell(self) -> Locator:
        """The cell that runs on the ranks."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(CELL)

    def press_the_bug(self, on: bool) -> None:
        """Turns the debugger on or off as a user does, and waits until JupyterLab says so."""
        self.page.locator(".jp-DebuggerBugButton").first.dispatch_event("click")  # a narrow toolbar hides it
        pressed = f".jp-DebuggerBugButton[aria-pressed='{'true' if on else 'false'}']"
        self.page.wait_for_selector(pressed, state="attached")

    def press_the_gutter(self, line: int) -> None:
        """Sets a breakpoint, and waits until JupyterLab shows it: then the debugger has it."""
        gutter = self.cell().locator(".cm-gutter.cm-breakpoint-gutter .cm-gutterElement")
        wait_until(lambda: gutter.count() > line, "the gutter")
        number = self.cell().locator(".cm-line").nth(line - 1).bounding_box()
        box = self.cell().locator(".cm-gutter.cm-breakpoint-gutter").bounding_box()
        self.page.mouse.click(box["x"] + box["width"] / 2, number["y"] + number["height"] / 2)
        self.cell().locator(".cm-breakpoint-icon").nth(1).wait_for()  # the first is a spacer

    def wait_for_stop(self, line: int) -> None:
        """Waits until a line of the cell is highlighted: this one."""
        highlighted = self.cell().locator(".jp-DebuggerEditor-highlight")
        highlighted.wait_for()
        wanted = _CODE.splitlines()[line - 1]
        wait_until(lambda: highlighted.first.text_content() == wanted, f"the highlight of {wanted!r}")

    def variables(self) -> dict[str, str]:
        """What the panel shows, by name."""
        found: list[list[str]] = self.page.evaluate(_VARIABLES)
        return dict(found)

    def end(self) -> None:
        """Stops cluster and kernel."""
        if self.page.locator(".jp-DebuggerBugButton[aria-pressed='true']").count():
            self.press_the_bug(on=False)
        self.notebook.run_cell(STOP)
        self.notebook.shut_down()

    def output(self) -> str:
        """What the cell has printed."""
        return self.cell().locator(".jp-OutputArea").inner_text()


@pytest.fixture
def debugged(lab_page: Page, lab: Lab) -> Iterator[Debugged]:
    """Two ranks."""
    made = Debugged(lab_page, lab)
    try:
        yield made
    finally:
        made.end()


def test_break_step_inspect_and_go_on(debugged: Debugged) -> None:
    """Rank 1 stops at the breakpoint, its line is lit, the panel has its values; a step, then all ranks end.

    Pressing the bug while rank 1 is stopped lets the cell end on all ranks as well, and no cell stops any more.
    """
    debugged.press_the_bug(on=True)
    debugged.press_the_gutter(_LINE)
    debugged.notebook.run_cell(CELL, wait=False)
    debugged.wait_for_stop(_LINE)
    wait_until(lambda: debugged.variables().get("rank") == "1", "the rank's values")
    debugged.notebook.command("debugger:next")
    debugged.wait_for_stop(_LINE + 1)
    wait_until(lambda: debugged.variables().get("y") == "101", "the value that the step made")
    debugged.notebook.command("debugger:continue")
    wait_until(lambda: debugged.notebook.executions(CELL), "the end of the cell")
    assert "sum [10.0, 10.0]" in debugged.output()
    debugged.notebook.run_cell(CELL, wait=False)
    debugged.wait_for_stop(_LINE)
    debugged.press_the_bug(on=False)
    wait_until(lambda: debugged.notebook.executions(CELL), "the end of the cell")
    assert "sum [10.0, 10.0]" in debugged.output()
    debugged.notebook.run_cell(CELL)
    assert "sum [10.0, 10.0]" in debugged.output()
