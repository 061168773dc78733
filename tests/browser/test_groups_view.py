"""Collectives by group in Chromium: a recording without a model opens with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.browser.bare_page import BarePage
from tests.unit.timeline.test_group_collectives import _timeline

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_recording_without_a_model_opens_with_its_groups(browser: Browser) -> None:
    """Sentences, legend, a tooltip, and the table of groups."""
    page = browser.new_page()
    made = BarePage(page, _timeline())
    try:
        made.says(".ddp-groups .ddp-summary", "rank 1 was last in 100 %")
        assert made.first_row(".ddp-groups table")[0] == "mesh dp (ranks 0–1)"
        assert "waiting for peers" in page.locator(".ddp-groups .ddp-legend").inner_text()
        page.locator(".ddp-groups .ddp-chart canvas").hover(position={"x": 215, "y": 30})  # rank 0's first operation
        made.says(".ddp-groups .ddp-tip", "all_reduce")
    finally:
        made.close()
        page.close()
