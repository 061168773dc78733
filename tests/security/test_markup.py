"""Texts from ranks (names, errors) are shown as texts, whatever tags they hold; test_reach.py has real ranks."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.dashboard.saved_picture import SavedPicture
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.dashboard.views import figure as drawn_figure
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.diagnosis.snapshot import Call, Place, RankSnapshot
from ddp_lab.output import status_table
from ddp_lab.timeline.comparison import compare
from tests.security.markup import NAME, TEXT, assert_text_alone, training


def test_report(tmp_path: Path) -> None:
    """The report's page shows names of classes, parameters, hooks and options as text, and has no script."""
    page = training().report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert_text_alone(page, NAME, f"Net{NAME}")


@pytest.mark.parametrize("view", ["timeline", "overlap", "stragglers", "buckets", "findings", "sync"])
def test_plotly_figures(view: str) -> None:
    """Where plotly takes HTML for markup (titles, labels, hovers) no tag comes from a name, and none is lost."""
    figure = drawn_figure(training(), view, **({"whole": True} if view == "timeline" else {}))
    texts = list(_texts(figure.to_plotly_json()))
    tags = {tag for text in texts for tag in re.findall(r"<[^>]*>", text)}
    assert tags <= {"<br>", "<b>", "</b>", "<extra>", "</extra>"}
    assert not [text for text in texts if "<b>&amp;" in text]
    assert view in ("overlap", "stragglers", "sync") or any("&lt;script&gt;" in text for text in texts)


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def test_saved_pictures() -> None:
    """The pictures that stay in a notebook hold names as text, and are XML; what a screen reader reads of one ends no
    attribute. What a comparison of two runs says is text alone: no page."""
    timeline = training()
    for view in ("overlap", "stragglers", "sync", "buckets", "findings"):
        picture = VIEWS[view].picture(timeline)
        ElementTree.fromstring(picture)
        assert_text_alone(picture, *([f"Net{NAME}", NAME] if view == "buckets" else []))
    page = SavedPicture("token").bundle("<svg/>", TEXT)["text/html"]
    assert base64.b64encode(b"<svg/>").decode() in page
    page, links = re.subn('<link rel="stylesheet" href="data:text/css;base64,[\\w+/=]+">', "", page)
    assert links == 1, "a style that fetches nothing"
    assert_text_alone(page.replace("<svg/>", ""), TEXT)
    assert not hasattr(compare(timeline, timeline), "_repr_html_")


def test_doctor_and_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor's report and the table of ranks hold code, labels, hosts and errors as text."""
    monkeypatch.chdir(tmp_path)  # far from the lessons: no link to one
    place = Place(file=NAME, line=1, function=NAME, text=TEXT, users=True)
    call = Call(
        name="all_reduce", group=NAME, ranks=(0, 1), kind="collective", what=NAME, bytes=4, peer=None, sequence=1
    )
    stuck = RankSnapshot(0, "running", label=NAME, seconds=9.0, stack=(place,), call=call)
    dead = RankSnapshot(1, "lost", why=TEXT, label=NAME)
    assert_text_alone(HangReport.of([stuck, dead])._repr_html_(), NAME)
    assert_text_alone(status_table.html_table([NAME], [[TEXT]]), NAME, TEXT)
