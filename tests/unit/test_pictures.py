"""Layout, SVG and plotly figures of a step."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.timeline import Timeline
from ddp_lab.views.paint.svg import empty_svg, step_svg
from ddp_lab.views.step_frames import StepFrame, StepFrames
from ddp_lab.views.timeline_figure import timeline_figure
from ddp_lab.views.timeline_layout import LABEL_WIDTH, RIGHT_MARGIN, Part, Size, lay_out, ticks
from tests.training_events import Training


def frame_of(training: Training) -> StepFrame:
    """One step of a training."""
    frame = StepFrames(training.timeline(*enumerate(training.step(0, 10**12)))).latest()
    assert frame is not None
    return frame


@pytest.fixture
def timeline() -> Timeline:
    """Three steps of two ranks and three buckets."""
    made, training = Timeline(), Training(2, 3, delays={(1, 1): 2.0})
    for step in range(3):
        training.feed(made, step, 10**12 + step * 10**8)
    return made


def test_parts_follow_each_other() -> None:
    """The bars of a bucket touch: filling, queued, waiting, reducing, from left to right."""
    layout = lay_out(frame_of(Training(2, 3, delays={(1, 1): 2.0})), Size(800, 400))
    for row in range(2):
        for bucket in range(3):
            bars = [bar for bar in layout.bars if (bar.row, bar.bucket) == (row, bucket) and bar.part != Part.EXPOSED]
            assert [bar.part for bar in bars] == sorted(bar.part for bar in bars)
            for one, after in itertools.pairwise(bars):
                assert one.x + one.width == pytest.approx(after.x)


def test_the_late_rank_does_not_wait() -> None:
    """In the bucket where rank 1 is late, rank 0 waits as long as rank 1 is late, and rank 1 not at all."""
    layout = lay_out(frame_of(Training(2, 3, delays={(1, 1): 5.0})), Size(1000, 400))
    waiting = {(bar.row, bar.bucket): bar.width for bar in layout.bars if bar.part == Part.WAITING}
    assert (1, 1) not in waiting
    assert waiting[0, 1] > 200


def test_everything_is_inside_the_plot() -> None:
    """No bar, band or tick leaves the plot, whatever part of the axis is shown."""
    frame = frame_of(Training(8, 50, compute_ms=60))
    for window in (None, (10.0, 20.0), (-5.0, 500.0)):
        layout = lay_out(frame, Size(640, 300, window=window))
        edges = [edge for bar in layout.bars for edge in (bar.x, bar.x + bar.width)]
        edges += [edge for band in layout.bands for edge in (band.x, band.split, band.end)]
        edges += [tick.x for tick in layout.ticks]
        assert min(edges) >= LABEL_WIDTH - 1e-6
        assert max(edges) <= 640 - RIGHT_MARGIN + 1e-6
        assert max(bar.y + bar.height for bar in layout.bars) <= layout.content_height


def test_rows_shrink_before_the_content_grows() -> None:
    """Rows are at most 20 pixels high and shrink to 3; then the content gets higher than the room."""
    small, large, huge = (lay_out(frame_of(Training(*shape)), Size(640, 420)) for shape in ((2, 3), (4, 20), (8, 50)))
    assert small.row_height == 20
    assert 3 <= large.row_height < 20
    assert large.content_height <= 420
    assert huge.row_height == 3
    assert huge.content_height > 420


def test_a_collective_that_does_not_end_is_open() -> None:
    """Without its end, a bar reaches to the last event and is marked as open."""
    training = Training(2, 1)
    chunks = [(rank, one[one["kind"] != Kind.BUCKET_REDUCED]) for rank, one in enumerate(training.step(0, 10**12))]
    frame = StepFrames(training.timeline(*chunks)).frame(0, 0)
    assert frame is not None
    bars = [bar for bar in lay_out(frame, Size(640, 300)).bars if bar.part == Part.REDUCING]
    assert [bar.open for bar in bars] == [True, True]


def test_each_ranks_own_axis_begins_at_zero() -> None:
    """On the ranks' own axis every backward begins at the left edge."""
    layout = lay_out(frame_of(Training(4, 3)), Size(640, 300, axis="rank"))
    assert [band.x for band in layout.bands] == [LABEL_WIDTH] * 4


@pytest.mark.parametrize(
    ("window", "labels"),
    [
        ((0.0, 10.0), ["0", "2", "4", "6", "8", "10"]),
        ((0.0, 0.012), ["0.000", "0.002", "0.004", "0.006", "0.008", "0.010", "0.012"]),
    ],
)
def test_ticks_are_round_numbers(window: tuple[float, float], labels: list[str]) -> None:
    """Ticks are multiples of 1, 2 or 5, with as many digits as they need."""
    assert [tick.label for tick in ticks(window, 560)] == labels


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (8, 50), (64, 50)])
def test_the_svg_is_well_formed_and_bounded(shape: tuple[int, int]) -> None:
    """The SVG is valid XML, names every rank that it draws, and stays below 200 kB and 1,100 pixels."""
    text = step_svg(frame_of(Training(*shape, compute_ms=60)), "Net<&>, ")
    root = ElementTree.fromstring(text)
    words = "".join(root.itertext())
    assert "Net<&>, step 0" in words
    assert "rank 0" in words
    assert len(text) < 200_000
    assert float(root.attrib["height"]) < 1_100
    if shape[0] == 64:
        assert "to 63 are not drawn" in words


def test_the_empty_svg_states_its_text() -> None:
    """Without a step there is a picture that says so."""
    assert "nothing & nobody" in "".join(ElementTree.fromstring(empty_svg("nothing & nobody")).itertext())


def test_the_figure_has_a_bar_for_each_part(timeline: Timeline) -> None:
    """The plotly figure holds every bar of the layout, with plain CSS colours, a unit on the axis and hover texts."""
    figure = timeline_figure(timeline)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) >= 2 * 3 * 3
    assert all(isinstance(trace.marker.color, str) for trace in bars)
    assert "milliseconds" in figure.layout.xaxis.title.text
    assert figure.layout.title.text == "Bucket timeline of DigitsNet: step 2"
    assert "last to launch: rank 1" in bars[0].customdata[1]


def test_the_figure_of_a_step_or_rank(timeline: Timeline) -> None:
    """A step and some ranks can be chosen; what is not there is named in the error."""
    figure = timeline_figure(timeline, step=1, ranks=[1])
    assert {name.split(" · ")[0] for trace in figure.data if trace.type == "bar" for name in trace.y} == {"rank 1"}
    with pytest.raises(ValueError, match="steps 0 to 2"):
        timeline_figure(timeline, step=9)
    with pytest.raises(ValueError, match=r"ranks: \[0, 1\]"):
        timeline_figure(timeline, ranks=[5])
    with pytest.raises(ValueError, match="no step has been recorded"):
        timeline_figure(Timeline())
