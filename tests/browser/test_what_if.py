"""The sliders in Chromium, on real ranks: predictions are those of the simulator, and can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from ddp_lab import Cluster
from ddp_lab.output.board import SilentBoard
from tests.browser.bare_page import BarePage, bare_page
from tests.browser.looks import LOOP
from tests.unit.step_model import History, StepModel
from tests.waiting import DEADLINE_S

MODEL = """
torch.manual_seed(0)
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.05)
def step():
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
for _ in range(20): step()
"""
_PICTURES = "() => [...document.querySelectorAll('.ddp-what-if-step canvas')].map((one) => one.toDataURL())"
_ANSWERED = "() => Number(document.querySelector('.ddp-what-if').dataset.answered ?? 0)"


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    """Two ranks with a model that has trained twenty steps."""
    with Cluster(2) as cluster:
        cluster.run(MODEL, board=SilentBoard())
        cluster.measure_communication(sizes=[1 << 10, 1 << 14, 1 << 18], repeats=2)
        yield cluster


@pytest.fixture(scope="module")
def shown(browser: Browser, lab: Cluster) -> Iterator[BarePage]:
    """The sliders of that cluster."""
    with bare_page(browser, lab.timeline, width=1200, views=["what_if"], **lab.dashboard_means()) as made:
        made.until(lambda: "Recorded:" in _summary(made), "the first answer")
        yield made


def _summary(shown: BarePage) -> str:
    return str(shown.page.locator(".ddp-what-if .ddp-summary").inner_text())


def _move(shown: BarePage, label: str, key: str) -> None:
    """Moves a slider by keyboard and waits for the answer."""
    before = shown.page.evaluate(_ANSWERED)
    slider = shown.page.get_by_label(label, exact=True)
    slider.focus()
    shown.page.keyboard.press(key)
    shown.until(lambda: shown.page.evaluate(_ANSWERED) > before, f"the answer to {label}")


def test_a_slider_is_answered_by_the_simulator(shown: BarePage, lab: Cluster) -> None:
    """With the smallest cap the step is the simulator's, and the predicted picture is another one."""
    before = shown.page.evaluate(_PICTURES)
    _move(shown, "bucket size limit", "Home")
    answer: dict[str, Any] = shown.dashboard.facts["what_if"]
    wanted = lab.simulate(bucket_cap_mb=answer["cap"])
    assert answer["predicted"]["step"] == pytest.approx(wanted.step_ms, rel=1e-6)
    after = shown.page.evaluate(_PICTURES)
    assert after[1] != before[1]
    assert len(set(after)) == 2
    shown.page.get_by_role("button", name="As recorded").click()
    shown.until(lambda: "Move a slider" in _summary(shown), "what was recorded")


def test_worlds_links_and_stragglers(shown: BarePage, lab: Cluster) -> None:
    """16,384 ranks take longer, a faster link and no straggler do not; what is not a cap can't be run here."""
    recorded = shown.dashboard.facts["what_if"]["predicted"]["step"]
    run = shown.page.get_by_role("button", name="Run it")
    assert run.is_disabled()
    _move(shown, "world size", "End")
    assert shown.dashboard.facts["what_if"]["world"] == 16384
    assert shown.dashboard.facts["what_if"]["predicted"]["step"] > recorded
    assert run.is_disabled()
    shown.page.get_by_role("button", name="As recorded").click()
    for label in ("bandwidth", "latency"):
        _move(shown, label, "End" if label == "bandwidth" else "Home")
    shown.page.get_by_label("without the straggler").check()
    shown.until(lambda: shown.dashboard.facts["what_if"]["predicted"]["step"] <= 1.001 * recorded, "a shorter step")
    shown.page.get_by_role("button", name="As recorded").click()
    shown.page.locator(".ddp-what-if summary").click()
    rows = shown.page.locator(".ddp-what-if .ddp-twin tbody tr")
    shown.until(lambda: rows.count() == 6 and rows.last.inner_text().startswith("step"), "the table")


def test_a_prediction_is_run(shown: BarePage, lab: Cluster, tmp_path: Path) -> None:
    """While a cell trains "Run it" tries the cap on the ranks, tells the error, and leaves them what they had."""
    before = lab.run("model.configuration()", board=SilentBoard()).values
    path = tmp_path / "stop"
    running = lab.run(LOOP.format(path=str(path)), wait=False, board=SilentBoard(), timeout=DEADLINE_S)
    try:
        shown.until(lambda: lab.timeline.reducers()[0].last_step > 20, "steps of that cell")
        _move(shown, "bucket size limit", "End")
        shown.page.get_by_role("button", name="Run it").click()
        scores = shown.page.locator(".ddp-what-if-scores tbody tr")
        shown.until(lambda: scores.count() == 1 or shown.dashboard.facts["trial"]["state"] == "failed", "the score")
        assert shown.dashboard.facts["trial"]["state"] != "failed", shown.dashboard.facts["trial"]["text"]
    finally:
        path.touch()
        running.wait()
    (score,) = shown.dashboard.facts["trial"]["scores"]
    assert score["measured"] > 0
    assert score["error"] == pytest.approx(100 * (score["predicted"] / score["measured"] - 1))
    assert scores.inner_text().split("\t")[0] == score["setting"]
    shown.says(".ddp-voice", "predicted")
    assert lab.run("model.configuration()", board=SilentBoard()).values == before


def test_nothing_trains(shown: BarePage) -> None:
    """Without a cell that trains "Run it" says what to do."""
    _move(shown, "bucket size limit", "Home")
    shown.page.get_by_role("button", name="Run it").click()
    why = shown.page.locator(".ddp-what-if-run [role=status]")
    shown.until(lambda: "--no-wait" in why.inner_text(), "the remedy")


_DRAWN = """() => { const one = document.querySelector('.ddp-what-if-step canvas');
  return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value > 0) }"""


def test_an_abandoned_last_step_is_no_empty_picture(bare: Callable[..., BarePage]) -> None:
    """After a backward that was given up the last complete step stands beside the prediction, and its title says so."""
    model = StepModel(gradients=[1.0] * 4, sizes=[1_000_000] * 4, buckets=[[0, 1], [2, 3]])
    history = History()
    history.assign(model, 0)
    history.train(model, 0, 20)
    history.abandon(0)
    made = bare(history.timeline, views=["what_if"], width=900, height=800)
    title = made.page.locator(".ddp-what-if-step h4").first
    made.until(lambda: title.inner_text() == "recorded, step 19 (the last complete one)", "the title")
    assert made.page.evaluate(_DRAWN)
    assert "those of rank 0, which computes longest (medians of steps" in _summary(made)
