"""The dashboard's controls in a real JupyterLab, on a real cluster that trains in the foreground meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from ddp_lab.timeline.timeline import Timeline
from tests.benchmarks.browser import Lab, NotebookPage, open_tab
from tests.browser.conftest import Shared
from tests.browser.test_views import Open, training_of
from tests.browser.waiting import says, step_of
from tests.training_events import Training
from tests.waiting import wait_until

START = "import ddp_lab\nlab = ddp_lab.Cluster(2, backend='gloo').start()"
MODEL = '''
lab.run("""
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
""")
'''
TRAIN = '''
lab.run("""
import pathlib, time
while True:
    time.sleep(0.01)
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    go = torch.tensor([0 if pathlib.Path({path!r}).exists() else 1])
    dist.broadcast(go, 0)
    if not go: break
""")
'''
CELL = 3


@pytest.fixture(scope="module")
def training(shared: Shared, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookPage]:
    """A notebook whose last cell trains, in the foreground, until the module's tests are over; a dashboard above it."""
    stop = tmp_path_factory.mktemp("training") / "stop"
    cells = (START, MODEL, "lab.dashboard()", TRAIN.format(path=str(stop)), "lab.stop()")
    with shared.notebook(*cells, run=CELL) as opened:
        opened.page.locator(".ddp-lab").scroll_into_view_if_needed()
        opened.run_cell(CELL, wait=False)
        wait_until(lambda: (step_of(opened.page) or 0) > 3, "the first steps")
        yield opened
        assert opened.executions(CELL) is None, "the training ended early"
        stop.touch()
        wait_until(lambda: opened.executions(CELL), "the end of the training")
        opened.run_cell(CELL + 1)


def test_buckets_are_changed_by_the_form(training: NotebookPage) -> None:
    """A cap that is typed in is applied between two steps: the table has the new buckets, and before and after are
    compared."""
    page = training.page
    open_tab(page, "Buckets")
    rows = page.locator(".ddp-buckets > .ddp-table-scroll tbody tr")
    wait_until(lambda: rows.count() == 1, "one bucket")
    page.get_by_label("bucket size limits").select_option("cap")
    page.get_by_label("size limit of a bucket in MiB").fill("0.01")
    page.keyboard.press("Enter")
    says(page.locator(".ddp-reconfigure .ddp-status"), "There are 4 buckets now")
    wait_until(lambda: rows.count() == 4, "four buckets")
    says(page.locator(".ddp-verdict-line"), "99 %")
    page.get_by_label("comm hook").fill("fp61")
    page.get_by_role("button", name="Apply").click()
    says(page.locator(".ddp-reconfigure .ddp-status"), "did you mean 'fp16'")


def _pause_both(page: Page) -> None:
    """Presses Pause until both ranks pause at their first bucket: breakpoints that come in the middle of a backward
    find one rank at a later bucket than the other, or beyond its last."""
    for _ in range(20):
        page.get_by_role("button", name="Pause", exact=True).click()
        says(page.locator(".ddp-step"), "Training is paused")
        label = page.locator(".ddp-step canvas").get_attribute("aria-label") or ""
        if all(f"Rank {rank} pauses: bucket 0 is ready" in label for rank in (0, 1)):
            break
        page.locator(".ddp-step .ddp-keys").click()
        page.locator(".ddp-step").press("c")
        says(page.locator(".ddp-step"), "No breakpoints")
    says(page.locator(".ddp-step"), "Training is paused: ranks 0, 1,")


def test_a_backward_is_stepped_through(training: NotebookPage) -> None:
    """Ranks pause when a bucket is ready, go on to the next one by a key, and train on."""
    page = training.page
    open_tab(page, "Step through")
    canvas = page.locator(".ddp-step canvas")
    _pause_both(page)
    says(canvas, "Rank 1 pauses: bucket 0 is ready, not yet launched", attribute="aria-label")
    says(page.get_by_role("group", name="Paused"), "bucket 0 is ready, not yet launched")
    held = step_of(page)
    page.locator(".ddp-step .ddp-keys").click()
    page.locator(".ddp-step").press("b")
    says(canvas, "Rank 1 pauses: bucket 1 is ready", attribute="aria-label")
    page.locator(".ddp-twin summary").last.click()
    page.locator(".ddp-step").press("c")
    says(page.locator(".ddp-step"), "No breakpoints")
    wait_until(lambda: not page.get_by_role("group", name="Paused").is_visible(), "no buttons of a pause")
    wait_until(lambda: step_of(page) > held + 3, "more steps")


def test_a_fault_is_injected_seen_and_ended(training: NotebookPage) -> None:
    """A slow layer is injected by the form; a sign stays above every tab until it is ended; both ends are marked."""
    page = training.page
    open_tab(page, "Fault injection")
    page.get_by_role("combobox", name="rank", exact=True).select_option("1")
    page.get_by_role("combobox", name="parameter").select_option("2.weight")
    page.get_by_label("delay in ms").fill("30")
    page.get_by_role("button", name="Inject").click()
    mark = "slow layer: 30 ms before the gradient of '2.weight'"
    says(page.locator(".ddp-active tbody"), "active")
    says(page.locator(".ddp-past"), mark)
    open_tab(page, "Timeline")
    sign = page.get_by_role("alert", name="Fault injection")
    says(sign, f"rank 1: {mark}")
    open_tab(page, "Fault injection")
    page.get_by_role("button", name="End", exact=True).click()
    says(page.locator(".ddp-past"), f"end of {mark}")
    wait_until(lambda: not sign.is_visible(), "no sign")


def test_a_recording_has_no_controls(bare: Open) -> None:
    """A control of a saved timeline, alone, says that it needs a running cluster, and offers nothing to press."""
    shown = bare(training_of(steps=3), views=["step"])
    shown.says(".ddp-main", "Controls need a running cluster")
    assert not shown.page.locator(".ddp-controls").is_visible()


def test_a_control_means_a_model_that_exists(bare: Open) -> None:
    """While the model that trained last is shown and gone, the control offers and asks for one that the ranks have."""
    timeline = Timeline()
    training = Training()
    for reducer in (0, 1):
        training.reducer = reducer
        for step in range(3):
            training.feed(timeline, step, (reducer + 1) * 10**12 + step * 10**8)
    shown = bare(timeline, views=["step"])
    page = shown.page
    shown.says(".ddp-main", "Controls need a running cluster")
    control = {"live": True, "why": "", "heard": [], "living": [0]}
    page.evaluate("(control) => window.fromKernel({control}, [])", control)
    offered = page.locator(".ddp-step").get_by_label("model", exact=True).locator("option")
    shown.until(lambda: offered.all_text_contents() == ["the one that is training", "DigitsNet (model 0)"], "one model")
    page.get_by_role("button", name="Pause").click()
    asked = wait_until(
        lambda: page.title() + "." and [one for one in shown._asked if one["type"] == "step"], "a request"
    )
    assert asked[0]["reducer"] == 0
