"""Cells in the background in a real JupyterLab: a line says how far each is and how it ended; a button stops it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbconvert import MarkdownExporter
from playwright.sync_api import Locator

from tests.benchmarks.browser import Lab, NotebookPage
from tests.browser.conftest import Shared
from tests.browser.waiting import has, press, says
from tests.waiting import wait_until

START = "%load_ext ddp_lab\n%cluster start -n 2 --backend gloo"
TRAIN = """%%distributed --no-wait --name train
import os, time
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(100_000):
    model(torch.randn(4, 8)).sum().backward()
    time.sleep(0.01)
    if step % 10 == 0: print("step", step)
"""
FAIL = "%%distributed --no-wait --name fails\nif rank == 1:\n    raise ValueError('end of data')\ndist.barrier()"
COUNT = """%%distributed --no-wait --name counts
import os, time
for line in range(100_000):
    print("line", line)
    time.sleep(0.02)
    if os.path.exists({gate!r}): break
"""
AT_END = "(box) => box.scrollHeight > box.clientHeight && box.scrollTop + box.clientHeight >= box.scrollHeight - 2"
GONE = "%%distributed --no-wait --name gone\nimport time; time.sleep(600)"


@pytest.fixture(scope="module")
def notebook(shared: Shared, lab: Lab, gate: Path) -> Iterator[NotebookPage]:
    """A notebook with two ranks."""
    with shared.notebook(START, TRAIN, FAIL, COUNT.format(gate=str(gate)), GONE, run=1) as opened:
        yield opened
        gate.touch()


def _line(notebook: NotebookPage, cell: int) -> Locator:
    return notebook.page.locator(".jp-CodeCell").nth(cell).locator(".ddp-background")


def _saved(notebook: NotebookPage, cell: int) -> str:
    """What a reader without a kernel sees of the cell's line."""
    outputs = notebook.save().cells[cell].outputs
    return next(
        one.data["text/plain"] for one in outputs if "ddp-lab-static" in one.get("data", {}).get("text/html", "")
    )


def test_a_cell_that_is_stopped(notebook: NotebookPage) -> None:
    """State, time and step go on by themselves; the button ends the cell, and page and saved notebook say so."""
    notebook.run_cell(1)
    line = _line(notebook, 1)
    says(line, "train [2]: running for ")

    def step() -> int:
        found = re.search(r"step ([\d,]+)", line.inner_text())
        return int(found[1].replace(",", "")) if found else 0

    first = wait_until(step, "a step")
    wait_until(lambda: step() > first, "another step")
    press(line.get_by_role("button", name="■ Stop"))
    says(line, "train [2]: ■ interrupted after ")
    assert not line.get_by_role("button").is_visible()
    wait_until(lambda: _saved(notebook, 1).startswith("train [2]: ■ interrupted after "), "the saved line")


def test_a_cell_that_fails(notebook: NotebookPage) -> None:
    """The line names the rank that failed first; below is the block that a cell shows which is waited for."""
    notebook.run_cell(2)
    says(_line(notebook, 2), "fails [3]: ✗ rank 1 failed after ")
    error = notebook.page.locator(".jp-CodeCell").nth(2).locator("[data-mime-type='application/vnd.jupyter.stderr']")
    says(error, "ValueError: end of data")
    says(error, "rank 0 waited for rank 1 in barrier")
    wait_until(lambda: "error" in [one.output_type for one in notebook.save().cells[2].outputs], "the saved block")
    assert re.match(r"fails \[3\]: ✗ rank 1 failed after .* ValueError: end of data", _saved(notebook, 2))


def test_an_exported_notebook(notebook: NotebookPage) -> None:
    """In Markdown text is text: no escape sequences, no styles; what cells printed and how they ended is there."""
    text, _ = MarkdownExporter().from_notebook_node(notebook.save())
    assert not re.search(r"\x1b|<style|display: none", text)
    for words in ("ranks 0–1 │ step", "train [2]: ■ interrupted after ", "rank 0 waited for rank 1 in barrier"):
        assert words in text


def test_a_page_that_is_loaded_again(notebook: NotebookPage, gate: Path) -> None:
    """There the widget shows the end of the text, which goes on, and how the cell ends.

    In the page that has run the cell the text has a box of a bounded height, which shows its end.
    """
    notebook.run_cell(3)
    says(_line(notebook, 3), "counts [4]: running for ")
    box = notebook.page.locator(".jp-CodeCell").nth(3).locator(".jp-RenderedText")
    wait_until(lambda: "line 40" in box.inner_text(), "more text than the box is high")
    wait_until(lambda: box.evaluate(AT_END), "the end of the text in view")
    assert box.bounding_box()["height"] <= 320  # type: ignore[index]
    assert not notebook.page.locator(".ddp-late-text").locator("visible=true").count()
    notebook.save()
    notebook.reload()
    text = _line(notebook, 3).locator(".ddp-late-text")
    has(text, 1)
    wait_until(lambda: "line " in text.inner_text(), "the end of the text")
    before = text.inner_text()
    wait_until(lambda: text.inner_text() != before, "more text")
    gate.touch()
    says(_line(notebook, 3), "counts [4]: ✓ done in ")


def test_a_kernel_that_is_restarted(notebook: NotebookPage) -> None:
    """The line says that the connection to the cell was lost, and offers no button."""
    notebook.run_cell(4)
    line = _line(notebook, 4)
    says(line, "gone [5]: running for ")
    notebook.command("kernelmenu:restart")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    says(line, "gone [5]: connection lost. The kernel was restarted; its ranks ended with it.")
    assert not line.get_by_role("button").is_visible()
    notebook.wait_for_status("idle")
