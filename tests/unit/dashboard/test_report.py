"""The report as text: what it says, what it escapes, and that it needs nothing."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab.analysis.step_metrics import Breakdown
from ddp_lab.dashboard import report
from ddp_lab.dashboard.paint import scene_svg
from ddp_lab.dashboard.report import page
from ddp_lab.dashboard.scene import Advice
from ddp_lab.dashboard.views.overlap import overlap_scene
from ddp_lab.dashboard.views.stragglers import last_shares, late_text
from ddp_lab.timeline.timeline import Timeline, read_run
from tests.training_events import Training
from tests.unit.backwards import Bucket, Recorder, assignment
from tests.unit.timeline.test_recorded_runs import write_journals


class _Tags(HTMLParser):
    """Checks that tags are closed in order, and collects what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    """Tags close in order, nothing is loaded, no script, and the size stays far below that of plotly."""
    text = page(Training(ranks=4, buckets=20, delays={(2, 3): 9.0}).trained(20, ms=50))
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.loaded == []
    assert "<script" not in text
    assert "url(http" not in text
    assert len(text) < 400_000


def test_findings_then_words_then_figures() -> None:
    """The order of the page: findings, summary, figures, tables. A remedy's settings and calls are set as code without
    the sentence's punctuation."""
    headings = re.findall(r"<h2[^>]*>([^<]*)", page(Training(delays={(1, 1): 9.0}).trained(20, ms=50)))
    assert headings[:2] == ["Findings", "Summary"]
    assert headings[2].startswith("Timeline of step")
    assert headings[-2:] == ["Ranks (medians)", "Buckets (medians)"]
    text = "Try bucket_cap_mb=1.14. Or bucket_cap_mb=[0.3, 25], then lab.tune(steps=(1, 2)). So static_graph=True, too."
    assert Advice("", 1.0, "", "", text).remedy_parts[1::2] == [
        "bucket_cap_mb=1.14",
        "bucket_cap_mb=[0.3, 25]",
        "lab.tune(steps=(1, 2))",
        "static_graph=True",
    ]


def test_tiles_and_summary_are_of_the_same_steps() -> None:
    """The first steps, which take longer, count in neither: both say the same share of overlapped communication."""
    timeline, training = Timeline(), Training(reduce_ms=40.0)
    for step in range(250):
        if step == 3:
            training.reduce_ms = 1.2
        training.feed(timeline, step, (step + 1) * 200_000_000)
    text = page(timeline)
    [of_tile] = re.findall(r"overlapped communication</\w+>\s*<\w+[^>]*>(\d+) %", text)
    [of_summary] = re.findall(r"(\d+) % of the communication overlapped", text)
    assert of_tile == of_summary


@pytest.mark.parametrize(
    ("often", "seldom"),
    [((2.0, 13.0), (3.0, 13.0)), ((2.0, 3.0, 13.0), (2.0, 3.0, 13.0))],
    ids=["two ranks", "three ranks"],
)
def test_tile_summary_and_buckets_agree(often: tuple[float, ...], seldom: tuple[float, ...]) -> None:
    """Ranks wait differently for the only bucket that is exposed, in ms: a step is exposed for as long as it is."""
    timeline = Timeline()
    for rank in range(len(often)):
        recorder = Recorder(rank)
        for step in range(30):
            exposed = (often if step % 5 < 3 else seldom)[rank]
            buckets = [Bucket((1.0,), 1.0, 2.0, (0,)), Bucket((2.0,), 2.0, 10.0 + exposed, (1,))]
            recorder.backward(step, (step + 1) * 100_000_000, buckets, 10.0)
        timeline.describe(rank, assignment([[0], [1]], ranks=range(len(often))) | {"session": 1})
        timeline.extend(recorder.batch())
    text, summary = page(timeline), timeline.summary()
    found = [
        *re.findall(r"exposed communication</\w+>\s*<\w+[^>]*>([\d.]+) ms", text),
        *re.findall(r"([\d.]+) ms exposed communication", summary),
        *re.findall(r"Bucket 1 \(layer1\) has the most exposed communication, ([\d.]+) ms", summary),
        *re.findall(r"<td>1</td>.*?<td>([\d.]+)</td><td[^>]*>layer1</td>", text),
    ]
    assert len(found) == 4
    np.testing.assert_allclose(list(map(float, found)), float(found[-1]), atol=0.05)  # the table has another digit


def test_the_last_rank_is_the_same_everywhere() -> None:
    """Rank 0 is last in more steps, rank 1 by more in total: finding, summary, tab, figure and table name rank 0, with
    the same share of the same steps."""
    timeline, training = Timeline(), Training(2, 4, forward_ms=1.0)
    rng = np.random.default_rng(1)
    for step in range(60):
        slow = step % 5 > 2
        training.delays = {(int(slow), int(rng.integers(4))): 6.0 if slow else 2.0}
        training.feed(timeline, step, 10**12 + step * 15 * 10**6)
    facts = timeline.analysis_input()
    assert facts is not None
    assert facts.replay.waited.sum(axis=1).argmax() == 1
    share = 100 * float((facts.replay.waited.argmax(axis=0) == 0).mean())
    said = f"Rank 0 was last most often: in {share:.0f} % of 57 steps; the others then waited "
    (found,) = (one for one in timeline.findings() if one.kind == "ranks-disturbed")
    assert said in found.evidence
    assert said in timeline.summary()
    assert said in late_text(facts, timeline.stragglers())
    assert last_shares(facts)[0] == pytest.approx(share / 100)
    shown = page(timeline)
    assert shown.count(said) == 2
    assert f"rank 0: last in {share:.0f}% of steps" in shown
    of_ranks = shown.partition(">last, % of steps<")[2].partition("<tbody>")[2].splitlines()
    assert f"<td>{share:.0f}</td>" in of_ranks[1]


def test_lines_of_a_part_are_set_off_and_options_are_the_models() -> None:
    """A row that belongs to the one above looks like it; what else a layout's description holds is no option."""

    class Described(Training):
        def assignment(self) -> dict[str, Any]:
            return super().assignment() | {"options": {"static_graph": False, "averages_in_place": True}}

    timeline = Timeline()
    for step in range(6):
        Described().feed(timeline, step, 10**12 + step * 10**7)
    options = page(timeline).partition("Options of the model")[2]
    assert "static_graph" in options
    assert "averages_in_place" not in options
    rows = report._table(["part:", "ms"], [["data loading", 2.0], ["  train.py:3", 1.5]]).splitlines()
    assert [row.startswith('<tr class="sub">') for row in rows[1:3]] == [False, True]


def test_the_header_says_when_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Date, host, script and torch as the journals have them, also from the merged file; nothing of what is unknown."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    about = {"session": 1_700_000_000 * 10**9, "torch": "2.13.0", "script": "there/<train>.py"}
    write_journals(tmp_path, Training(), **about)
    said = "recorded 2023-11-14 22:13 UTC on host0: &lt;train&gt;.py, torch 2.13.0</p>"
    merged = read_run([tmp_path]).timeline
    assert said in page(merged)
    assert said in page(Timeline.load(merged.save(tmp_path / "timeline.npz")))
    assert ">recorded" not in page(Training().trained(20, ms=50))


def test_pages_of_little() -> None:
    """An empty timeline gives a page that tells how to record something; a single rank has no gradient sync, and the
    other figures."""
    assert "Wrap the model in ddp_lab.DistributedDataParallel" in page(Timeline())
    text = page(Training(ranks=1).trained(20, ms=50))
    assert "Step time breakdown" in text
    assert "Waiting for stragglers" not in text


def test_charts_bin_many_steps_and_cut_outliers() -> None:
    """10,000 steps become at most 400 columns; one very long step does not flatten the others, and is told."""
    values = np.full(10_000, 10.0)
    values[:30] = 900.0
    none, numbers = np.zeros(10_000), np.arange(10_000)
    parts = Breakdown(numbers, *[none] * 4, values, *[none] * 3, values, none)
    drawn = scene_svg.picture(overlap_scene(parts))
    assert len(drawn) < 100_000
    assert "longest: 900 ms" in drawn
    assert 'class="faint" text-anchor="end">15<' in drawn
