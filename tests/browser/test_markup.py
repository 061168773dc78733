"""Names that would be markup, in Chromium: the dashboard shows them as text, no script runs."""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.bare_page import BarePage
from tests.security.markup import FLAG, NAME, training

# The findings' own bold gains are the only ones.
_STRANGE = """() => document.querySelectorAll(
    'body script, body img, body b:not(.ddp-gain > b), body [onload], body [onerror]').length"""


def test_names_are_text_in_every_tab(bare: Callable[..., BarePage]) -> None:
    """A class and parameters called `<script>…` are readable as such wherever the dashboard says them."""
    shown = bare(training())
    page = shown.page
    shown.until(lambda: shown.page.locator(".ddp-tab:visible").count(), "the tabs")
    said = {}
    for title in shown.titles():
        shown.open(title)
        shown.until(lambda: page.locator(".ddp-main").inner_text(), "something to read")
        said[title] = page.locator("body").inner_text()
        assert page.evaluate(_STRANGE) == 0, title
    shown.open("Stragglers")
    shown.says(".ddp-stragglers .ddp-numbers tbody", NAME)
    shown.open("Buckets")
    page.locator(".ddp-buckets .ddp-chart").click(position={"x": 30, "y": 34 * 2 + 60})
    shown.says(".ddp-detail", NAME)
    page.locator(".ddp-buckets .ddp-chart").hover(position={"x": 30, "y": 34 * 2 + 60})
    assert page.evaluate(_STRANGE) == 0
    assert page.evaluate(f"() => window.{FLAG} === undefined")
    assert any(NAME in text for text in said.values())
