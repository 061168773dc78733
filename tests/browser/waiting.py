"""Waiting for what a page says: pages draw in frames of their own, some time after a click or a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def says(node: Locator, words: str, *, attribute: str = "") -> None:
    """Waits until the first such node, or its attribute, says these words."""
    node = node.first

    def text() -> str:
        return (node.get_attribute(attribute) or "") if attribute else node.inner_text()

    wait_until(lambda: words in text(), lambda: f"{words!r} in {node}; it says {text()!r}")


# Whether it was pressed; a node that is no longer in the page is not visible.
_PRESS = "(node) => { const can = node.checkVisibility() && !node.disabled; if (can) node.click(); return can }"


def press(button: Locator) -> None:
    """Waits until a button can be pressed, and presses it in the same task of the page, which may disable it soon."""
    wait_until(lambda: button.evaluate(_PRESS), f"a chance to press {button}")


def has(nodes: Locator, count: int) -> None:
    """Waits until there are so many such nodes."""
    wait_until(lambda: nodes.count() == count, f"{count} of {nodes}")


def step_of(page: Page) -> Any:
    """The number of the step that a dashboard shows; None before the first one."""
    return page.evaluate("() => document.querySelector('.ddp-lab')?.statistics().step")
