"""The dashboard in a real JupyterLab, fed with events in the kernel: states, controls, themes, reload, reopen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.benchmarks.browser import Lab, NotebookPage, open_tab, printed
from tests.browser.bare_page import BarePage
from tests.browser.conftest import Shared
from tests.browser.waiting import has, press, says, step_of
from tests.training_events import Training
from tests.waiting import wait_until

FEED = """
import json, time
from tests.training_events import Training
from ddp_lab.timeline.timeline import Timeline
from ddp_lab.dashboard.dashboard import Dashboard
timeline, training, steps = Timeline(), Training(2, 3, delays={(1, 1): 2.0}), iter(range(10**9))
asked = []
dashboard = Dashboard(timeline, request_inspection=lambda *question: asked.append(question))
def feed(number, rate=15):
    for _ in range(number):
        training.feed(timeline, next(steps))
        time.sleep(1 / rate)
"""
Open = Callable[..., BarePage]


@pytest.fixture(scope="module")
def lived(shared: Shared, lab: Lab, gate: Path) -> Iterator[NotebookPage]:
    """A notebook with an empty dashboard, which the tests go through one after the other until its kernel ends."""
    blocks = f"import os\nwhile not os.path.exists({str(gate)!r}): feed(1)\nanswered = len(asked)"
    cells = ("dashboard", "feed(20)", "feed(20)", blocks, "print(answered)")
    with shared.notebook(FEED, *cells, run=2) as opened:
        opened.page.wait_for_selector(".ddp-lab")
        open_tab(opened.page, "Timeline")
        yield opened
        gate.touch()


def _settled(page: Page) -> list[int]:
    """`_pixels` once nothing changes them any more: what was done before is drawn."""
    seen: list[list[int]] = []

    def same() -> bool:
        seen.append(_pixels(page))
        return len(seen) > 4 and all(each == seen[-1] for each in seen[-4:])

    wait_until(same, "a picture that stays")
    return seen[-1]


def _pixels(page: Page) -> list[int]:
    """The canvas's colours in one row of pixels through the first rank's header."""
    return page.evaluate(
        """() => {
          const canvas = document.querySelector('.ddp-timeline canvas');
          return [...canvas.getContext('2d').getImageData(0, 14, canvas.width, 1).data];
        }"""
    )


def _ink(page: Page) -> int:
    """Brightness, 0 to 255, of the most opaque pixel of the first rank's name on the canvas; -1 without a name."""
    return page.evaluate(
        """() => {
          const canvas = document.querySelector('.ddp-timeline canvas');
          const pixels = canvas.getContext('2d').getImageData(0, 2, 60, 16).data;
          let best = 0;
          for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] > pixels[best + 3]) best = at;
          return pixels[best + 3] ? pixels[best] : -1;
        }"""
    )


def test_says_what_to_do_before_the_first_step(lived: NotebookPage) -> None:
    """Without a recorded step the dashboard says how to get one, and draws no empty axes."""
    says(lived.page.locator(".ddp-empty"), "No step recorded yet")
    assert not lived.page.locator(".ddp-timeline canvas").is_visible()


def test_a_chosen_step_stays(lived: NotebookPage) -> None:
    """Choosing a step stops following; new steps arrive without changing what is shown."""
    page = lived.page
    lived.run_cell(2)
    wait_until(lambda: step_of(page) == 19, "step 19")
    page.get_by_role("spinbutton", name="step number").click(click_count=3)
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    wait_until(lambda: step_of(page) == 7, "step 7")
    lived.run_cell(3)
    wait_until(lambda: page.locator(".ddp-held").inner_text().endswith("39"), "the arrival of step 39")
    assert step_of(page) == 7
    page.get_by_label("follow latest").check()
    wait_until(lambda: step_of(page) == 39, "step 39")


def test_bars_by_pointer_and_keyboard(lived: NotebookPage) -> None:
    """Hovering shows a bucket's numbers; a click or Enter shows its parameters; the keys move between buckets."""
    page = lived.page
    canvas = page.locator(".ddp-timeline canvas")
    canvas.hover(position={"x": 300, "y": 44})
    tip = page.locator(".ddp-timeline .ddp-tip")
    says(tip, "step 39 · rank 0 · bucket 1")
    assert "waiting for peers (last: rank 1)" in tip.inner_text()
    assert "1.00 MiB, 4 parameters" in tip.inner_text()
    canvas.click(position={"x": 300, "y": 44})
    detail = page.locator(".ddp-detail")
    says(detail.get_by_role("heading"), "Bucket 1 in step 39")
    says(detail, "layers.2.weight")
    page.keyboard.press("Escape")
    wait_until(lambda: not detail.is_visible(), "the end of the details")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    says(page.locator(".ddp-voice"), "rank 1 · bucket 2")
    says(detail.get_by_role("heading"), "Bucket 2 in step 39")


def test_zoom_and_reset(lived: NotebookPage) -> None:
    """The plus key shortens the visible time, and 0 shows the whole step again."""
    page = lived.page
    page.locator(".ddp-scroll").focus()
    page.keyboard.press("0")
    whole = _settled(page)
    page.keyboard.press("+")
    wait_until(lambda: _pixels(page) != whole, "a zoomed picture")
    page.keyboard.press("0")
    wait_until(lambda: _pixels(page) == whole, "the whole picture")


def test_follows_the_theme(lived: NotebookPage) -> None:
    """The canvas's text is dark in the light theme and light in the dark one."""
    page = lived.page
    wait_until(lambda: 0 <= _ink(page) < 80, "dark text")
    lived.set_theme("JupyterLab Dark")
    try:
        wait_until(lambda: _ink(page) > 180, "light text")
    finally:
        lived.set_theme("JupyterLab Light")
    wait_until(lambda: 0 <= _ink(page) < 80, "dark text")


def test_draws_while_a_cell_blocks_and_answers_meanwhile(lived: NotebookPage, gate: Path) -> None:
    """While a cell blocks the kernel, steps are drawn and a button's message reaches the kernel."""
    page = lived.page
    lived.run_cell(4, wait=False)
    wait_until(lambda: step_of(page) >= 44, "the fifth step")
    press(page.get_by_role("button", name="Compare gradients"))
    wait_until(lambda: "requested" in page.locator(".ddp-verdict").inner_text(), "the kernel's answer to the button")
    assert lived.executions(4) is None, "the cell had ended before the answer"
    gate.touch()
    wait_until(lambda: lived.executions(4), "the end of the cell")
    lived.run_cell(5)
    assert printed(lived.save().cells[5]) > 0


def test_an_idle_kernel_is_left_alone_and_its_end_is_told(lived: NotebookPage, lab: Lab) -> None:
    """In view, a dashboard without news is no activity of its kernel, by which servers end those that nobody uses.

    That the kernel has ended is said. Reopened then, the notebook shows the last picture once, and no error.
    """
    page = lived.page
    kernel = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.id")

    def idle_for() -> float:
        (last,) = (one["last_activity"] for one in lab.kernels() if one["id"] == kernel)
        return (datetime.now(timezone.utc) - datetime.fromisoformat(last.replace("Z", "+00:00"))).total_seconds()

    line = page.locator(".ddp-life")
    wait_until(lambda: idle_for() > 4, "a kernel without activity")
    assert not line.is_visible()
    picture = page.locator("div[class^='ddp-lab-static-'] img")
    has(picture, 1)
    assert not picture.is_visible(), "the saved picture shows beside the live view"
    lived.save()
    last = step_of(page)
    lived.shut_down()
    says(line, f"The kernel has stopped: this is the last state, of step {last}")
    lived.reload()
    wait_until(lambda: picture.is_visible(), "the saved picture")
    assert page.locator(".ddp-lab").count() == 0
    assert "DigitsNet on 2 ranks" in (picture.get_attribute("alt") or "")
    for words in ("Error displaying widget", "Loading widget"):
        wait_until(lambda words=words: not page.get_by_text(words).is_visible(), f"the end of {words!r}")


def test_follows_the_model_that_trains(bare: Open) -> None:
    """A second model that begins to train is shown, until the reader chooses a model."""
    second = Training(2, 5, reducer=1)
    made = bare(timeline := Training().trained(3))
    models, rows = made.page.get_by_label("model"), made.page.locator(".ddp-sync-table tbody tr")
    made.open("Timeline")
    made.until(lambda: step_of(made.page) == 2, "step 2")
    assert not models.is_visible()
    for step in range(3):
        second.feed(timeline, step, 10**13 + step * 10**7)
    made.until(lambda: models.is_visible() and models.input_value() == "1", "the second model")
    made.until(lambda: rows.count() == 5, "its buckets")
    models.select_option("0")
    for step in range(3, 6):
        second.feed(timeline, step, 10**13 + step * 10**7)
    made.until(lambda: rows.count() == 3, "the chosen model's buckets")
    assert models.input_value() == "0"


def test_a_dashboard_whose_output_was_replaced_does_nothing_more(shared: Shared, lab: Lab) -> None:
    """Its cell has run again and shows another one: its thread ends, no cell's end keeps a picture of it, and it has no
    copy of the browser's script. Displayed once more, it follows again."""
    cells = (
        FEED,
        "dashboard",
        "made = globals().get('made', []) + [Dashboard(timeline)]\nmade[-1]",
        "while made[0]._refresher.running: time.sleep(0.05)\n"
        "saved = [one._saved_version for one in made]\nfeed(2)\n"
        "print(json.dumps([one._refresher.running for one in made]))",
        "newer = [one._saved_version > version for one, version in zip(made, saved)]\n"
        "print(json.dumps([*newer, made[0].status['life']['what'], made[0].kept, len(made[0]._esm) < 200]))",
        "made[0]",
        "feed(1)",
        "first, second = made\n"
        "running = [one._refresher.running for one in made]\n"
        "print(json.dumps([*running, first._saved_version >= second._saved_version, first.status['life']]))",
    )
    with shared.notebook(*cells, run=2) as opened:
        for cell in (2, 2, 3, 4, 5):
            opened.run_cell(cell)
        again = opened.page.locator(
            ".jp-Cell", has=opened.page.locator(".jp-InputArea", has_text=re.compile(r"made\[0\]\s*$"))
        )
        wait_until(lambda: again.locator(".ddp-main .ddp-lead").count(), "the first dashboard, drawn once more")
        for cell in (6, 7):
            opened.run_cell(cell)
        said = [printed(opened.save().cells[cell]) for cell in (3, 4, 7)]
        replaced = "The cell that showed this dashboard has run again"
        assert said == [[False, True], [False, True, replaced, {}, True], [True, True, True, {}]]


def test_many_ranks_and_buckets_scroll(bare: Open) -> None:
    """64 ranks of 50 buckets are drawn in a canvas of the view's size, and the rest is reached by scrolling."""
    made = bare(Training(64, 50, compute_ms=60).trained(2, ms=100))
    made.open("Timeline")
    made.until(lambda: step_of(made.page) == 1, "step 1")
    scroller = made.page.locator(".ddp-scroll")
    height, content = scroller.evaluate("(node) => [node.clientHeight, node.scrollHeight]")
    assert height < 600 < 9_000 < content
    picture = "() => document.querySelector('.ddp-timeline canvas').toDataURL()"
    first = made.page.evaluate(picture)
    scroller.evaluate("(node) => { node.scrollTop = 5000 }")
    made.until(lambda: made.page.evaluate(picture) != first, "a scrolled picture")
