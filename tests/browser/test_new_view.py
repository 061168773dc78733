"""A view is one object: one that is added to `VIEWS` is on the page, in pictures, figures and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ddp_lab.dashboard import bundle
from ddp_lab.dashboard.scene import Axis, Bars, Panel, Scene, Table
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.dashboard.views.overlap import breakdown
from ddp_lab.dashboard.views.view import Reported, Selection, View
from ddp_lab.timeline.timeline import Timeline
from tests.browser.bare_page import BarePage
from tests.training_events import Training

_COLOURED = """() => {
  const canvas = document.querySelector('.ddp-paces canvas');
  if (!canvas) return 0;
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at] === 0 && data[at + 1] === 114 && data[at + 2] === 178;
  return count;
}"""


class Paces(View):
    """How long steps take, as bars."""

    name = "paces"
    title = "Paces"
    about = "How long each step took."
    question = "How fast"

    def facts(self, timeline: Timeline, chosen: Selection) -> dict[int, float]:
        found = breakdown(timeline, chosen.model)
        return dict(zip(found.step.tolist(), found.total.tolist(), strict=True))

    def scene(self, facts: dict[int, float]) -> Scene:
        if not facts:
            return Scene(self.title, empty="no step has ended")
        bars = Bars("pace", "forward", np.array(list(facts)), np.array(list(facts.values())))
        return Scene(
            "Paces of the steps",
            (Panel(Axis("step", chooses="step"), Axis("ms per step", unit="ms"), (bars,)),),
            Table(["step", "ms"], list(facts.items()), "Paces"),
            summary=f"{len(facts)} paces.",
        )

    def reported(self, timeline: Timeline, chosen: Selection) -> Reported:
        return Reported(self.title, self.about, self.scene(self.facts(timeline, chosen)))


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`VIEWS` with one more view: nothing else knows of it."""
    monkeypatch.setitem(VIEWS, Paces.name, Paces())
    bundle.module_text.cache_clear()
    yield
    bundle.module_text.cache_clear()


@pytest.fixture
def timeline() -> Timeline:
    """Twelve steps of two ranks."""
    return Training(2, 3, forward_ms=2.0).trained(12, ms=100)


@pytest.mark.usefixtures("paces")
def test_it_is_on_the_page(bare: Callable[..., BarePage], timeline: Timeline) -> None:
    """In a tab of its question: its sentence, its bars in their colour, its table; a column chooses its step.
    The page was sent these facts alone, not those of other views with them."""
    made: Any = bare(timeline)
    page = made.page
    made.until(lambda: page.locator(".ddp-tab:visible").count(), "the tabs")
    made.open("Paces")
    made.says(".ddp-paces .ddp-summary", "12 paces.")
    assert made.until(lambda: page.evaluate(_COLOURED), "its bars") > 1_000
    sent = made.dashboard.facts_sent
    assert sent.count("paces") == 1
    assert "stragglers" not in sent  # nobody looks at them
    known = VIEWS["paces"].facts(timeline, Selection())
    step, pace = made.first_row(".ddp-paces table")
    assert float(pace) == pytest.approx(known[int(step)], abs=0.1)
    page.locator(".ddp-paces .ddp-chart").focus()
    page.keyboard.press("Home")
    made.says(".ddp-voice", "step 0, pace")
    page.keyboard.press("Enter")
    made.until(lambda: page.get_by_label("step number").input_value() == "0", "the chosen step")


@pytest.mark.usefixtures("paces")
def test_it_is_in_pictures_figures_and_reports(timeline: Timeline, tmp_path: Any) -> None:
    """The same scene as a saved picture, as a plotly figure and in the report."""
    dashboard = timeline.dashboard("paces")
    try:
        assert "Paces of the steps" in dashboard.svg()
    finally:
        dashboard.close()
        dashboard.layout.close()
    figure = timeline.figure("paces")
    assert list(figure.data[0].y) == pytest.approx(list(VIEWS["paces"].facts(timeline, Selection()).values()))
    report = timeline.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">Paces</h2>" in report
    assert "How long each step took." in report
