"""JupyterLab's visual debugger on a rank, in Chromium: the bug, the gutter, the highlighted line, the panel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page

from tests.benchmarks.browser import Lab, NotebookPage
from tests.waiting import wait_until

START, CHOOSE, CELL = 0, 1, 2
_CODE = """%%distributed
x = torch.full((2,), 10.0 * rank)
y = rank + 100
dist.all_reduce(x)
print("sum", x.tolist())"""
_LINE = 3  # of the breakpoint, in the notebook's cell
_VARIABLES = """() => [...document.querySelectorAll('.jp-DebuggerVariables-body .jp-DebuggerVariables-name')]
    .map((name) => [name.textContent, name.parentElement.querySelector('.jp-DebuggerVariables-detail')?.textContent])"""


class Debugged:
    """A notebook whose second cell chooses a rank, and whose third one runs on the ranks."""

    def __init__(self, page: Page, lab: Lab, ranks: int) -> None:
        name = lab.write(f"%load_ext ddp_lab\n%cluster start -n {ranks}", "%cluster debug 1", _CODE, "%cluster stop")
        self.page, self.notebook = page, NotebookPage(page, lab, name)
        self.notebook.start_kernel()
        self.notebook.run_cell(START)

    def choose(self, rank: int | str) -> None:
        """Runs `%cluster debug`."""
        self.page.evaluate(
            "([index, text]) => { const { content } = window.jupyterapp.shell.currentWidget;"
            " content.widgets[index].model.sharedModel.setSource(text) }",
            [CHOOSE, f"%cluster debug {rank}"],
        )
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

    def one_round(self, rank: int, total: float) -> None:
        """The cell stops on this rank, whose values are those of its lines; a step, and all ranks go on to the end."""
        self.notebook.run_cell(CELL, wait=False)
        self.wait_for_stop(_LINE)
        wait_until(lambda: self.variables().get("rank") == str(rank), "the rank's values")
        self.notebook.command("debugger:next")
        self.wait_for_stop(_LINE + 1)
        wait_until(lambda: self.variables().get("y") == str(rank + 100), "the value that the step made")
        self.notebook.command("debugger:continue")
        wait_until(lambda: self.notebook.executions(CELL), "the end of the cell")
        assert f"sum [{total}, {total}]" in self.output()

    def end(self) -> None:
        """Stops cluster and kernel."""
        if self.page.locator(".jp-DebuggerBugButton[aria-pressed='true']").count():
            self.press_the_bug(on=False)
        self.notebook.run_cell(CELL + 1)
        self.notebook.shut_down()

    def output(self) -> str:
        """What the cell has printed."""
        return self.cell().locator(".jp-OutputArea").inner_text()


@pytest.fixture
def debugged(lab_page: Page, lab: Lab) -> Iterator[Debugged]:
    """Two ranks."""
    made = Debugged(lab_page, lab, 2)
    try:
        yield made
    finally:
        made.end()


def test_break_step_inspect_and_go_on(debugged: Debugged) -> None:
    """Rank 1 stops at the breakpoint, its line is lit, the panel has its values; a step, then all ranks end.

    Pressing the bug while rank 1 is stopped lets the cell end on all ranks as well, and no cell stops any more.
    """
    debugged.choose(1)
    debugged.press_the_bug(on=True)
    debugged.press_the_gutter(_LINE)
    debugged.one_round(1, 10.0)
    debugged.notebook.run_cell(CELL, wait=False)
    debugged.wait_for_stop(_LINE)
    debugged.press_the_bug(on=False)
    wait_until(lambda: debugged.notebook.executions(CELL), "the end of the cell")
    assert "sum [10.0, 10.0]" in debugged.output()
    debugged.notebook.run_cell(CELL)
    assert "sum [10.0, 10.0]" in debugged.output()


@pytest.mark.soak
def test_twenty_rounds_on_four_ranks(lab_page: Page, lab: Lab) -> None:
    """Break, inspect, step, continue, on one of four ranks after the other: it works 20 times of 20."""
    debugged = Debugged(lab_page, lab, 4)
    try:
        debugged.choose(0)
        debugged.press_the_bug(on=True)
        debugged.press_the_gutter(_LINE)
        for round_ in range(20):
            rank = round_ % 4
            debugged.choose(rank)
            debugged.one_round(rank, 60.0)
            print(f"round {round_ + 1} of 20, rank {rank}: works", flush=True)
    finally:
        debugged.end()
