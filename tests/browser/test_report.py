"""The report in Chromium: without a network, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.training_events import Training
from tests.unit.dashboard.test_gradients_view import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """() => {
  const light = (c) => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const sheet = light(getComputedStyle(document.querySelector('.sheet')).backgroundColor);
  const of = (node, property) => {
    const own = light(getComputedStyle(node)[property]);
    return (Math.max(own, sheet) + 0.05) / (Math.min(own, sheet) + 0.05);
  };
  const words = [...document.querySelectorAll('.sheet p, .sheet summary, td, th, .gain')].map((n) => of(n, 'color'));
  const drawn = [...document.querySelectorAll('svg text:not(.on-heat)')].map((n) => of(n, 'fill'));
  return Math.min(...words, ...drawn);
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timeline = Training(ranks=3, buckets=5, parameters=4, delays={(1, 2): 12.0}).trained(30, ms=50)
    bad = {"kind": "NaN", "parameter": "layers.1.weight", "rank": 1}
    for step in range(0, 30, 2):
        norms = [[3.0 + rank, 4.0] for rank in range(3)]
        timeline.describe(0, watched(step, norms, [3.5, 4.0], nonfinite=bad if step == 20 else None))
    return timeline.report(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def opened(browser: Browser, report: Path) -> Any:
    """Opens the page offline with a colour scheme and width; collects what it asked for and complained about."""
    contexts, found = [], {"requests": [], "complaints": []}  # type: ignore[var-annotated]

    def open_page(scheme: str, width: int) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: found["requests"].append(request.url))
        page.on("console", lambda message: found["complaints"].append(message.text))
        page.on("pageerror", lambda error: found["complaints"].append(str(error)))
        page.goto(report.as_uri())
        return page

    yield open_page, found
    for context in contexts:
        context.close()


Opened = tuple[Callable[[str, int], "Page"], dict[str, list[str]]]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 400), ("dark", 400)])
def test_the_page_reads_everywhere(opened: Opened, report: Path, scheme: str, width: int) -> None:
    """One request, no complaint, no sideways scrolling of the page, and every text has a contrast of at least 4.5."""
    open_page, found = opened
    page = open_page(scheme, width)
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate(CONTRAST) >= 4.5
    assert found == {"requests": [report.as_uri()], "complaints": []}


def test_findings_come_first(opened: Opened) -> None:
    """The first section names the late rank and layer with a gain; figures follow, each with a name and a table."""
    page = opened[0]("light", 1100)
    headings = page.locator("h2").all_text_contents()
    assert headings[0] == "Findings"
    first = page.locator("ol.findings > li").first
    assert "Rank 1 falls behind at the gradient of layers.4.weight (bucket 2)" in first.inner_text()
    assert " %" in first.locator(".gain").inner_text()
    figures = page.locator("figure svg")
    assert figures.count() == 5
    assert page.locator("figure:not(.step) svg[role=img][aria-label]").count() == 4
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open] td").first.is_visible()


def test_watched_gradients_have_a_section(opened: Opened) -> None:
    """The norms of watched steps are drawn, told in words, and listed with where a NaN came from."""
    section = opened[0]("dark", 1100).locator("section", has_text="Gradients before and after averaging")
    assert "NaN in step 20: first in layers.1.weight on rank 1" in section.locator(".note").inner_text()
    assert section.locator("tbody tr").count() == 15
    section.locator("summary").click()
    assert section.locator("tbody tr").nth(10).inner_text().split("\t")[-1] == "NaN in layers.1.weight"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_late_cell_has_the_strongest_colour(opened: Opened, scheme: str) -> None:
    """In the waits for stragglers, rank 1's bucket 2 has a strong colour, as the caption says, and no cell before."""
    page = opened[0](scheme, 1100)
    section = page.locator("section", has_text="Waiting for stragglers")
    assert "the first cell of its row with a strong colour" in section.locator(".note").inner_text()
    opacity = page.locator("rect.heat").evaluate_all("(cells) => cells.map((c) => +getComputedStyle(c).fillOpacity)")
    assert len(opacity) == 15
    assert opacity[5 + 2] > 0.8
    assert max([*opacity[:7], *opacity[10:]]) < 0.2
