"""A cluster outlives a browser tab: the page is closed in the middle of a watched cell, and opened again."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Page

from tests.benchmarks.browser import Lab, NotebookPage, open_tab, printed
from tests.browser.conftest import Shared
from tests.browser.waiting import has, press, says, step_of
from tests.waiting import wait_until

START = "%load_ext ddp_lab\n%cluster start -n 2 --backend gloo"
# Outputs look for their widget once, and give up only after the widgets have come: see lost_outputs.js.
LOOK_ONCE = """
const real = window.setTimeout;
window.setTimeout = (call, ms, ...rest) => real(call, ms === 100 ? 10_000 : ms, ...rest);
"""
TRAIN = """%%distributed --dashboard
import os, time
model, steps = ddp_lab.DistributedDataParallel(torch.nn.Linear(8, 8)), 0
while True:
    time.sleep(0.01)
    model(torch.randn(4, 8)).sum().backward()
    steps += 1
    open({begun!r}, "w").close()
    if steps % 20 == 0: print("at", steps)
    stop = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(stop)
    if stop: break
"""
_CANVAS = "() => document.querySelector('.ddp-main canvas')?.toDataURL()"
AFTER = """%%distributed
total = torch.tensor([steps]); dist.all_reduce(total)
"""
REPORT = """import ddp_lab, json
lab = ddp_lab.current_cluster()
pulled = lab.pull('(steps, int(total))')
print(json.dumps([pulled[0], pulled[1], lab.timeline.reducers()[0].last_step]))"""


def test_a_page_that_is_closed_in_the_middle_of_a_cell(shared: Shared, lab: Lab, tmp_path: Path) -> None:
    """A training is watched live. The ranks train on without a page; in one that is opened again its end is seen,
    and the next cells work.

    As long as the cell runs, the page says that it may; then how it ended, with the end of its text. It does so even if
    the widgets come after the outputs have looked for them. The live view comes back with the last step.
    """
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    train = TRAIN.format(gate=str(gate), begun=str(begun))
    name = lab.write(START, train, AFTER, REPORT, "%cluster stop")
    with shared.page() as page:
        first = NotebookPage(page, lab, name)
        first.start_kernel()
        first.run_cell(0)
        first.save()
        first.run_cell(1, wait=False)
        page.wait_for_selector(".ddp-main canvas")
        wait_until(begun.exists, "the first step")
        _is_watched(page)
        has(first.page.locator(".ddp-background"), 1)
        assert not first.page.locator(".ddp-background").is_visible()
        first.save()
        page.close()
    begun.unlink()
    wait_until(begun.exists, "a step without a page")
    with shared.page() as page:
        page.add_init_script(LOOK_ONCE)
        _goes_on(NotebookPage(page, lab, name), gate)


def _is_watched(page: Page) -> None:
    """Asserts that the canvas changes while the cell runs, that the step selector stops following by keyboard, and that
    the ranks find their gradients equal."""
    open_tab(page, "Timeline")
    page.locator(".ddp-main").scroll_into_view_if_needed()
    pictures: set[str] = set()
    wait_until(lambda: pictures.add(page.evaluate(_CANVAS)) or len(pictures) >= 5, "five pictures of the timeline")
    page.get_by_role("slider", name="step").focus()
    page.keyboard.press("ArrowLeft")
    follow = page.get_by_label("follow latest")
    wait_until(lambda: not follow.is_checked(), "an earlier step")
    follow.check()
    press(page.get_by_role("button", name="Compare gradients"))
    says(page.locator(".ddp-verdict"), "equal on all 2 ranks")


def _goes_on(second: NotebookPage, gate: Path) -> None:
    """Asserts that in a page that was opened again the training ends as it would have."""
    try:
        cell = second.page.locator(".jp-CodeCell").nth(1)
        says(cell, "%%distributed [2]: running for ")
        says(cell, "If it is still running, its result will appear here.")
        assert "model not found" not in cell.inner_text()
        gate.touch()
        second.wait_for_status("idle")
        says(cell, "%%distributed [2]: ✓ done in ")
        says(cell.locator(".ddp-late-text"), "ranks 0–1 │ at ")
        assert "If it is still running" not in cell.inner_text()
        second.page.wait_for_selector(".ddp-main canvas")
        second.run_cell(2)
        second.run_cell(3)
        ours, theirs, last_step = printed(second.save().cells[3])
        assert ours == theirs
        steps, total = ours
        assert total == 2 * steps
        assert last_step == steps - 1
        wait_until(lambda: step_of(second.page) == last_step, "the last step")
        assert not second.errors, json.dumps(second.errors)
    finally:
        gate.touch()
        second.run_cell(4)
        second.shut_down()
