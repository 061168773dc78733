"""The Chrome trace: valid, complete, with arrows, and bounded."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.protocol.events import Kind
from ddp_lab.timeline.recorded import chrome_trace
from ddp_lab.timeline.tables.gradients import GRADIENT_COLUMNS, gradient_columns
from ddp_lab.timeline.tables.span_columns import SPAN_COLUMNS, STEP_COLUMNS
from ddp_lab.timeline.timeline import Timeline
from tests import trace_format
from tests.benchmarks import trace
from tests.training_events import Training
from tests.unit.backwards import MS, Bucket, Recorder, assignment

STEPS = 4


def _written(timeline: Timeline, folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(timeline.to_perfetto(folder / "trace.json").read_text())
    return document


def test_faults_are_found(tmp_path: Path) -> None:
    """The check of the format refuses an event that breaks it."""
    document = _written(Training().trained(STEPS, ms=50), tmp_path)
    event = {"name": "x", "ph": "X", "pid": 0, "tid": 1, "ts": 1.0, "dur": 1.0}
    flow = {"ph": "s", "cat": "flow", "id": 999, "dur": None}
    for fault in ({"dur": None}, {"dur": -1.0}, {"pid": "0"}, {"pid": 77}, {"ph": "Q"}, flow):
        broken = {name: value for name, value in (event | fault).items() if value is not None}
        events = [*document["traceEvents"], broken]
        assert trace_format.faults({**document, "traceEvents": events}) != [], fault


def test_tracks_and_slices(tmp_path: Path) -> None:
    """Valid: slices follow each other, each arrow's ends lie on slices. A process for each rank and one for all, a
    track for each bucket, gradients by name, times as recorded."""
    timeline = Training(ranks=2, buckets=2, parameters=2).trained(STEPS, ms=50)
    document = _written(timeline, tmp_path)
    assert trace_format.faults(document) == []
    events = document["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["all ranks", "rank 0", "rank 1"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"DigitsNet [0]", "[0] gradients", "[0] bucket 0", "[0] bucket 1"}
    slices = [e for e in events if e["ph"] == "X"]
    gradients = [e for e in slices if e["name"].startswith("layers.")]
    assert Counter(e["name"] for e in gradients) == {
        f"layers.{n}.{what}": 2 * STEPS for n in (0, 1) for what in ("weight", "bias")
    }
    spans = timeline.spans()
    one = next(e for e in slices if e["name"] == "all_reduce" and e["pid"] == 1 and e["args"]["bucket"] == 1)
    row = spans[(spans["rank"] == 1) & (spans.bucket == 1) & (spans.step == one["args"]["step"])].iloc[0]
    assert one["ts"] == row.launched_ns / 1e3
    assert one["dur"] == pytest.approx((row.reduced_ns - row.launched_ns) / 1e3)
    assert one["args"]["bytes"] == row.bytes
    assert len([e for e in slices if e["name"] == "collective"]) == STEPS * 2


def test_arrows_lead_from_the_gradient_to_everybodys_collective(tmp_path: Path) -> None:
    """An arrow starts at the gradient that completes the bucket, and passes the rank's collective."""
    events = _written(Training(ranks=2, buckets=2, parameters=2).trained(STEPS, ms=50), tmp_path)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def at(event: dict[str, Any]) -> dict[str, Any]:
        return next(
            s
            for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            and s["name"] not in ("fill", "in line")
        )

    chains: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            chains.setdefault(event["id"], []).append(at(event))
    for gradient, rank, everybody in chains.values():
        assert gradient["name"] in ("layers.0.bias", "layers.1.bias"), "the last one of its bucket"
        assert (rank["name"], everybody["name"]) == ("all_reduce", "collective")
        assert gradient["pid"] == rank["pid"]
        assert gradient["args"]["bucket"] == rank["args"]["bucket"]
        assert gradient["args"]["step"] == rank["args"]["step"] == everybody["args"]["step"]


def test_what_is_beyond_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limits only the gradients that complete a bucket are shown, and an arrow leads to each collective from
    the rank that launched last; the trace says so."""
    monkeypatch.setattr(chrome_trace, "MOST_GRADIENTS", 10)
    document = _written(Training(ranks=2, buckets=2, parameters=2).trained(STEPS, ms=50), tmp_path)
    assert trace_format.faults(document) == []
    names = Counter(e["name"] for e in document["traceEvents"] if e["name"].startswith("layers."))
    assert names == {"layers.0.bias": 2 * STEPS, "layers.1.bias": 2 * STEPS}
    monkeypatch.setattr(chrome_trace, "MOST_ARROWS", 10)
    document = _written(Training(ranks=3, delays={(1, 0): 5.0}).trained(STEPS, ms=50), tmp_path)
    assert trace_format.faults(document) == []
    begins = [event for event in document["traceEvents"] if event["ph"] == "s"]
    assert [event["pid"] for event in begins] == [1] * len(begins)
    assert len(begins) == STEPS * 3
    assert "launched last" in document["otherData"]["notes"]


def test_completing_gradients_alone() -> None:
    """Of many gradients only the completing ones are looked for: the same ones, with the same times."""
    timeline = Training(ranks=2, buckets=3, parameters=4).trained(STEPS, ms=50)
    whole, alone = (
        gradient_columns(timeline.views(), timeline._book.buckets(), completing=one) for one in (False, True)
    )
    chosen = whole["completes"]
    rows = [
        sorted(zip(*(columns[name].tolist() for name in GRADIENT_COLUMNS), strict=True))
        for columns in ({name: values[chosen] for name, values in whole.items()}, alone)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2 * STEPS * 3


def test_compressed_and_some_steps(tmp_path: Path) -> None:
    """A trace may be compressed and hold the newest steps only."""
    path = Training().trained(STEPS, ms=50).to_perfetto(tmp_path / "trace.json.gz", last_steps=2)
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert trace_format.faults(document) == []
    assert {e["args"]["step"] for e in document["traceEvents"] if e["ph"] == "X"} == {STEPS - 2, STEPS - 1}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 2**52), st.integers(0, 10**15), st.none() | st.integers(0, 10**9)), max_size=30),
    st.sampled_from(["µ 100 %", "%d", '"']),
)
def test_slices_hold_their_numbers(rows: list[tuple[int, int, int | None]], name: str) -> None:
    """Numbers of any size come out of the text as they went in, with their decimals; what is unknown is left out."""
    nothing = np.zeros(len(rows), np.int64)
    begin, last = (np.array([row[place] for row in rows], np.int64) for place in (0, 1))
    hidden = np.array([np.nan if row[2] is None else row[2] / 1e6 for row in rows])
    spans = dict.fromkeys(SPAN_COLUMNS, nothing) | {"step": np.arange(len(rows)), "launched_ns": begin}
    spans |= {"reduced_ns": begin + last, "hidden_ms": hidden, "exposed_ms": hidden}
    steps = dict.fromkeys(STEP_COLUMNS, nothing[:0])
    gradients = dict.fromkeys(GRADIENT_COLUMNS, nothing) | {"begin_ns": begin, "end_ns": begin + last}
    gradients["completes"] = nothing > 0
    file = BytesIO()
    with patch.object(chrome_trace, "_AT_ONCE", 7):  # several pieces
        chrome_trace.write(file, chrome_trace.Trace(spans, steps, gradients, {}, {0: [name]}))
    slices = [one for one in json.loads(file.getvalue())["traceEvents"] if one["ph"] == "X"]
    found = [(one["ts"], one["dur"], one["args"].get("hidden_ms")) for one in slices if one["name"] == "all_reduce"]
    assert found == [(at / 1e3, took / 1e3, None if ns is None else ns / 1e6) for at, took, ns in rows]
    assert [one["args"]["step"] for one in slices if one["name"] == name] == [0] * len(rows)


def test_devices_marks_and_steps_that_go_on(tmp_path: Path) -> None:
    """Device spans get tracks of their own, marks are instants, and an unfinished step leaves a valid trace."""
    timeline, recorder = Timeline(), Recorder(0)
    timeline.describe(0, assignment([[0, 1]], ranks=[0]) | {"session": 1})
    timeline.describe(0, {"type": "mark", "index": 0, "name": 'epoch "2"', "session": 1})
    recorder.record(Kind.MARK, 19 * MS, parameter=0)
    recorder.backward(0, 20 * MS, [Bucket((1.0, 2.0), 2.0, 4.0)], 3.0)
    times = {"device_begin_ns": 22 * MS, "device_end_ns": 25 * MS}
    recorder.record(Kind.DEVICE_SPAN, 30 * MS, reducer=0, step=0, bucket=0, **times)
    recorder.record(Kind.BACKWARD_BEGIN, 40 * MS, reducer=0, step=1)
    recorder.record(Kind.GRAD_READY, 41 * MS, reducer=0, step=1, bucket=0, parameter=0)
    timeline.extend(recorder.batch())
    document = _written(timeline, tmp_path)
    assert trace_format.faults(document) == []
    events = document["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ['epoch "2"']
    (device,) = [e for e in events if e["name"] == "all_reduce (device)"]
    assert (device["ts"], device["dur"]) == (22_000.0, 3_000.0)
    assert trace_format.faults(_written(Timeline(), tmp_path)) == []


def test_the_measurement_writes_valid_traces(tmp_path: Path) -> None:
    """The made-up run of the benchmark `trace` gives a valid trace with an arrow for each rank, step and bucket."""
    document = _written(trace.make_timeline(2, 5, 3, 12), tmp_path)
    assert trace_format.faults(document) == []
    assert Counter(event["ph"] for event in document["traceEvents"])["s"] == 2 * 5 * 3
