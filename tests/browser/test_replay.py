"""Recordings in a bare page of Chromium: what is offered without ranks; a replay's bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from ddp_lab.protocol.events import Batch
from ddp_lab.timeline.recorded.player import Player
from ddp_lab.timeline.timeline import Timeline
from tests.browser.bare_page import BarePage, bare_page
from tests.browser.waiting import step_of
from tests.training_events import Training


@pytest.fixture
def replay(browser: Browser) -> Iterator[tuple[BarePage, list[float]]]:
    """A page that replays twenty steps 100 ms apart, and the time of day, which the test lets pass."""
    now = [0.0]
    player = Player(Training(forward_ms=2.0).trained(20, ms=100), speed=0.5, clock=lambda: now[0])
    with bare_page(browser, player.timeline, player=player) as made:
        yield made, now


@pytest.fixture
def recording(browser: Browser) -> Iterator[BarePage]:
    """A page of the views that `Timeline.dashboard` has for a recording of twenty steps."""
    recorded = Training(forward_ms=2.0).trained(20, ms=20)
    recorded.recorded = True
    with bare_page(browser, recorded) as made:
        yield made


def _shown(page: BarePage, step: int) -> None:
    page.until(lambda: step_of(page.page) == step, f"step {step}")


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
    page.until(
        lambda: page.dashboard.status["playback"]["playing"] and page.dashboard.status["playback"]["speed"] == 5,
        "the new speed",
    )
    now[0] += 0.21
    _shown(page, 12)
    now[0] += 60
    page.until(lambda: bar.get_by_role("button", name="Again").count(), "the end")
    _shown(page, 19)


_OF_RANKS = ("Compare gradients", "lab.", "Start monitoring", "Train a few")
_OF_RANKS += ("Run on the ranks", "Apply", "of the link", "of the limit")
_TITLES = (
    "() => [...document.querySelectorAll('.ddp-lab [title]')].filter((one) => one.offsetParent).map((one) => one.title)"
)


def test_a_recording_offers_nothing_of_ranks(recording: BarePage) -> None:
    """No tab has a button, words or a title about what only ranks can do; "Run it" says why it can't be pressed."""
    page = recording.page
    recording.open("Timeline")
    recording.until(lambda: page.locator(".ddp-sync-table tbody tr").count() == 3, "the table")
    page.locator(".ddp-sync-table tbody tr").first.click()
    recording.until(lambda: page.locator(".ddp-detail canvas").count(), "the details of a bucket")
    for tab in ("Overview", "Timeline", "Overlap", "Stragglers", "Buckets", "Findings", "What if", "Gradients"):
        recording.open(tab)
        recording.until(lambda: page.locator(".ddp-main > section").first.inner_text().strip(), tab)
        said = "\n".join([page.locator(".ddp-lab").inner_text(), *page.evaluate(_TITLES)])
        assert [words for words in _OF_RANKS if words in said] == [], tab
    recording.says(".ddp-gradients", "No step has been monitored. Call model.watch_gradients(every=10)")
    recording.open("What if")
    recording.says(".ddp-what-if-run", "There are no ranks to run it on")
    assert page.get_by_role("button", name="Run it").is_disabled()


def test_a_change_that_was_recorded_is_compared(recording: BarePage) -> None:
    """Steps before and after other buckets are compared in a recording, too: as what happened, without a form."""
    timeline, training = recording.dashboard._shown.timeline, Training(buckets=2, parameters=6, forward_ms=2.0)
    training._sequence = [10**6] * 2
    changed = {"generation": 2, "first_step": 20, "session": 1, "rebuilt": True}
    changed |= {"options": {"bucket_cap_mb_list": [1.5]}}
    for rank in range(2):
        timeline.describe(rank, training.assignment() | changed)
    for step in range(20, 40):
        for rank, events in enumerate(training.step(step, 10**12 + step * 20 * 10**6)):
            events["generation"] = 2
            timeline.extend(Batch(rank, 1, int(events["sequence"][0]), 0, events))
    recording.open("Buckets")
    recording.says(".ddp-verdict-line", "99 %")
    said = recording.says(".ddp-reconfigure", "Changes of buckets or comm hook during training")
    assert "cluster" not in said
    assert not recording.page.get_by_role("button", name="Apply").is_visible()


def test_collectives_need_ranks(bare: Callable[..., BarePage]) -> None:
    """Asked for by name, the view of collectives says that there are no ranks, and offers nothing to run."""
    made = bare(Timeline(), views=["collectives"])
    made.says(".ddp-collectives", "collectives need a running cluster")
    assert not made.page.locator(".ddp-collectives").get_by_role("button").count()


def test_a_step_that_was_chosen_is_forgotten(replay: tuple[BarePage, list[float]]) -> None:
    """After the replay has gone back, a step that has not happened is not shown, and before the first one none."""
    page, now = replay
    now[0] = 2.45
    _shown(page, 12)
    page.open("Overlap")
    page.page.get_by_label("step number").fill("10")
    page.page.get_by_label("step number").press("Enter")
    _shown(page, 10)
    page.dashboard.player.pause()
    page.dashboard.player.seek(0.35)
    _shown(page, 3)
    page.dashboard.player.seek(0.0)
    page.says(".ddp-empty", "The replay has not reached the first step")


def test_the_bar_lets_go(replay: tuple[BarePage, list[float]]) -> None:
    """A thumb that is moved away and back to where it was follows the replay again; so does the list of speeds."""
    page, now = replay
    slider = page.page.get_by_role("toolbar", name="replay").get_by_role("slider")
    page.dashboard.player.pause()
    page.until(lambda: page.dashboard.status["playback"]["playing"] is False, "the pause")
    page.pump()
    box = slider.bounding_box()
    (left, y), right = (box["x"] + 8, box["y"] + box["height"] / 2), box["x"] + box["width"] - 8
    mouse, asked = page.page.mouse, []
    page.dashboard._commands.on("player", asked.append)
    mouse.move(left, y)
    mouse.down()
    mouse.move(right, y)
    mouse.move(box["x"] - 20, y)
    mouse.up()
    page.until(lambda: asked, "the end of the move")
    assert asked == [{"type": "player", "position": 0}]
    page.dashboard._commands.on("player", page.dashboard.player.obey)
    page.dashboard.player.seek(0.95)
    now[0] += 1
    page.says(".ddp-played", "0.95 of 1.9")
    speed = page.page.get_by_label("speed of the replay")
    page.dashboard.player.speed = 0.03
    now[0] += 1
    page.until(lambda: speed.input_value() == "0.03", "a speed of its own")
    speed.select_option("1")
    page.until(lambda: page.dashboard.status["playback"]["speed"] == 1 and speed.input_value() == "1", "another one")
    speed.select_option("0.03")
    page.until(lambda: page.dashboard.status["playback"]["speed"] == 0.03, "the one of its own again")


def test_stopped_there_is_no_bar(replay: tuple[BarePage, list[float]]) -> None:
    """A dashboard that was stopped stays as it is: it offers nothing to play."""
    page, _ = replay
    bar = page.page.get_by_role("toolbar", name="replay")
    page.until(bar.is_visible, "the bar")
    page.dashboard.stop()
    page.until(lambda: not bar.is_visible(), "no bar")
