"""What a model with parameter groups is called in views, figures, pictures and the report."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from ddp_lab.dashboard.report import page
from ddp_lab.dashboard.views import VIEWS, figure
from ddp_lab.dashboard.views.buckets import bucket_gradients
from ddp_lab.dashboard.views.layout_words import BUCKETS, layout_words
from ddp_lab.formatting import ending
from tests.training_events import Training
from tests.unit.timeline.test_parameter_groups import NAMES, recorded

_OF_BUCKETS = re.compile(r"\bbuckets?\b|all-reduce", re.IGNORECASE)
_VIEWS = ("timeline", "sync", "overlap", "stragglers", "buckets", "findings")


def _texts(html: str) -> str:
    """What a reader of a page sees, with tooltips."""
    return unescape(re.sub(r"<(?!title)[^>]*>", " ", re.sub(r"<style.*?</style>", " ", html, flags=re.DOTALL)))


def _strings(made: Any) -> list[str]:
    """All texts of a figure."""
    if isinstance(made, dict):
        return [one for value in made.values() for one in _strings(value)]
    if isinstance(made, list | tuple):
        return [one for value in made for one in _strings(value)]
    return [made] if isinstance(made, str) else []


@pytest.mark.parametrize(
    ("kind", "mesh", "reduction"),
    [
        ("fully_shard", (2,), "reduce-scatter"),
        ("fully_shard", (2, 1), "reduction"),
        ("replicate", (2,), "all-reduce"),
        ("replicate", (2, 1), "all-reduce"),
    ],
)
def test_groups_have_the_names_of_their_modules(kind: str, mesh: tuple[int, ...], reduction: str) -> None:
    """Also the collective has a name of its own, by the kind of the model and the dimensions of its mesh."""
    words = layout_words(recorded(kind=kind, mesh=mesh).assignment(0))
    assert (words.unit, words.head, words.reduction) == ("parameter group", "module:", reduction)
    assert [words.name(number) for number in range(3)] == list(NAMES)
    assert words.where(1) == "parameter group blocks.0"


def test_buckets_have_numbers() -> None:
    """As long as nothing else is known. Below a column of cells there is room for the end of a name."""
    assert layout_words({"buckets": [{"bucket": 0}]}) == BUCKETS
    assert (BUCKETS.name(2), BUCKETS.cell(2), BUCKETS.head, BUCKETS.reduction) == (
        *("bucket 2", "2", "bucket", "all-reduce"),
    )
    assert (ending("model.encoder.layers.17"), ending("head")) == ("…coder.layers.17", "head")


@pytest.mark.parametrize("view", _VIEWS)
def test_pictures_and_figures_of_groups_speak_of_groups(view: str) -> None:
    """No word of buckets and all-reduces in a model that has none."""
    made = recorded(late=6.0)
    assert _OF_BUCKETS.findall(_texts(VIEWS[view].picture(made))) == []
    said = " ".join(_strings(figure(made, view).to_dict()))
    assert _OF_BUCKETS.findall(said) == []
    if view not in ("overlap", "findings"):
        assert "blocks.0" in said


def test_a_figure_explains_its_own_spans() -> None:
    """No words about other spans of its colour; paper and plot are transparent; lanes that only head others are left
    out."""
    names = [one.name for one in figure(recorded(), "parameter_groups").data]
    assert "exposed (thin line): the rank waits for it" in names
    assert not [one for one in names if one and ("→" in one or "backward's computation" in one)]
    names = [one.name for one in figure(recorded()).data]
    assert "reduce-scatter: launched on the last rank → reduced" in names
    assert "exposed: the rank waits for it: it adds to the step time" in names
    made = figure(recorded())
    assert {made.layout.paper_bgcolor, made.layout.plot_bgcolor} == {"rgba(0,0,0,0)"}
    clear = [one for one in made.data if one.type == "bar" and str(one.marker.color).startswith("rgba")]
    assert clear
    assert {one.insidetextfont.color for one in clear} == {made.layout.font.color}
    lanes = figure(recorded(), "parameter_groups").layout.yaxis.categoryarray
    assert list(lanes) == [f"{name} · rank {rank}" for name in NAMES for rank in range(2)]


def test_a_report_of_groups_speaks_of_groups() -> None:
    """Header, captions, figures and tables. As before."""
    said = _texts(page(recorded(late=6.0)))
    assert _OF_BUCKETS.findall(said) == []
    assert "3 parameter groups of 3 parameters" in said
    assert "reduce-scatter: launched on every rank, in flight" in said
    said = _texts(page(Training(2, 3).trained(12, ms=20)))
    assert "One row per bucket and rank." in said
    assert "all-reduce: launched on every rank, in flight" in said
    assert "parameter group" not in said


def test_groups_have_no_times_of_gradients() -> None:
    """A reader who chooses a group gets an answer, without times."""
    found = bucket_gradients(recorded(), 0, 5, 1)
    assert (found["ranks"], found["ms"]) == ([0, 1], [[None], [None]])
