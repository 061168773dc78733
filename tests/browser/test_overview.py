"""The overview and the strip of all steps: what they say, and where they lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from ddp_lab.timeline.timeline import Timeline
from tests.browser.bare_page import BarePage, bare_page
from tests.browser.waiting import step_of
from tests.training_events import Training

STEPS = 1_500  # more than the timeline keeps whole, and three times what a page keeps
_CHOSEN = ".ddp-strip-line"


@pytest.fixture(scope="module")
def shown(browser: Browser) -> Iterator[BarePage]:
    """A dashboard of a long run on two ranks, rank 1 of which is late in bucket 2, with a loss."""
    timeline, training = Timeline(), Training(2, 4, parameters=2, forward_ms=2.0, delays={(1, 2): 4.0})
    for step in range(STEPS):
        training.feed(timeline, step, 10**12 + step * 20 * 10**6)
        if step % 10 == 0:
            at = 10**12 + step * 20 * 10**6
            value = {"type": "value", "name": "loss", "value": 1000.0 - step / 2, "at_ns": at, "session": 1}
            timeline.describe(0, value)
    with bare_page(browser, timeline, height=1000) as made:
        made.until(lambda: made.page.locator(".ddp-strip").is_visible(), "the strip")
        yield made


@pytest.fixture(autouse=True)
def whole(shown: BarePage) -> None:
    """Begins with all steps, and the overview."""
    shown.page.locator(".ddp-strip-plot").press("Escape")
    shown.until(shown.page.get_by_role("button", name="All steps").is_disabled, "all steps")
    shown.open("Overview")


def _drag(shown: BarePage, begin: float, end: float) -> None:
    """Drags over a part of the strip."""
    box = shown.page.locator(".ddp-strip-plot").bounding_box()
    for share, act in ((begin, shown.page.mouse.down), (end, shown.page.mouse.up)):
        shown.page.mouse.move(box["x"] + share * box["width"], box["y"] + 20, steps=3)
        act()


def test_the_first_tab_sums_up(shown: BarePage) -> None:
    """A sentence, a bar of the parts whose numbers are those of the table of steps, the finding, and the loss."""
    assert shown.says(".ddp-lead", "A step takes 20.0 ms (median of steps 1,400–1,499); ")
    assert "Rank 1 falls behind" in shown.says("ol.ddp-findings", "layers.2.weight")
    assert "255" in shown.says(".ddp-overview-facts", "loss")
    page = shown.page
    page.get_by_label("by rank").check()
    page.locator(".ddp-overview .ddp-twin summary").click()
    rows = page.locator(".ddp-overview .ddp-twin tbody tr")
    shown.until(lambda: rows.count() == 3, "a row for each rank")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["a step", "rank 0", "rank 1"]
    total, *parts = (float(cell) for cell in rows.first.locator("td").all_inner_texts())
    assert sum(parts) == pytest.approx(total, rel=0.03)
    page.get_by_label("by rank").uncheck()


def test_names_of_numbers_are_not_wrapped(shown: BarePage) -> None:
    """Also where JupyterLab's own rule for lists of terms holds, which is for a page without columns."""
    shown.page.add_style_tag(content="dt { font-weight: bold; float: left; width: 20%; padding: 0 } dd { width: 80% }")
    shown.page.evaluate("document.querySelector('.ddp-overview-facts dt').textContent = 'memory of a rank'")
    name, value = (shown.page.locator(f".ddp-overview-facts {one}").first.bounding_box() for one in ("dt", "dd"))
    assert name["height"] < 1.5 * 18
    assert name["width"] > 90
    assert value["x"] >= name["x"] + name["width"]


def test_a_finding_leads_to_its_place(shown: BarePage) -> None:
    """*Show me* opens the timeline at the finding's bucket and rank, in the step in which the others waited longest."""
    shown.says("ol.ddp-findings", "Rank 1 falls behind")
    shown.page.locator("ol.ddp-findings").get_by_role("button", name="Show me").first.click()
    shown.says(".ddp-detail", "Bucket 2 in step ")
    wait = shown.page.locator(".ddp-sync-table tbody tr").nth(2).locator("td").nth(5)
    shown.until(lambda: wait.inner_text().endswith("for rank 1"), "the wait for rank 1")
    assert not shown.page.get_by_label("follow latest").is_checked()
    shown.page.get_by_label("close the details").click()
    shown.page.get_by_label("follow latest").check()
    shown.until(lambda: step_of(shown.page) == STEPS - 1, "the newest step")


def test_dragging_over_the_strip_chooses_steps_for_all_views(shown: BarePage) -> None:
    """Steps that the page no longer has are fetched, evenly spaced; sentence, charts, findings and selector are about
    them alone, until all steps are asked for again."""
    _drag(shown, 0.2, 0.4)
    first, last = 300, 600
    shown.says(_CHOSEN, "Chosen: the views show steps ")
    shown.until(lambda: first - 9 <= (step_of(shown.page) or 0) <= last + 9, "a step of those")
    shown.until(
        lambda: "A step takes" in (text := shown.page.locator(".ddp-lead").inner_text()) and "1,4" not in text, "it"
    )
    for tab, node in (("Overlap", ".ddp-overlap .ddp-summary"), ("Stragglers", ".ddp-stragglers .ddp-sentence")):
        shown.open(tab)
        about = shown.page.locator(node).first

        def these(about: Any = about) -> bool:
            text = about.inner_text()
            return "steps" in text and "1,4" not in text

        shown.until(these, f"{tab} of the chosen steps")
    shown.page.get_by_label("first step shown").fill("50")
    shown.page.get_by_label("first step shown").press("Enter")
    shown.says(_CHOSEN, "Chosen: the views show steps 50–")
    shown.page.locator(".ddp-strip-plot").focus()
    shown.page.keyboard.press("Escape")
    shown.until(lambda: step_of(shown.page) == STEPS - 1, "the newest step")
    assert shown.page.get_by_role("button", name="All steps").is_disabled()


def test_a_click_on_the_strip_chooses_a_step(shown: BarePage) -> None:
    """A click shows the nearest step that is kept; of a part that the page does not have, the steps around it."""
    shown.open("Timeline")
    box = shown.page.locator(".ddp-strip-plot").bounding_box()
    shown.page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 20)
    shown.until(lambda: abs((step_of(shown.page) or 0) - 0.9 * STEPS) < 8, "a step near it")
    assert "Chosen" not in shown.page.locator(_CHOSEN).inner_text()
    shown.page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 20)  # the page does not have that one
    shown.until(lambda: abs((step_of(shown.page) or 0) - 0.3 * STEPS) < 40, "a step near it")
    shown.page.get_by_label("follow latest").check()


def test_few_tabs_have_no_groups(bare: Callable[..., BarePage]) -> None:
    """Views that a reader named are tabs in one row; a single one has neither tabs nor groups."""
    made = bare(Training().trained(3), views=["overview", "overlap", "findings"])
    made.says(".ddp-tabs", "Overlap")
    titles = [one.partition(" (")[0] for one in made.page.locator(".ddp-tab").all_inner_texts()]
    assert titles == ["Overview", "Overlap", "Findings"]
