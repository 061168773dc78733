"""The scene, SVG and plotly figures of a step; a figure costs no two seconds of grammars."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from ddp_lab.dashboard.paint.palette import PARTS
from ddp_lab.dashboard.paint.scene_svg import empty_svg, framed, round_between
from ddp_lab.dashboard.scene import Spans
from ddp_lab.dashboard.views.step_frames import StepFrame, StepFrames
from ddp_lab.dashboard.views.timeline import timeline_figure, timeline_scene
from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training


def frame_of(training: Training) -> StepFrame:
    """One step of a training."""
    return StepFrames(training.timeline(*enumerate(training.step(0, 10**12)))).latest()


@pytest.fixture
def timeline() -> Timeline:
    """Three steps of two ranks and three buckets."""
    return Training(2, 3, delays={(1, 1): 2.0}).trained(3, ms=100)


def parts_of(frame: StepFrame) -> dict[tuple[int, str], tuple[float, float]]:
    """(lane, part) -> begin and end, of the buckets' bars."""
    found = (mark for mark in timeline_scene(frame).panels[0].marks if isinstance(mark, Spans) and mark.name)
    return {
        (int(lane), one.role): (begin, end)
        for one in found
        for lane, begin, end in zip(one.lane, one.begin, one.end, strict=True)
    }


def test_parts_follow_each_other() -> None:
    """The bars of a bucket touch: filling, ready (queued), waiting for peers, all-reduce, from left to right. In the
    bucket where rank 1 is late, rank 0 waits as long as rank 1 is late, and rank 1 not at all. Without its end, a bar
    reaches to the last event."""
    parts = parts_of(frame_of(Training(2, 3, delays={(1, 1): 2.0})))
    for lane in (1, 2, 3, 5, 6, 7):  # below the ranks' own
        bars = [parts[lane, part] for part in PARTS[:4] if (lane, part) in parts]
        assert len(bars) >= 3
        assert all(one[1] == pytest.approx(after[0]) for one, after in itertools.pairwise(bars))
    parts = parts_of(frame_of(Training(2, 3, delays={(1, 1): 5.0})))
    assert (6, "waiting") not in parts
    begin, end = parts[2, "waiting"]
    assert end - begin == pytest.approx(5.0, abs=1.5)
    training = Training(2, 1)
    chunks = [(rank, one[one["kind"] != Kind.BUCKET_REDUCED]) for rank, one in enumerate(training.step(0, 10**12))]
    frame = StepFrames(training.timeline(*chunks)).frame(0, 0)
    parts = parts_of(frame)
    assert parts[1, "reducing"][1] == parts[3, "reducing"][1] == pytest.approx(frame.extent_ms()[:, 1].max())


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.0, 10.0), ["0", "2", "4", "6", "8", "10"]),
        ((0.0, 0.012), ["0.000", "0.002", "0.004", "0.006", "0.008", "0.010", "0.012"]),
        ((-3.0, 7.0), ["-2", "0", "2", "4", "6"]),
    ],
)
def test_marks_are_round_numbers(ends: tuple[float, float], labels: list[str]) -> None:
    """Marks of time are multiples of 1, 2 or 5, with as many digits as they need."""
    assert [text for _, text in round_between(*ends, 7)] == labels


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (8, 50), (64, 50)])
def test_the_svg_is_well_formed_and_bounded(shape: tuple[int, int]) -> None:
    """The SVG is valid XML, names every rank that it draws, and stays below 200 kB and 1,100 pixels."""
    text = framed(timeline_scene(frame_of(Training(*shape, compute_ms=60)), "Net<&>"))
    root = ElementTree.fromstring(text)
    words = "".join(root.itertext())
    assert "Net<&>: step 0" in words
    assert "rank 0" in words
    assert len(text) < 200_000
    assert float(root.attrib["height"]) < 1_100
    if shape[0] == 64:
        assert "to rank 63 are not drawn" in words


def test_the_empty_svg_states_its_text() -> None:
    """Without a step there is a picture that says so."""
    assert "nothing & nobody" in "".join(ElementTree.fromstring(empty_svg("nothing & nobody")).itertext())


def test_the_figure_has_a_bar_for_each_part(timeline: Timeline) -> None:
    """The plotly figure holds every bar of the layout, with plain CSS colours, a unit on the axis and hover texts. A
    step and some ranks can be chosen; what is not there is named in the error."""
    figure = timeline_figure(timeline)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) >= 2 * 3 * 3
    assert all(isinstance(trace.marker.color, str) for trace in bars)
    assert "milliseconds" in figure.layout.xaxis.title.text
    assert figure.layout.title.text == "Bucket timeline of DigitsNet: step 1"  # of three: neither short nor long
    assert "last to launch: rank 1" in bars[0].customdata[1]
    figure = timeline_figure(timeline, step=1, ranks=[1])
    assert {name.split(" · ")[0] for trace in figure.data if trace.type == "bar" for name in trace.y} == {"rank 1"}
    with pytest.raises(ValueError, match="steps 0 to 2"):
        timeline_figure(timeline, step=9)
    with pytest.raises(ValueError, match=r"ranks are \[0, 1\]"):
        timeline_figure(timeline, ranks=[5])
    with pytest.raises(ValueError, match="no step has been recorded"):
        timeline_figure(Timeline())
