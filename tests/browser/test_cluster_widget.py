"""The cluster's panel in a real JupyterLab: ranks that train in the foreground, hang, die, and come back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page

from tests.benchmarks.browser import Lab, NotebookPage, open_tab, printed
from tests.browser.conftest import Shared
from tests.browser.waiting import has, press, says
from tests.waiting import wait_until

START = "import ddp_lab, json\nlab = ddp_lab.Cluster(2, backend='gloo').start()"
TRAIN = '''
try:
    lab.run("""
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(8, 8))
while True:
    model(torch.randn(4, 8)).sum().backward()
""", label="%%distributed [4]")
except ddp_lab.CellError as error:
    print(json.dumps([failure.name for failure in error.failures.values()]))
'''
PIDS = "print(json.dumps(lab.pids()))"
HIDDEN = """
import time
follows = lab.panel()._refresher
while follows.running: time.sleep(0.05)
print(json.dumps(follows.running))
"""
SLIDERS = """
lab.run('import ipywidgets; slider = ipywidgets.IntSlider(description=f"of rank {rank}", value=rank); slider')
"""
VALUES = """
from ddp_lab.output.board import SilentBoard
print(json.dumps(list(lab.run("slider.value", board=SilentBoard()).values.values())))
"""
STEPS = """
lab.run('''
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
if rank == 1: raise ValueError("end of data")
dist.barrier()
''')
"""
ANOTHER = "other = ddp_lab.Cluster(1, backend='gloo').start()"
CELLS = (START, "lab", TRAIN, PIDS, HIDDEN, "lab.stop()", SLIDERS, VALUES)
CELLS += (STEPS, "lab.dashboard()", ANOTHER, "other.stop()")
_RESTART = "async () => { await window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart() }"


@pytest.fixture(scope="module")
def notebook(shared: Shared, lab: Lab) -> Iterator[NotebookPage]:
    """A notebook with two ranks and their panel."""
    with shared.notebook(*CELLS, run=2) as opened:
        has(_rows(opened.page), 2)
        yield opened


def _rows(page: Page) -> Locator:
    return page.locator(".ddp-cluster-ranks tbody tr")


def _press(page: Page, name: str) -> None:
    press(page.locator(".ddp-cluster").get_by_role("button", name=name, exact=True))


def _pids(notebook: NotebookPage) -> dict[str, int]:
    notebook.run_cell(3)
    found: dict[str, int] = printed(notebook.save().cells[3])
    return found


def test_widgets_of_ranks(notebook: NotebookPage) -> None:
    """A slider made on each rank is shown under its rank's name, and moving one changes that rank's value alone."""
    notebook.run_cell(6)
    handles = notebook.page.locator(".noUi-handle")
    has(handles, 2)
    says(notebook.page.locator(".jp-OutputArea").nth(6), "of rank 1")
    handles.nth(1).focus()
    notebook.page.keyboard.press("ArrowRight")

    def moved() -> bool:
        notebook.run_cell(7)
        return bool(printed(notebook.save().cells[7]) == [0, 2])

    wait_until(moved, "rank 1's new value")


def test_buttons_while_a_cell_trains_in_the_foreground(notebook: NotebookPage) -> None:
    """Step and cell of each rank are shown; rejoin and restart say what to do first; a rank's button ends the cell."""
    page, status = notebook.page, notebook.page.locator(".ddp-cluster > .ddp-status").last
    notebook.run_cell(2, wait=False)
    says(_rows(page).nth(1), "runs %%distributed [4] for")

    def step() -> Any:
        text = _rows(page).first.locator("td").nth(6).inner_text().replace(",", "")
        return text.isdigit() and int(text)

    first = wait_until(step, "a step")
    wait_until(lambda: step() > first, "another step")
    _press(page, "Rejoin")
    says(status, "Ranks 0–1 are running a cell. Interrupt it or wait")
    _press(page, "Restart …")
    says(status, "The notebook is running a cell. Interrupt it")
    assert not page.get_by_role("alertdialog").is_visible()
    _press(page, "Interrupt rank 1")
    says(status, "Interrupt sent to rank 1")
    wait_until(lambda: notebook.executions(2), "the end of the cell")
    assert printed(notebook.save().cells[2])[0] == "KeyboardInterrupt"
    wait_until(lambda: "runs" not in "".join(_rows(page).all_inner_texts()), "ranks that run nothing")
    _press(page, "Rejoin")
    says(status, "variables kept")
    says(_rows(page).first, "idle")


def test_a_stopped_rank_and_a_dead_one(notebook: NotebookPage) -> None:
    """A paused process has a heartbeat that ages, in another colour; a killed one names its signal until a restart that
    was confirmed."""
    page, pids = notebook.page, _pids(notebook)
    heartbeat = _rows(page).nth(1).locator(".ddp-heartbeat")
    os.kill(pids["rank 1"], signal.SIGSTOP)
    says(_rows(page).nth(1), "stopped by SIGSTOP")
    says(heartbeat, "ddp-heartbeat-late", attribute="class")
    _press(page, "Rejoin")
    says(page.locator(".ddp-cluster > .ddp-status").last, "Rank 1 can't rejoin: no response")
    os.kill(pids["rank 1"], signal.SIGCONT)
    says(heartbeat, "ddp-heartbeat-good", attribute="class")
    os.kill(pids["rank 0"], signal.SIGKILL)
    says(_rows(page).first, "killed by SIGKILL (signal 9)")
    _press(page, "Restart …")
    says(page.get_by_role("alertdialog"), "all variables on the ranks are lost")
    _press(page, "Cancel")
    wait_until(lambda: not page.get_by_role("alertdialog").is_visible(), "no question")
    says(_rows(page).first, "killed")
    _press(page, "Restart …")
    _press(page, "Restart")
    says(page.locator(".ddp-cluster > .ddp-status").last, "variables are lost")
    says(_rows(page).first, "idle")
    assert not set(pids.values()) & {pid for name, pid in _pids(notebook).items() if name.startswith("rank")}


def test_a_hidden_panel_asks_nothing(notebook: NotebookPage) -> None:
    """Out of sight its thread ends; in sight again it goes on."""
    notebook.page.evaluate("() => { document.querySelector('.ddp-cluster').style.display = 'none' }")
    notebook.run_cell(4)
    assert printed(notebook.save().cells[4]) is False
    notebook.page.evaluate("() => { document.querySelector('.ddp-cluster').style.display = '' }")
    os.kill(_pids(notebook)["rank 1"], signal.SIGKILL)
    says(_rows(notebook.page).nth(1), "killed by SIGKILL")


def test_the_saved_notebook_keeps_the_table(notebook: NotebookPage) -> None:
    """A reader without a kernel sees the ranks as they were when the cluster was displayed."""
    live, kept = notebook.save().cells[1].outputs
    assert "application/vnd.jupyter.widget-view+json" in live.data
    assert "<td style='text-align:left'>idle</td>" in kept.data["text/html"]
    assert json.dumps(kept.data["text/plain"]).count("idle") == 2


def _sees(node: Locator, words: str) -> None:
    """Waits until such a node says these words, in view: what is not seen is not drawn."""
    node.locator("xpath=ancestor-or-self::*[contains(@class, 'ddp-lab')][1]").first.scroll_into_view_if_needed()
    says(node, words)


@pytest.mark.soak
def test_what_has_ended_says_so(notebook: NotebookPage) -> None:
    """The panel names the rank that failed. The dashboard says which picture is the last one when a rank is killed, the
    cluster stopped, another one started (which it shows after a click) and the kernel restarted; what has nobody left
    to ask is disabled, with the reason as its title."""
    page = notebook.page
    notebook.run_cell(8)
    _sees(page.locator(".ddp-cluster-head"), "1 failed")
    _sees(_rows(page).nth(1), "failed; the next cell rejoins")
    notebook.run_cell(9)
    line = page.locator(".ddp-life").last
    open_tab(page, "Step through")
    pause = page.get_by_role("button", name="Pause", exact=True)
    wait_until(pause.is_enabled, "a button that can be pressed")
    os.kill(_pids(notebook)["rank 0"], signal.SIGKILL)
    _sees(line, "Rank 0 was killed by SIGKILL (signal 9): this is the last state, of step 2, ")
    notebook.run_cell(5)
    _sees(line, "The cluster was stopped: this is the last state, of step 2, ")
    _sees(page.locator(".ddp-cluster"), "The cluster was stopped.")
    assert pause.is_disabled()
    assert pause.get_attribute("title") == "The cluster was stopped."
    notebook.run_cell(10)
    _sees(line, "another one is running")
    _sees(page.locator(".ddp-cluster"), "another one is running. Show it with ddp_lab.current_cluster()")
    press(page.get_by_role("button", name="Show the running cluster"))
    wait_until(lambda: not line.is_visible() and pause.is_enabled(), "a dashboard of the other cluster")
    assert pause.get_attribute("title") == "set these breakpoints (key p)"
    notebook.run_cell(11)
    page.evaluate(_RESTART)
    notebook.wait_for_status("idle")
    _sees(line, "The kernel was restarted. Start a cluster and run lab.dashboard()")
    assert pause.is_disabled()
    assert pause.get_attribute("title") == "The kernel was restarted."
    _sees(page.locator(".ddp-cluster .ddp-life"), "The kernel was restarted")
