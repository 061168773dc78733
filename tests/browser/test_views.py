"""The views in a bare page of Chromium, with the real widget behind them: what a reader sees, clicks and types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ddp_lab.widgets
from ddp_lab.client.timeline import Timeline
from ddp_lab.events import DTYPE, Batch, Kind
from ddp_lab.insight.link_model import LinkModel
from ddp_lab.widgets import esm, view_data
from ddp_lab.widgets.model_map import map_cells
from tests.browser.bare_page import DARK, BarePage
from tests.training_events import Training

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STEPS = 30
PICTURES = ("Overlap", "Stragglers", "Buckets")
_COLOURS = """() => {
  const canvas = document.querySelector('.ddp-lab canvas');
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 250) seen.add(data.slice(at, at + 3).join());
  return [...seen];
}"""
_PICTURE = "() => document.querySelector('.ddp-lab canvas').toDataURL()"


def training_of(
    ranks: int = 2, buckets: int = 3, steps: int = STEPS, max_steps: int = 1_000, **options: Any
) -> Timeline:
    """Steps 20 ms apart, each with a forward; rank 1 is late in bucket 1."""
    made = Timeline(max_steps)
    training = Training(ranks, buckets, forward_ms=2.5, delays={(1, 1): 4.0}, **options)
    for step in range(steps):
        training.feed(made, step, 10**12 + step * 20 * 10**6)
        if step == 0:
            made.describe(0, {"type": "mark", "index": 0, "name": "optimizer", "session": 1})
        event = np.zeros(1, DTYPE)
        event["sequence"], training._sequence[0] = training._sequence[0], training._sequence[0] + 1
        event["host_ns"], event["kind"] = 10**12 + step * 20 * 10**6 + 14 * 10**6, Kind.MARK
        event["reducer"] = event["step"] = event["bucket"] = -1
        made.extend(Batch(0, 1, int(event["sequence"][0]), 0, event))
    return made


@pytest.fixture(scope="module")
def shown(browser: Browser) -> Iterator[BarePage]:
    """A dashboard of thirty steps, for tests that look, click and put back what they changed."""
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    link = LinkModel(latency_ns=1e5, ns_per_byte=0.4)
    made = BarePage(context.new_page(), training_of(), link=lambda: link, event_cost=lambda: 34.0)
    made.until(lambda: len(_titles(made)) == len(made.dashboard.tabs), "the tabs")
    yield made
    made.close()
    context.close()


def _titles(page: BarePage) -> list[str]:
    """What the tabs are called, without the numbers beside it."""
    return [one.partition(" (")[0] for one in page.page.locator(".ddp-tab").all_inner_texts()]


@pytest.mark.parametrize("tab", PICTURES)
def test_each_tab_draws(shown: BarePage, tab: str) -> None:
    """A tab's picture is there when it is opened, in several colours, with a label in words and a table beside it."""
    shown.open(tab)
    canvas = shown.page.locator(".ddp-main canvas")
    shown.until(lambda: len(shown.page.evaluate(_COLOURS)) > 3, "a drawing")
    assert canvas.count() == 1
    assert len(canvas.get_attribute("aria-label") or "") > 30
    assert shown.page.locator(".ddp-main table").count() >= 1
    shown.open("Timeline")


def test_tabs_by_keyboard(shown: BarePage) -> None:
    """The arrow keys open the next tab and the first after the last; one tab is reached with the Tab key."""
    page = shown.page
    titles = _titles(shown)
    assert titles[0] == "Timeline"
    page.get_by_role("tab", name="Timeline").focus()
    for wanted in (*titles[1:], titles[0]):
        page.keyboard.press("ArrowRight")
        assert page.locator("[role=tab][aria-selected=true]").inner_text().startswith(wanted)
        assert page.locator("[role=tab][tabindex='0']").count() == 1


def test_overlap_is_that_of_the_timeline(shown: BarePage) -> None:
    """The overlap view's numbers, from what was sent to the browser, are those of `Timeline.steps`."""
    shown.open("Overlap")
    page = shown.page
    page.locator(".ddp-overlap summary").click()
    cells = shown.first_row(".ddp-overlap")
    found = view_data.breakdown(shown.dashboard._timeline)
    wanted = [found.total, found.other, found.forward, found.alone, found.hidden, found.exposed]
    assert int(cells[0]) == STEPS - 1
    for text, values in zip(cells[1:7], wanted, strict=True):
        assert float(text) == pytest.approx(values[-1], abs=0.06)
    assert cells[7] == f"{100 * found.efficiency[-1]:.0f} %"
    page.locator(".ddp-overlap summary").click()
    shown.open("Timeline")


def test_a_column_chooses_its_step(shown: BarePage) -> None:
    """By keyboard a reader goes from column to column, hears the numbers, and chooses a step."""
    shown.open("Overlap")
    page = shown.page
    shown.until(lambda: page.locator(".ddp-overlap tbody tr").count() == STEPS, "a column for each step")
    page.locator(".ddp-overlap .ddp-chart").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    said = shown.says(".ddp-voice", f"step {STEPS - 2}, step ")
    assert "exposed communication" in said
    page.keyboard.press("Enter")
    shown.until(
        lambda: page.evaluate("() => document.querySelector('.ddp-lab').statistics().step") == STEPS - 2, "the step"
    )
    page.get_by_label("follow latest").check()
    shown.open("Timeline")


def test_the_straggler_is_named(shown: BarePage) -> None:
    """The stragglers' view names rank, layer, class and cost, and marks the cell where the others wait."""
    shown.open("Stragglers")
    page = shown.page
    row = page.locator(".ddp-places tbody tr")
    shown.until(lambda: row.count() == 1, "the late place")
    text = row.inner_text()
    assert text.startswith("1")
    assert "layers.2.weight (bucket 1)" in text
    assert "persistent" in text
    assert "% of the step" in text
    page.locator(".ddp-stragglers .ddp-chart").focus()
    for key in ("Home", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    said = shown.says(".ddp-voice", "rank 1 · bucket 1, waited for alone")
    assert float(said.split()[-2]) > 2
    shown.open("Timeline")


def test_the_map_opens_a_bucket(shown: BarePage) -> None:
    """A click on a parameter opens its bucket: its parameters, and when each gradient was ready on each rank."""
    shown.open("Buckets")
    page = shown.page
    shown.says(".ddp-buckets .ddp-summary", "every parameter is used")
    chart = page.locator(".ddp-buckets .ddp-chart")
    chart.click(position={"x": 30, "y": 34 * 2 + 60})
    detail = page.locator(".ddp-detail")
    shown.until(lambda: detail.locator("canvas").count() == 1, "the gradients' times")
    assert detail.get_by_role("heading").inner_text().startswith("Bucket 0 in step")
    ready = [float(row.split("\t")[-1]) for row in detail.locator("table").first.locator("tbody tr").all_inner_texts()]
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] < 6
    page.get_by_label("close the bucket's details").click()
    shown.until(lambda: not detail.is_visible(), "the end of the details")
    shown.open("Timeline")


def test_findings_in_words(shown: BarePage) -> None:
    """The findings are listed with evidence, remedy and gain; the tab says how many there are."""
    shown.open("Findings")
    page = shown.page
    items = page.locator("ol.ddp-findings li")
    shown.until(lambda: items.count() >= 1, "a finding")
    assert "layers.2.weight" in page.locator("ol.ddp-findings").inner_text()
    shown.says(".ddp-tabs", f"Findings ({items.count()})")
    shown.open("Timeline")


def test_several_steps_and_the_whole_step(shown: BarePage) -> None:
    """Steps lie over each other or in a row; the whole step shows the forward, and each choice changes the picture."""
    page = shown.page
    seen = [page.evaluate(_PICTURE)]

    def changed() -> bool:
        now = page.evaluate(_PICTURE)
        return now not in seen and not seen.append(now)

    mode = page.get_by_label("steps shown")
    for choice in ("over5", "row3", "one"):
        mode.select_option(choice)
        if choice != "one":
            shown.until(changed, choice)
    page.get_by_label("whole step", exact=True).check()
    shown.until(changed, "the whole step")
    page.get_by_label("whole step", exact=True).uncheck()
    shown.until(lambda: page.evaluate(_PICTURE) == seen[0], "the first picture")


def test_a_range_of_time_is_brushed(shown: BarePage) -> None:
    """A drag along the time axis shows that range, and 0 the whole step again."""
    page = shown.page
    before = page.evaluate(_PICTURE)
    box = page.locator(".ddp-timeline canvas").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] - 12
    page.mouse.move(box["x"] + 200, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, y, steps=3)
    page.mouse.up()
    shown.until(lambda: page.evaluate(_PICTURE) != before, "a zoomed picture")
    page.mouse.move(5, 5)
    page.keyboard.press("0")
    shown.until(lambda: page.evaluate(_PICTURE) == before, "the whole step")


def test_sync_is_compared_with_the_link(shown: BarePage) -> None:
    """Gradient sync shows both bandwidths and the share of what the measured link allows."""
    cells = shown.first_row(".ddp-sync-table")
    assert float(cells[4]) == pytest.approx(float(cells[3]), rel=0.02)  # two ranks: 2 (n - 1) / n = 1
    share = (1e5 * 2 + 0.4 * 2**20) / (float(cells[2]) * 1e6)
    assert float(cells[5].rstrip(" %")) == pytest.approx(100 * share, abs=1.5)
    shown.says(".ddp-limit", "Limit of the link: 2.5")


def test_small_rates_fit(browser: Browser) -> None:
    """Of buckets of 1 KiB the bandwidths are told in MB/s or kB/s, are right, and nothing of them is cut off."""
    timeline, training = Timeline(), Training(bucket_bytes=1024)
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    made = BarePage(context.new_page(), timeline)
    cells = made.page.locator(".ddp-sync-table tbody tr").first.locator("th, td")
    try:
        for step, (unit, factor, training.reduce_ms) in enumerate((("MB/s", 1e6, 0.3), ("kB/s", 1e3, 6.0))):
            training.feed(timeline, step, 10**12 + step * 10**9)
            made.until(lambda unit=unit: cells.count() == 8 and unit in cells.nth(3).inner_text(), unit)
            wanted = timeline.sync_columns(0)["bandwidth_gb_s"][timeline.sync_columns(0)["step"] == step][0] * 1e9
            for cell in (cells.nth(3), cells.nth(4)):
                number, its = cell.inner_text().split()
                assert (float(number) * factor, its) == (pytest.approx(wanted, rel=0.05), unit)
                assert cell.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    finally:
        made.close()
        context.close()


def test_it_states_its_own_overhead(shown: BarePage) -> None:
    """The line on the overhead has events a step, their measured cost, and the shares of kernel and page."""
    line = shown.page.locator(".ddp-overhead")
    shown.until(lambda: "in the page" in line.inner_text() and "in the kernel" in line.inner_text(), "both shares")
    assert "× 34 ns = " in line.inner_text()


def test_it_says_that_old_steps_are_thinned(browser: Browser) -> None:
    """Of a run that is longer than the timeline keeps, the view says which steps there are."""
    context = browser.new_context()
    made = BarePage(context.new_page(), training_of(steps=50, max_steps=16))
    line = made.page.locator(".ddp-overhead")
    try:
        made.until(lambda: "Old steps are thinned: of steps" in line.inner_text(), "the sentence")
        assert "are kept, all since 34." in line.inner_text()
    finally:
        made.close()
        context.close()


def test_dark_and_narrow(browser: Browser) -> None:
    """In the dark and 420 pixels wide nothing is wider than the page, and text on the canvas is light."""
    context = browser.new_context(viewport={"width": 420, "height": 800})
    made = BarePage(context.new_page(), training_of(8, 12, 8), theme=DARK)
    try:
        made.until(lambda: len(_titles(made)) == len(made.dashboard.tabs), "the tabs")
        for tab in _titles(made):
            made.open(tab)
            width = made.page.evaluate("() => document.documentElement.scrollWidth")
            assert width <= 420, tab
        made.open("Overlap")
        bright = [colour for colour in made.page.evaluate(_COLOURS) if min(map(int, colour.split(","))) > 150]
        assert bright
    finally:
        made.close()
        context.close()


# Counts the frames in which controls of the timeline are on the page.
_COUNT_FRAMES = """() => {
  window.frames_ = 0;
  const look = () => {
    window.frames_ += document.querySelector('[aria-label="time axis"]').checkVisibility();
    requestAnimationFrame(look);
  };
  look();
}"""


def test_a_view_alone(browser: Browser) -> None:
    """A single view has no tabs and at no moment controls of the timeline; before the first step it says what to do."""
    context = browser.new_context(viewport={"width": 900, "height": 800})
    timeline = Timeline()
    made = BarePage(context.new_page(), timeline, views=["overlap"])
    try:
        assert "train with" in made.page.locator(".ddp-empty").inner_text()
        made.page.evaluate(_COUNT_FRAMES)
        training = Training(2, 3, forward_ms=1.0)
        for step in range(3):
            training.feed(timeline, step, 10**12 + step * 10**7)
        made.says(".ddp-overlap", "Medians of the last 3 steps")
        assert not made.page.locator(".ddp-tabs").is_visible()
        assert made.page.evaluate("() => window.frames_") == 0
    finally:
        made.close()
        context.close()


_ASSIGNMENTS = {
    "three buckets": lambda: Training(2, 3).assignment(),
    "one bucket": lambda: Training(2, 1, 1).assignment(),
    "a deep model": lambda: _deep(),
}


def _deep() -> dict[str, Any]:
    names = [f"encoder.layers.{layer}.block.attention.{part}" for layer in range(3) for part in ("q.weight", "q.bias")]
    parameters = [{"index": index, "name": name, "bytes": 10 * index} for index, name in enumerate(names)]
    buckets = [{"bucket": 0, "parameters": [4, 5]}, {"bucket": 1, "parameters": [0, 1, 2, 3]}]
    return {"module": "Encoder", "parameters": parameters, "buckets": buckets}


@pytest.mark.parametrize("name", _ASSIGNMENTS)
@pytest.mark.parametrize("equal", [False, True])
def test_the_map_is_laid_out_as_the_svg(page: Page, name: str, equal: bool) -> None:
    """model_map.js makes the cells that model_map.py makes."""
    assignment = _ASSIGNMENTS[name]()
    text = (Path(ddp_lab.widgets.__file__).parent / "model_map.js").read_text()
    run = """async ([text, assignment, equal]) => {
      const {mapCells} = await import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
      return JSON.stringify(mapCells(assignment, {equal}));
    }"""
    got = json.loads(page.evaluate(run, [text, assignment, equal]))
    cells, depth = map_cells(assignment, equal=equal)
    assert got["depth"] == depth
    assert [one["path"] for one in got["cells"]] == [one.path for one in cells]
    for one, other in zip(got["cells"], cells, strict=True):
        for key, value in vars(other).items():
            assert one[key] == (pytest.approx(value) if isinstance(value, float) else value), (key, other)


def test_narrow_bars_are_joined(page: Page) -> None:
    """Bars narrower than a pixel become one per pixel column, of the part that fills most of it; wide ones stay."""
    assert "many_steps.js" in esm.MODULES
    text = (Path(ddp_lab.widgets.__file__).parent / "many_steps.js").read_text()
    run = """async (text) => {
      const {joinNarrow} = await import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
      const bar = (part, x, width) => ({part, x, width, row: 0, bucket: 0, y: 0, height: 5});
      const narrow = [bar(1, 5.0, 0.2), bar(2, 5.2, 0.5), bar(1, 5.7, 0.25), bar(3, 6.1, 0.3)];
      const bars = [bar(0, 0, 5), ...narrow, bar(0, 7, 3)];
      return joinNarrow(bars).map((one) => [one.part, one.x, one.width]);
    }"""
    assert page.evaluate(run, text) == [[0, 0, 5], [2, 5, 1], [3, 6, 1], [0, 7, 3]]
