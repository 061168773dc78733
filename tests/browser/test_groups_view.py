"""Collectives by group, and parameter groups, in Chromium: a recording without a model opens with the former."""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.bare_page import BarePage
from tests.unit.timeline.test_group_collectives import _timeline
from tests.unit.timeline.test_parameter_groups import recorded
from tests.unit.timeline.test_player import recorded as of_replicas


def test_a_recording_without_a_model_opens_with_its_groups(bare: Callable[..., BarePage]) -> None:
    """Sentences, legend, a tooltip, and the table of groups."""
    made = bare(_timeline())
    page = made.page
    made.says(".ddp-groups .ddp-summary", "rank 1 was last in 100 %")
    assert made.first_row(".ddp-groups table")[0] == "mesh dp (ranks 0–1)"
    assert "in flight" in page.locator(".ddp-groups .ddp-legend").inner_text()
    page.locator(".ddp-groups .ddp-chart canvas").hover(position={"x": 215, "y": 30})  # rank 0's first operation
    made.says(".ddp-groups .ddp-tip", "all_reduce")


def test_parameter_groups(bare: Callable[..., BarePage]) -> None:
    """A step by group and rank, the sentence, a tooltip, the table. Without such a model there is no tab, and who asks
    for the view by its name is told why it is empty."""
    made = bare(recorded(late=6.0))
    page = made.page
    made.open("Parameter groups")
    made.says(".ddp-parameter_groups .ddp-summary", "Rank 1 is late in the forward of blocks.0, by 6.0 ms.")
    titles = page.get_by_text("Parameter groups", exact=True)
    assert [one.get_attribute("role") for one in titles.all() if one.is_visible()] == ["tab"]
    assert "all-reduce" not in page.locator(".ddp-parameter_groups table").inner_text()
    assert made.first_row(".ddp-parameter_groups table")[:2] == ["Net", "0"]
    assert "reduce-scatter" in page.locator(".ddp-parameter_groups .ddp-legend").inner_text()
    page.locator(".ddp-parameter_groups .ddp-chart canvas").hover(position={"x": 222, "y": 30})
    made.says(".ddp-parameter_groups .ddp-tip", "all-gather in the forward of Net")
    page.get_by_role("button", name="previous step").click()  # the step before
    made.says(".ddp-parameter_groups .ddp-summary", "Step 18.")
    made.open("Findings")
    made.says(".ddp-findings", "Rank 1 is late in the forward of blocks.0.")
    page.get_by_role("button", name="Show me").first.click()
    made.says(".ddp-parameter_groups .ddp-summary", "Step ")
    made.open("What if")
    made.says(
        ".ddp-what-if",
        "What if: a model with fully_shard has no buckets: how long its step would take can't be predicted",
    )
    made.open("Timeline")
    page.locator(".ddp-timeline canvas").hover(position={"x": 350, "y": 41})  # rank 0, the second lane
    made.says(".ddp-timeline .ddp-tip", "rank 0 · blocks.0")
    made.says(".ddp-timeline .ddp-tip", "reduce-scatter")
    assert page.locator(".ddp-left h4").inner_text().startswith("Parameter group timeline")
    assert "filling" not in page.locator(".ddp-left .ddp-legend").inner_text()
    head = page.locator(".ddp-sync-table thead").inner_text().split()
    assert [one for one in ("module", "reduce-scatter", "bucket", "bus", "limit") if one in head] == [
        *("module", "reduce-scatter")
    ]
    page.locator(".ddp-sync-table tbody tr").nth(1).click()
    made.says(".ddp-detail h4", "blocks.0 in step")
    made.says(".ddp-detail .ddp-summary", "parameter group of fully_shard")
    assert not page.locator(".ddp-detail canvas").count()  # no single gradient is recorded
    made.open("Stragglers")
    made.says(".ddp-stragglers", "launched a parameter group's reduce-scatter")
    made.open("Buckets")
    made.says(
        ".ddp-buckets .ddp-summary",
        "3 parameter groups of fully_shard, 2.93 KiB per step · in the order of their modules",
    )
    assert "unused" not in page.locator(".ddp-buckets .ddp-summary").inner_text()
    made = bare(of_replicas())
    made.open("Timeline")
    tabs = made.page.locator(".ddp-subtabs:visible .ddp-tab:visible")
    made.until(lambda: tabs.all_inner_texts() == ["Timeline", "Overlap"], "the tabs of replicas")
    tabs.last.press("End")
    made.says(".ddp-overlap .ddp-summary", "a step takes")
    made = bare(of_replicas(), views=["parameter_groups"])
    made.says(".ddp-parameter_groups .ddp-summary", "No model with fully_shard or replicate has been recorded yet.")
