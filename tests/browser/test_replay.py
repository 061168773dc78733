"""A replay in a bare page of Chromium: its bar plays, pauses, goes back and changes the speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ddp_lab.client.player import Player
from ddp_lab.client.timeline import Timeline
from tests.browser.bare_page import BarePage
from tests.training_events import Training

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_STATISTICS = "() => document.querySelector('.ddp-lab').statistics()"


@pytest.fixture
def replay(browser: Browser) -> Iterator[tuple[BarePage, list[float]]]:
    """A page that replays twenty steps 100 ms apart, and the time of day, which the test lets pass."""
    recorded, training, now = Timeline(), Training(forward_ms=2.0), [0.0]
    for step in range(20):
        training.feed(recorded, step, 10**15 + step * 100 * 10**6)
    player = Player(recorded, speed=0.5, clock=lambda: now[0])
    context = browser.new_context()
    made = BarePage(context.new_page(), player.timeline, player=player)
    yield made, now
    made.close()
    context.close()


def _shown(page: BarePage, step: int) -> None:
    page.until(lambda: page.page.evaluate(_STATISTICS)["step"] == step, f"step {step}")


def test_the_bar(replay: tuple[BarePage, list[float]]) -> None:
    """What is drawn is what had happened by the moment that the bar shows."""
    page, now = replay
    bar = page.page.get_by_role("toolbar", name="replay")
    now[0] = 1.05
    _shown(page, 5)
    page.says(".ddp-played", "0.53 of 1.9")  # half as fast as it was
    bar.get_by_role("button", name="Pause").click()
    page.until(lambda: bar.get_by_role("button", name="Play").count(), "the pause")
    now[0] += 60
    page.pump()
    page.says(".ddp-played", "0.53 of 1.9")
    bar.get_by_role("slider").evaluate("(one) => { one.value = 100; one.dispatchEvent(new Event('input')) }")
    bar.get_by_role("slider").evaluate("(one) => one.dispatchEvent(new Event('change'))")
    _shown(page, 1)
    bar.get_by_label("speed").select_option("5")
    bar.get_by_role("button", name="Play").click()
    page.until(lambda: page.dashboard.playback["playing"] and page.dashboard.playback["speed"] == 5, "the new speed")
    now[0] += 0.21
    _shown(page, 12)
    now[0] += 60
    page.until(lambda: bar.get_by_role("button", name="Again").count(), "the end")
    _shown(page, 19)
