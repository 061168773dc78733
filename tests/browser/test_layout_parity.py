"""The browser's decoder and layout against Python's."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ddp_lab.protocol.events import Kind
from ddp_lab.views.step_frames import StepFrame, StepFrames
from ddp_lab.views.timeline_layout import Size, lay_out
from ddp_lab.widgets import bundle
from ddp_lab.widgets.step_messages import encode_steps
from tests.training_events import Training

if TYPE_CHECKING:
    from playwright.sync_api import Page

_RUN = """async ({sources, header, body, sizes}) => {
  const load = (text) => import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
  const {decodeSteps} = await load(sources.decode);
  const {layOut} = await load(sources.lanes);
  const view = new DataView(Uint8Array.from(atob(body), (c) => c.charCodeAt(0)).buffer);
  const records = decodeSteps(header, view);
  return records.map((record) => sizes.map((size) => {
    const {bars, bands, ticks, rowHeight, contentHeight, window} = layOut(record, size);
    return JSON.stringify({bars, bands, ticks, rowHeight, contentHeight, window});
  }));
}"""
_SIZES: list[dict[str, Any]] = [
    {"width": 720, "height": 300, "axis": "common", "window": None},
    {"width": 720, "height": 300, "axis": "rank", "window": None},
    {"width": 333, "height": 2000, "axis": "common", "window": None},
    {"width": 720, "height": 300, "axis": "common", "window": [1.5, 3.25]},
]


def _frame(training: Training, until_kind: Kind | None = None) -> StepFrame:
    """One step; with `until_kind`, rank 1's events end before the first of that kind of its last bucket."""
    chunks = training.step(0, 10**12)
    if until_kind is not None:
        events = chunks[1]
        stop = np.flatnonzero((events["kind"] == until_kind) & (events["bucket"] == training.buckets - 1))[0]
        chunks[1] = events[:stop]
    frame = StepFrames(training.timeline(*enumerate(chunks))).latest()
    assert frame is not None
    return frame


_FRAMES = {
    "two ranks": lambda: _frame(Training(2, 3, delays={(1, 1): 2.0})),
    "eight ranks, fifty buckets": lambda: _frame(Training(8, 50, compute_ms=60, delays={(5, 20): 9.0})),
    "one rank": lambda: _frame(Training(1, 4)),
    "a rank that has not launched": lambda: _frame(Training(2, 3), Kind.BUCKET_LAUNCHED),
    "a rank whose bucket is not ready": lambda: _frame(Training(3, 2), Kind.BUCKET_READY),
    "a collective that does not end": lambda: _frame(Training(2, 3), Kind.BUCKET_REDUCED),
}


@pytest.mark.parametrize("name", _FRAMES)
def test_the_canvas_is_laid_out_as_the_svg(page: Page, name: str) -> None:
    """decode.js and lanes.js place every bar, band and tick where Python does, to a hundredth of a pixel."""
    frame = _FRAMES[name]()
    header, body = encode_steps([frame])
    sources = {name: bundle.module_text(f"steps/{name}.js") for name in ("decode", "lanes")}
    arguments = {"sources": sources, "header": header, "body": base64.b64encode(body).decode(), "sizes": _SIZES}
    (drawn,) = page.evaluate(_RUN, arguments)
    for size, text in zip(_SIZES, drawn, strict=True):
        wanted, got = lay_out(frame, Size(**size)), json.loads(text)
        assert [tick["label"] for tick in got["ticks"]] == [tick.label for tick in wanted.ticks]
        assert got["rowHeight"] == wanted.row_height
        assert got["contentHeight"] == wanted.content_height
        for kind in ("bars", "bands", "ticks"):
            expected = [vars(one) for one in getattr(wanted, kind)]
            assert len(got[kind]) == len(expected)
            for one, other in zip(got[kind], expected, strict=True):
                for field, value in other.items():
                    assert one[field] == pytest.approx(value, abs=0.01), (name, size, kind, other, one)
