"""The main job as a user starts it: `ddp-lab demo`."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from tests.benchmarks.browser import chromium, chromium_browser


def test_the_demo_sums_up_what_it_did(demo: tuple[str, Path]) -> None:
    """It prints the accuracy, the equality with torch's DDP and what the timeline shows, without colour codes."""
    printed, _ = demo
    assert "held-out accuracy: 9" in printed
    assert "bit-equal to torch's DDP: True; bit-equal on all ranks: True" in printed
    assert "of the communication overlapped" in printed
    assert "\x1b" not in printed


def test_the_executed_notebook_holds_its_outputs(demo: tuple[str, Path]) -> None:
    """The written notebook is valid, and every code cell of it has run without an error."""
    notebook = nbformat.read(demo[1] / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)


def test_the_page_needs_no_network(demo: tuple[str, Path]) -> None:
    """Chromium shows the page, timeline and figures included, and asks for nothing but the file itself."""
    if chromium() is None:
        message = "missing chromium, which shows the page (Debian: apt install chromium)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with chromium_browser() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((demo[1] / "quickstart.html").as_uri())
        page.wait_for_selector(".js-plotly-plot .bars, .js-plotly-plot .barlayer")
        text = page.inner_text("body")
        pictures = page.locator("svg").count()
        breaks = page.eval_on_selector(".jp-RenderedText pre", "pre => getComputedStyle(pre).wordBreak")
    assert [url for url in asked if url.startswith("http")] == []
    assert "held-out accuracy" in text
    assert pictures >= 3
    assert breaks == "normal"  # between words
