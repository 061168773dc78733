"""The browser's decoder and layout, and the same bars in Python's scene."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ddp_lab.dashboard import bundle
from ddp_lab.dashboard.paint.palette import PARTS
from ddp_lab.dashboard.scene import Spans
from ddp_lab.dashboard.step_feed import encode_steps
from ddp_lab.dashboard.views.step_frames import StepFrame, StepFrames
from ddp_lab.dashboard.views.timeline import timeline_scene
from ddp_lab.protocol.events import Kind
from tests.training_events import Training

if TYPE_CHECKING:
    from playwright.sync_api import Page

_RUN = """async ({sources, header, body, sizes}) => {
  const load = (text) => import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
  const {decodeSteps} = await load(sources.store);
  const {layOut} = await load(sources.lanes);
  const [record] = decodeSteps(header, new DataView(Uint8Array.from(atob(body), (c) => c.charCodeAt(0)).buffer));
  return sizes.map((size) => {
    const {bars, bands, ticks, rowHeight, contentHeight, scale} = layOut(record, size);
    const time = (x) => scale.value(x);
    const times = bars.map(({part, row, bucket, x, width}) => [part, row, bucket, time(x), time(x + width)]);
    return {bars, bands, ticks, rowHeight, contentHeight, times};
  });
}"""
LEFT, RIGHT = 76, 14


def _laid_out(blank: Page, frame: StepFrame, *sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """What lanes.js makes of a step that store.js has read."""
    header, body = encode_steps([frame])
    sources = {name: bundle.module_text(f"steps/{name}.js") for name in ("store", "lanes")}
    sizes = tuple({"axis": "common", "window": None, **size} for size in sizes)
    arguments = {"sources": sources, "header": header, "body": base64.b64encode(body).decode(), "sizes": sizes}
    return blank.evaluate(_RUN, arguments)


def _frame(training: Training, until_kind: Kind | None = None) -> StepFrame:
    """One step; with `until_kind`, rank 1's events end before the first of that kind of its last bucket."""
    chunks = training.step(0, 10**12)
    if until_kind is not None:
        events = chunks[1]
        stop = np.flatnonzero((events["kind"] == until_kind) & (events["bucket"] == training.buckets - 1))[0]
        chunks[1] = events[:stop]
    return StepFrames(training.timeline(*enumerate(chunks))).latest()


_FRAMES = {
    "two ranks": lambda: _frame(Training(2, 3, delays={(1, 1): 2.0})),
    "eight ranks, fifty buckets": lambda: _frame(Training(8, 50, compute_ms=60, delays={(5, 20): 9.0})),
    "one rank": lambda: _frame(Training(1, 4)),
    "a rank that has not launched": lambda: _frame(Training(2, 3), Kind.BUCKET_LAUNCHED),
    "a rank whose bucket is not ready": lambda: _frame(Training(3, 2), Kind.BUCKET_READY),
    "a collective that does not end": lambda: _frame(Training(2, 3), Kind.BUCKET_REDUCED),
}


@pytest.mark.parametrize("name", _FRAMES)
def test_the_canvas_has_the_bars_of_the_scene(blank: Page, name: str) -> None:
    """store.js and lanes.js place every bar of every bucket where the picture that is saved has it."""
    frame = _FRAMES[name]()
    (got,) = _laid_out(blank, frame, {"width": 20_000, "height": 300})
    lanes = frame.shape[1] + 1
    wanted = [
        [PARTS.index(one.role), int(lane) // lanes, int(lane) % lanes - 1, begin, end]
        for one in timeline_scene(frame).panels[0].marks
        if isinstance(one, Spans) and one.name
        for lane, begin, end in zip(one.lane, one.begin, one.end, strict=True)
    ]
    assert len(got["times"]) == len(wanted)
    for one, other in zip(sorted(got["times"]), sorted(wanted), strict=True):
        assert one == pytest.approx(other, abs=0.001)


def test_everything_is_inside_the_plot(blank: Page) -> None:
    """No bar, band or tick leaves the plot, whatever part of the axis is shown."""
    windows = (None, [10.0, 20.0], [-5.0, 500.0])
    frame = _frame(Training(8, 50, compute_ms=60))
    for made in _laid_out(blank, frame, *({"width": 640, "height": 300, "window": window} for window in windows)):
        edges = [edge for bar in made["bars"] for edge in (bar["x"], bar["x"] + bar["width"])]
        edges += [band[name] for band in made["bands"] for name in ("x", "split", "end")]
        edges += [tick["x"] for tick in made["ticks"]]
        assert min(edges) >= LEFT - 1e-6
        assert max(edges) <= 640 - RIGHT + 1e-6
        assert max(bar["y"] + bar["height"] for bar in made["bars"]) <= made["contentHeight"]


def test_rows_shrink_before_the_content_grows(blank: Page) -> None:
    """Rows are at most 20 pixels high and shrink to 3; then the content gets higher than the room."""
    shapes = ((2, 3), (4, 20), (8, 50))
    small, large, huge = (_laid_out(blank, _frame(Training(*one)), {"width": 640, "height": 420})[0] for one in shapes)
    assert small["rowHeight"] == 20
    assert 3 <= large["rowHeight"] < 20
    assert large["contentHeight"] <= 420
    assert huge["rowHeight"] == 3
    assert huge["contentHeight"] > 420


def test_each_ranks_own_axis_begins_at_zero(blank: Page) -> None:
    """On the ranks' own axis every backward begins at the left edge; marks of time are round numbers."""
    sizes = ({"width": 640, "height": 300, "axis": "rank"}, {"width": 650, "height": 300, "window": [0.0, 10.0]})
    own, common = _laid_out(blank, _frame(Training(4, 3)), *sizes)
    assert [band["x"] for band in own["bands"]] == [LEFT] * 4
    assert [tick["label"] for tick in common["ticks"]] == ["0", "2", "4", "6", "8", "10"]
