"""The views in a bare page of Chromium, with the real widget behind them: what a reader sees, clicks and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from ddp_lab.analysis.step_parts import SPANS
from ddp_lab.control.collectives import DEFAULT_BYTES, choices
from ddp_lab.dashboard import bundle
from ddp_lab.dashboard.controls.collectives import CollectiveStage, no_ranks
from ddp_lab.dashboard.controls.stepping import _pauses
from ddp_lab.dashboard.paint.palette import PHASES
from ddp_lab.dashboard.views.model_map import cell_rows, map_cells
from ddp_lab.dashboard.views.overlap import breakdown
from ddp_lab.protocol.events import DTYPE, Batch, Kind
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.timeline.timeline import Timeline
from tests.browser.bare_page import DARK, BarePage, bare_page
from tests.training_events import Training
from tests.waiting import wait_until

STEPS = 30
Open = Callable[..., BarePage]
PICTURES = ("Overlap", "Stragglers", "Buckets")
_COLOURS = """() => {
  const canvas = document.querySelector('.ddp-main canvas');
  if (!canvas) return [];
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 250) seen.add(data.slice(at, at + 3).join());
  return [...seen];
}"""
_PREDICTS = """(limits) => {
  const {what_if, ...others} = window.model.data.facts;
  window.fromKernel({facts: {...others, what_if: {...what_if, limits}}}, []);
}"""
_PICTURE = "() => document.querySelector('.ddp-main canvas').toDataURL()"


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
def page_of_thirty_steps(browser: Browser) -> Iterator[BarePage]:
    link = CommModel(latency_ns=1e5, ns_per_byte=0.4)
    with bare_page(browser, training_of(), link=lambda: link, event_cost=lambda: 34.0) as made:
        made.until(lambda: made.page.locator(".ddp-tab:visible").count(), "the tabs")
        yield made


@pytest.fixture
def shown(page_of_thirty_steps: BarePage) -> BarePage:
    """A dashboard of thirty steps with the timeline open, for tests that look, click and put back what they changed."""
    page_of_thirty_steps.open("Timeline")
    return page_of_thirty_steps


@pytest.mark.parametrize("tab", PICTURES)
def test_each_tab_draws(shown: BarePage, tab: str) -> None:
    """A tab's picture is there when it is opened, in several colours, with a label in words and a table beside it."""
    shown.open(tab)
    canvas = shown.page.locator(".ddp-main canvas")
    shown.until(lambda: len(shown.page.evaluate(_COLOURS)) > 3, "a drawing")
    assert canvas.count() == 1
    assert len(canvas.get_attribute("aria-label") or "") > 30
    assert shown.page.locator(".ddp-main table").count() >= 1


def test_tabs_by_keyboard(shown: BarePage) -> None:
    """The arrow keys go from question to question, and from tab to tab of one; one of each row is reached with Tab."""
    page = shown.page
    shown.open("Overview")
    page.get_by_role("tab", name="Overview").focus()
    for wanted in ("How fast", "Who is late", "What to change", "Try it", "Look inside", "Overview"):
        page.keyboard.press("ArrowRight")
        assert page.locator("[aria-label=questions] [aria-selected=true]").inner_text().startswith(wanted)
        assert page.locator("[aria-label=questions] [tabindex='0']").count() == 1
    shown.open("Timeline")
    page.get_by_role("tab", name="Timeline").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".ddp-subtabs:visible [aria-selected=true]").inner_text() == "Overlap"


def test_overlap_is_that_of_the_timeline(shown: BarePage) -> None:
    """The overlap view's numbers, from what was sent to the browser, are those of `Timeline.steps`."""
    shown.open("Overlap")
    page = shown.page
    page.locator(".ddp-overlap summary").click()
    cells = shown.first_row(".ddp-overlap")
    found = breakdown(shown.dashboard._shown.timeline)
    wanted = [found.total, *(getattr(found, phase) for phase in PHASES)]
    assert int(cells[0]) == STEPS - 1
    for text, values in zip(cells[1:-1], wanted, strict=True):
        assert float(text) == pytest.approx(values[-1], abs=0.06)
    assert cells[-1] == f"{100 * found.efficiency[-1]:.0f} %"
    page.locator(".ddp-overlap summary").click()


def test_a_column_chooses_its_step(shown: BarePage) -> None:
    """By keyboard a reader goes from column to column, hears the numbers, and chooses a step."""
    shown.open("Overlap")
    page = shown.page
    page.locator(".ddp-overlap summary").first.click()
    shown.until(lambda: page.locator(".ddp-overlap .ddp-twin tbody tr").count() == STEPS, "a row for each step")
    page.locator(".ddp-overlap summary").first.click()
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


def test_the_straggler_is_named(shown: BarePage) -> None:
    """The stragglers' view names rank, layer, pattern and cost, and marks the cell where the others wait."""
    shown.open("Stragglers")
    page = shown.page
    row = page.get_by_role("region", name="Where a rank's own computation falls behind").locator("tbody tr")
    shown.until(lambda: row.count() == 1, "the late place")
    text = row.inner_text()
    assert text.startswith("1")
    assert "layers.2.weight (bucket 1)" in text
    assert "persistent" in text
    assert "% of the step" in text
    page.locator(".ddp-stragglers .ddp-twin summary").click()
    last = page.locator(".ddp-stragglers .ddp-twin tbody tr").nth(1).inner_text().split()
    assert last[:2] == ["1", "100"]  # percent of the steps
    page.locator(".ddp-stragglers .ddp-twin summary").click()
    page.locator(".ddp-stragglers .ddp-chart").focus()
    for key in ("Home", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    said = shown.says(".ddp-voice", "rank 1 · bucket 1, the others waited")
    assert float(said.split()[-2]) > 2


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
    page.get_by_label("close the details").click()
    shown.until(lambda: not detail.is_visible(), "the end of the details")


def test_findings_in_words(shown: BarePage) -> None:
    """The findings are listed with evidence, remedy and gain; the tab says how many there are."""
    shown.open("Findings")
    page = shown.page
    items = page.locator("ol.ddp-findings li")
    shown.until(lambda: items.count() >= 1, "a finding")
    assert "layers.2.weight" in page.locator("ol.ddp-findings").inner_text()
    shown.says(".ddp-subtabs:visible", f"Findings ({items.count()})")


def test_several_steps_and_the_whole_step(shown: BarePage) -> None:
    """Steps lie over each other or in a row; the whole step shows the forward, and each choice changes the picture. A
    drag along the time axis shows that range, and 0 the whole step again."""
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
    before = page.evaluate(_PICTURE)
    box = page.locator(".ddp-main canvas").bounding_box()
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


# Numbers of tables that are seen and whose cells are too narrow for them.
_CUT = """() => [...document.querySelectorAll('.ddp-lab :is(td, th)')].filter(
  (one) => one.checkVisibility() && one.scrollWidth > one.clientWidth).map((one) => one.innerText)"""


# The same with the longest sizes there are, until the next picture.
_LONGEST = f"""() => {{
  for (const {{cells}} of document.querySelectorAll('.ddp-sync-table tbody tr'))
    [cells[1].textContent, cells[6].textContent] = ["1023.9 KiB", "10.00 for rank 63"];
  return ({_CUT})();
}}"""


@pytest.mark.parametrize("width", [900, 1600])
def test_no_number_is_cut(shown: BarePage, width: int) -> None:
    """Whatever the width of the page, tables beside the timeline show their numbers whole, next to the names of what
    they are about: the table of ranks is as wide as it needs."""
    shown.page.set_viewport_size({"width": width, "height": 900})
    try:
        shown.until(lambda: shown.page.locator(".ddp-ranks tbody tr").count() == 2, "the ranks")
        assert shown.page.evaluate(_LONGEST) == []
        box = shown.page.locator(".ddp-ranks .ddp-table-scroll").bounding_box()
        assert box["width"] < 820
    finally:
        shown.page.set_viewport_size({"width": 1240, "height": 900})


# Contrast with the paper of the colours that fill more than a hundredth of the map.
_CONTRASTS = """() => {
  const light = (rgb) => {
    const linear = (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const canvas = document.querySelector('.ddp-buckets .ddp-chart canvas');
  const root = document.querySelector('.ddp-lab');
  const paper = light(getComputedStyle(root).backgroundColor.match(/[0-9.]+/g).map(Number));
  const [top, height] = [canvas.height * 0.85, canvas.height * 0.1];
  const {data} = canvas.getContext('2d').getImageData(0, top, canvas.width, height);
  const seen = new Map();
  for (let at = 0; at < data.length; at += 4) {
    const key = data.slice(at, at + 3).join();
    if (data[at + 3] > 250) seen.set(key, (seen.get(key) ?? 0) + 1);
  }
  const large = [...seen].filter(([, count]) => count > 0.05 * canvas.width * height);
  return large.map(([key]) => (light(key.split(',').map(Number)) + 0.05) / (paper + 0.05));
}"""


def test_the_largest_bucket_is_seen_in_the_dark(bare: Open) -> None:
    """On dark paper every bucket's colour has a contrast of 3 to 1 or more: none looks like a hole in the page."""
    made = bare(training_of(steps=3), theme=DARK.replace("#111", "#212121"), width=900)
    made.until(lambda: made.page.locator(".ddp-tab:visible").count(), "the tabs")
    made.open("Buckets")
    found = made.until(lambda: made.page.evaluate(_CONTRASTS), "the buckets' colours")
    assert len(found) == 3
    assert min(found) >= 3


def test_legends_are_in_one_order(shown: BarePage) -> None:
    """The phases of a step are named in one order: in live legends as in pictures and reports."""
    training = shown.dashboard._shown.timeline
    there = breakdown(training)
    every = [name for key, (_, name) in PHASES.items() if key not in SPANS or getattr(there, key).any()]
    simulated = [name for key, (_, name) in PHASES.items() if key not in SPANS]
    for tab, legend, wanted in (("Overlap", "overlap", [*every, "efficiency"]), ("What if", "what-if", simulated)):
        shown.open(tab)
        names = shown.page.locator(f".ddp-{legend} .ddp-legend >> nth=0").locator("li")
        shown.until(lambda names=names, wanted=wanted: names.all_text_contents() == wanted, f"the legend of {tab}")


def test_a_link_that_is_not_known_says_why(shown: BarePage) -> None:
    """Where the recorded buckets do not tell a bandwidth there is no slider, but the reason, and what measures it."""
    page = shown.page
    shown.open("What if")
    shown.until(lambda: shown.dashboard.facts["what_if"]["state"] == "ready", "an answer")
    told = page.evaluate("() => window.model.data.facts.what_if.limits")
    limits = {**told, "gbit": None, "recordedGbit": None, "measured": False}
    page.evaluate(_PREDICTS, limits)
    row = page.locator(".ddp-what-if-row", has_text="bandwidth")
    wait_until(lambda: "Measure it with lab.measure_communication()" in row.inner_text(), "the reason")
    assert not row.locator("input").is_visible()
    page.evaluate(_PREDICTS, told)
    wait_until(row.locator("input").is_visible, "a slider")


def test_equal_pauses_are_one_phrase(shown: BarePage) -> None:
    """Ranks that pause at the same point are named together, as a range."""
    text, page = "pauses: bucket 0 is ready, not yet launched", shown.page
    before = page.evaluate("() => { const {control, facts} = window.model.data; return {control, facts} }")
    ranks = [{"rank": rank, "kind": "paused", "text": text, "since": 0, "for": [], "buckets": []} for rank in range(3)]
    step = {"ranks": ranks, "paused": [0, 1, 2], "pauses": _pauses(ranks)}
    now = {"control": {**before["control"], "live": True}, "facts": {**before["facts"], "step": step}}
    page.evaluate("(now) => window.fromKernel(now, [])", now)
    words = page.get_by_role("group", name="Paused")
    wait_until(words.is_visible, "the pause")
    assert "ranks 0–2 pause: bucket 0 is ready, not yet launched (" in words.inner_text()
    page.evaluate("(before) => window.fromKernel(before, [])", before)
    wait_until(lambda: not words.is_visible(), "its end")


def test_ranks_that_are_busy_run_no_collective(bare: Open) -> None:
    """While a cell runs the button says why it is disabled, and nothing is red; a click later on runs it."""
    asked, busy = [], ["Ranks 0–1 are running a cell: wait until it ends, or interrupt it."]
    stage = CollectiveStage(lambda *one: asked.append(one) or no_ranks(*one), lambda: choices(2), lambda: busy[0])
    made = bare(Timeline(), views=["collectives"], collectives=stage, width=900, height=800)
    page, run = made.page, made.page.get_by_role("button", name="Run on the ranks")
    made.until(lambda: run.get_attribute("title") == busy[0], "the reason")
    assert run.is_disabled()
    page.get_by_label("collective", exact=True).select_option("broadcast")
    assert not page.get_by_role("alert").is_visible()
    busy[0] = ""
    made.until(run.is_enabled, "a button")
    assert asked == []
    run.click()
    made.until(lambda: asked == [("broadcast", "tree", DEFAULT_BYTES)], "a run")
    made.until(page.get_by_role("alert").is_visible, "what came of it")


def test_a_kernel_that_is_gone(bare: Open) -> None:
    """Without a word from the kernel, and at once when its channel is closed, the page says that this is the last
    picture; what it would ask for is disabled, with the reason as its title, and times grow no older."""
    made = bare(training_of(steps=3), request_inspection=lambda *_: None, clock=True)
    page = made.page
    line, compare = page.locator(".ddp-life"), page.get_by_role("button", name="Compare gradients")
    made.open("Timeline")
    made.until(compare.is_visible, "a step")
    made.until(lambda: made.page.locator(".ddp-ranks tbody tr").count() == 2, "the ranks")
    assert not line.is_visible()
    page.clock.run_for(7_000)
    wait_until(line.is_visible, "the words")
    assert line.inner_text().startswith("No message from the kernel for ")
    assert compare.is_disabled()
    made.pump()
    made.until(lambda: page.clock.run_for(1_500) or not line.is_visible(), "the kernel's word")
    assert compare.is_enabled()
    page.evaluate("() => { window.model.send = () => { throw new Error('Cannot send') } }")
    page.evaluate("() => window.emit('comm_live_update')")
    page.clock.run_for(1_500)
    wait_until(line.is_visible, "the words")
    assert line.inner_text() == (
        "The kernel was restarted: this is the last state, of step 2. Run its cell again for a new dashboard."
    )
    assert compare.get_attribute("title") == "The kernel was restarted."
    assert "ago" not in page.locator(".ddp-ranks tbody").inner_text()
    assert "unknown" in page.locator(".ddp-ranks tbody").inner_text()


def test_a_kernel_that_does_not_answer(bare: Open) -> None:
    """A page whose greeting is not answered says so after ten seconds; an answer ends that."""
    made = bare(training_of(steps=3), clock=True)
    page = made.page
    line = page.locator(".ddp-life")
    page.clock.run_for(8_000)
    assert not line.is_visible()
    page.clock.run_for(4_000)
    wait_until(line.is_visible, "the words")
    assert line.inner_text().startswith("No answer from the kernel: it is busy, or this page has lost the connection")
    made.pump()
    made.until(lambda: page.clock.run_for(1_500) or not line.is_visible(), "the kernel's answer")


def test_a_page_that_knows_its_kernel_speaks_only_while_there_is_news(bare: Open) -> None:
    """JupyterLab tells how a kernel is: without news the page is silent, with the next step it speaks again."""
    timeline = training_of(steps=3)
    made = bare(timeline, kernel={"status": "idle", "isDisposed": False}, clock=True)
    page = made.page
    here = "() => window.model.said.filter((one) => one.type === 'here').length"
    made.until(page.locator(".ddp-ranks tbody tr").count, "a step")
    page.evaluate("() => window.fromKernel({}, [[{type: 'word', last: true}, []]])")
    page.clock.run_for(20_000)
    silent = page.evaluate(here)
    page.clock.run_for(60_000)
    assert page.evaluate(here) == silent
    page.evaluate("() => window.fromKernel({}, [[{type: 'marks', marks: []}, []]])")
    page.clock.run_for(3_000)
    assert page.evaluate(here) > silent
    page.evaluate("() => { window.model.widget_manager.kernel.status = 'dead' }")
    page.clock.run_for(1_500)
    wait_until(lambda: page.locator(".ddp-life").inner_text().startswith("The kernel has stopped"), "its end")


def test_small_rates_fit(bare: Open) -> None:
    """Of buckets of 1 KiB the bandwidths are told in MB/s or kB/s, which the columns' heads name, are right, and
    nothing of them is cut off."""
    timeline, training = Timeline(), Training(bucket_bytes=1024)
    made = bare(timeline)
    cells = made.page.locator(".ddp-sync-table tbody tr").first.locator("th, td")
    heads = made.page.locator(".ddp-sync-table thead th")
    made.open("Timeline")
    for step, (unit, factor, training.reduce_ms) in enumerate((("MB/s", 1e6, 0.3), ("kB/s", 1e3, 6.0))):
        training.feed(timeline, step, 10**12 + step * 10**9)
        made.until(lambda unit=unit: cells.count() == 8 and heads.nth(3).inner_text() == unit, unit)
        assert heads.nth(4).inner_text().split() == ["bus", unit]
        wanted = timeline.sync_columns(0)["bandwidth_gb_s"][timeline.sync_columns(0)["step"] == step][0] * 1e9
        for cell in (cells.nth(3), cells.nth(4)):
            assert float(cell.inner_text()) * factor == pytest.approx(wanted, rel=0.05)
        assert made.page.evaluate(_CUT) == []


def test_it_states_its_own_overhead(bare: Open) -> None:
    """The line on the overhead has events a step, their measured cost, and, while steps come, the shares of kernel and
    page."""
    timeline, training, steps = Timeline(), Training(2, 3), count()
    made = bare(timeline, event_cost=lambda: 34.0)
    line = made.page.locator(".ddp-overhead")

    def told() -> bool:
        training.feed(timeline, step := next(steps), 10**12 + step * 20 * 10**6)
        return all(part in line.inner_text() for part in ("× 34 ns = ", "in the kernel", "in the page"))

    made.until(told, "the cost and both shares")


def test_it_says_that_old_steps_are_thinned(bare: Open) -> None:
    """Of a run that is longer than the timeline keeps, the view says which steps there are."""
    made = bare(training_of(steps=50, max_steps=16))
    line = made.page.locator(".ddp-overhead")
    made.until(lambda: "Old steps were down-sampled: " in line.inner_text(), "the sentence")
    assert "are kept, and all since 34." in line.inner_text()


def test_dark_and_narrow(bare: Open) -> None:
    """In the dark and 420 pixels wide nothing is wider than the page, and text on the canvas is light."""
    made = bare(training_of(8, 12, 8), theme=DARK, width=420, height=800)
    made.until(lambda: made.page.locator(".ddp-tab:visible").count(), "the tabs")
    for tab in made.titles():
        made.open(tab)
        width = made.page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= 420, tab
    made.open("Overlap")
    bright = [colour for colour in made.page.evaluate(_COLOURS) if min(map(int, colour.split(","))) > 150]
    assert bright


# Counts the frames in which controls of the timeline are on the page.
_COUNT_FRAMES = """() => {
  window.frames_ = 0;
  const look = () => {
    window.frames_ += document.querySelector('[aria-label="time axis"]').checkVisibility();
    requestAnimationFrame(look);
  };
  look();
}"""


def test_a_view_alone(bare: Open) -> None:
    """A single view has no tabs and at no moment controls of the timeline; before the first step it says what to do."""
    timeline = Timeline()
    made = bare(timeline, views=["overlap"], width=900, height=800)
    assert "Train with" in made.page.locator(".ddp-empty").inner_text()
    made.page.evaluate(_COUNT_FRAMES)
    Training(2, 3, forward_ms=1.0).trained(3, timeline=timeline)
    made.says(".ddp-overlap", "Medians of the last 3 steps")
    assert not made.page.locator(".ddp-tabs").is_visible()
    assert made.page.evaluate("() => window.frames_") == 0


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
def test_the_map_is_laid_out_as_the_svg(blank: Page, name: str, equal: bool) -> None:
    """buckets.js shows the cells of model_map.py, and of a module alone those inside it, over the whole width."""
    assignment = _ASSIGNMENTS[name]()
    cells, depth = map_cells(assignment, equal=equal)
    module = next(one for one in reversed(cells) if one.parameter < 0)
    run = """async ([text, assignment, equal, root]) => {
      const {mapCells} = await import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
      return JSON.stringify([mapCells(assignment, {equal}), mapCells(assignment, {equal, root})]);
    }"""
    told = {"cells": cell_rows(assignment)}
    whole, alone = json.loads(blank.evaluate(run, [bundle.module_text("views/buckets.js"), told, equal, module.path]))
    assert whole["depth"] == depth
    assert [one["path"] for one in whole["cells"]] == [one.path for one in cells]
    for one, other in zip(whole["cells"], cells, strict=True):
        for key, value in vars(other).items():
            assert one[key] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), (key, other)
    top, *inside = alone["cells"]
    assert (top["path"], top["depth"], top["begin"], top["end"]) == (module.path, 0, 0, pytest.approx(1))
    assert {one["parameter"] for one in inside} == {
        one.parameter for one in cells if one.path.startswith(f"{module.path}.".lstrip(".")) and one is not module
    }
    assert all(one["depth"] + one["rows"] == alone["depth"] for one in inside if one["parameter"] >= 0)


def test_narrow_bars_are_joined(blank: Page) -> None:
    """Bars narrower than a pixel become one per pixel column, of the part that fills most of it; wide ones stay."""
    assert "steps/many_steps.js" in bundle.modules_of("app/dashboard.js")
    text = bundle.module_text("steps/many_steps.js")
    run = """async (text) => {
      const {joinNarrow} = await import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
      const bar = (part, x, width) => ({part, x, width, row: 0, bucket: 0, y: 0, height: 5});
      const narrow = [bar(1, 5.0, 0.2), bar(2, 5.2, 0.5), bar(1, 5.7, 0.25), bar(3, 6.1, 0.3)];
      const bars = [bar(0, 0, 5), ...narrow, bar(0, 7, 3)];
      return joinNarrow(bars).map((one) => [one.part, one.x, one.width]);
    }"""
    assert blank.evaluate(run, text) == [[0, 0, 5], [2, 5, 1], [3, 6, 1], [0, 7, 3]]
