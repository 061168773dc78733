"""The numbers and static pictures behind the dashboard's views."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

from ddp_lab.dashboard.live import Overhead, ViewFacts
from ddp_lab.dashboard.views import VIEWS as KNOWN
from ddp_lab.dashboard.views import figure
from ddp_lab.dashboard.views.buckets import bucket_gradients, readiness
from ddp_lab.dashboard.views.model_map import map_cells
from ddp_lab.dashboard.views.overlap import breakdown
from ddp_lab.dashboard.views.step_frames import END, FORWARD_BEGIN, FORWARD_END, PREVIOUS_END, StepFrames
from ddp_lab.dashboard.views.stragglers import waiting
from ddp_lab.dashboard.views.sync import sync
from ddp_lab.dashboard.views.timeline import find_step, phases
from ddp_lab.formatting import rate
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.timeline.tables.span_columns import Columns
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training, append
from tests.unit.backwards import rows

VIEWS = ("timeline", "sync", "overlap", "stragglers", "buckets", "findings")


def timeline_of(steps: int = 20, ranks: int = 2, **options: Any) -> Timeline:
    """Steps of a training of 20 ms each, with a forward."""
    return Training(ranks, 3, forward_ms=2.5, **options).trained(steps, ms=20)


def model(*names: str, buckets: int = 2) -> dict[str, Any]:
    """An assignment of parameters of 100, 200, ... bytes to buckets, in turn."""
    parameters = [{"index": index, "name": name, "bytes": 100 * (index + 1)} for index, name in enumerate(names)]
    members = [[index for index in range(len(names)) if index % buckets == bucket] for bucket in range(buckets)]
    return {
        "module": "Net",
        "parameters": parameters,
        "buckets": [{"bucket": bucket, "parameters": one} for bucket, one in enumerate(members)],
    }


def test_the_parts_of_a_step_add_up_to_it() -> None:
    """Other, forward, backward and exposed communication are the step; hidden is part of the backward's computation.
    Nearly all waiting is for the rank that is delayed, from the bucket on in which it is."""
    made = timeline_of()
    found = breakdown(made)
    steps = made.steps().groupby("step").mean(numeric_only=True)
    np.testing.assert_allclose(found.total[1:], steps["step_ms"].to_numpy()[1:], rtol=1e-6)
    np.testing.assert_allclose(found.alone + found.hidden, steps["compute_ms"], rtol=1e-6)
    np.testing.assert_allclose(found.forward, 2.5, atol=0.01)
    assert ((found.efficiency > 0) & (found.efficiency < 1)).all()
    found = waiting(timeline_of(ranks=3, delays={(2, 1): 4.0}))
    assert found.cells[2, 1:].sum() > 0.9 * found.cells.sum()
    assert found.share[2] > 0.6
    assert found.steps == 17  # without the first three


def test_hidden_communication_is_each_ranks_own() -> None:
    """A rank hides no more than it computes; the mean over the ranks comes after that, not before."""

    class Unequal(Timeline):
        def step_columns(self, reducer: int | None = None, last_steps: int | None = None) -> Columns:
            columns = super().step_columns(reducer, last_steps)
            rank = columns["rank"]
            columns["compute_ms"] = np.choose(rank, [10.0, 2.0, 4.0])
            columns["hidden_ms"] = np.choose(rank, [3.0, 8.0, 5.0])
            return columns

    made = Unequal()
    Training(3).feed(made, 0, 10**12)
    found = breakdown(made)
    assert found.hidden.tolist() == [3.0]  # of 3, 2 and 4; the means of both columns are 5.3 and 5.3
    np.testing.assert_allclose(found.alone, [16 / 3 - 3.0])


def test_rates_have_the_unit_that_fits() -> None:
    """A ring of four ranks moves 1.5 times the buffer's bytes over each link. The pictures of the gradient sync tell
    small and large bandwidths with three digits."""
    found = sync(timeline_of(ranks=4))
    np.testing.assert_allclose(found.bus_gb_s, 1.5 * found.algorithm_gb_s)
    rates = figure(timeline_of(bucket_bytes=1024), "sync").data[1].text
    assert all(re.fullmatch(r"[\d.]{3,4} (kB/s|MB/s) \(bus\)", one) for one in rates), rates
    assert (rate(123.4), rate(0.75), rate(0.0034), rate(2.5e-7)) == ("123 GB/s", "0.75 GB/s", "3.4 MB/s", "250 B/s")


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_is_drawn(view: str) -> None:
    """Its SVG is well-formed, loads nothing, and its style rules reach nothing but itself. Its plotly figure has data,
    a title, and colours that are names, not numbers on a scale."""
    made = timeline_of(delays={(1, 1): 4.0})
    text = KNOWN[view].picture(made)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "href" not in text
    for style in re.findall(r"<style>(.*?)</style>", text):
        assert all(rule.startswith(".ddp-picture ") for rule in re.findall(r"(?:^|\})([^{}]+)\{", style))
    drawn = figure(made, view)
    assert drawn.data
    assert drawn.layout.title.text
    for trace in drawn.data:
        colour = getattr(getattr(trace, "marker", None), "color", None)
        assert colour is None or isinstance(colour, str)


def test_the_phases_of_a_whole_step_touch() -> None:
    """From the end of the step before to the end of the backward nothing is left out; marks name what follows them."""
    made = timeline_of(3)
    frame, _ = find_step(made, 2, None)
    begin = int(frame.outside_ns[0, PREVIOUS_END])
    found = phases(frame, 0, [(0, begin + 10**6, "optimizer"), (1, begin + 10**6, "other rank's"), (0, 5, "long ago")])
    names = [one.name for one in found]
    assert names[:3] == ["optimizer, rest", "optimizer", "forward"]
    assert names[-2:] == ["backward", "finalize"]
    assert all(one.end == pytest.approx(after.begin) for one, after in itertools.pairwise(found))
    assert found[0].end - found[0].begin == pytest.approx(1.0)
    whole = figure(made, step=2, whole=True)
    assert {"rank 0", "rank 1"} <= set(whole.layout.yaxis.categoryarray)
    assert whole.layout.yaxis.showgrid is False  # lines would strike the phases' names out
    assert min(min(trace.base) for trace in whole.data if trace.type == "bar" and trace.base) < -2.5


def test_figures_say_what_is_missing() -> None:
    """An unknown view, and one with nothing to show, are errors in words."""
    with pytest.raises(ValueError, match="choose from timeline, overview"):
        figure(Timeline(), "histogram")
    for view in VIEWS:
        with pytest.raises(ValueError, match=r"[Nn]o |nothing "):
            figure(Timeline(), view)


def test_the_map_is_as_wide_as_the_bytes() -> None:
    """A parameter's cell is as wide as its share of the bytes, inside its module's; siblings touch. A chain of modules
    with one child each takes one row, named by all of them; widths may be equal."""
    cells, depth = map_cells(model("a.weight", "a.bias", "b.c.weight", "b.d.weight"))
    by_path = {cell.path: cell for cell in cells}
    assert depth == 4
    assert by_path["a.weight"].end - by_path["a.weight"].begin == pytest.approx(0.1)
    assert by_path[""].bucket == -1
    assert by_path["b.c.weight"].bucket == 0
    leaves = sorted((cell for cell in cells if cell.parameter >= 0), key=lambda cell: cell.begin)
    assert [cell.path for cell in leaves] == ["a.weight", "a.bias", "b.c.weight", "b.d.weight"]
    assert all(one.end == pytest.approx(after.begin) for one, after in itertools.pairwise(leaves))
    assert all(cell.depth + cell.rows == depth for cell in leaves)
    for cell in cells:
        parent = by_path.get(cell.path.rpartition(".")[0])
        assert parent is None or parent.begin - 1e-9 <= cell.begin <= cell.end <= parent.end + 1e-9
    cells, depth = map_cells(model("outer.inner.x.weight", "outer.inner.y.weight"), equal=True)
    assert [cell.name for cell in cells][:2] == ["Net", "outer.inner"]
    assert depth == 4
    assert cells[-1].end - cells[-1].begin == pytest.approx(0.5)


def _with_an_unused_parameter(steps: int = 5) -> Timeline:
    """A timeline whose parameter 3 never gets a gradient."""
    made, training = Timeline(), Training(2, 2)
    for rank in range(2):
        made.describe(rank, training.assignment())
    for step in range(steps):
        for rank, one in enumerate(training.step(step, 10**12 + step * 10**8)):
            made._enter(rank, None)
            made._append(rank, one[(one["kind"] != Kind.GRAD_READY) | (one["parameter"] != 3)])
    return made


def test_readiness_of_each_parameter() -> None:
    """A parameter's readiness is the median over ranks and steps; one without gradients is unused. The map of the
    buckets, as figure and as picture, marks those that never got a gradient, and no others."""
    made = _with_an_unused_parameter()
    found = readiness(made.views(0))
    assert found["used"] == [1, 1, 1, 0, 1, 1, 1, 1]
    assert found["ready"][3] is None
    assert readiness(made.views(0), 10)["used"][8:] == [0, 0], "the last ones may be unused, too"
    assert found["ready"][7] == pytest.approx(made.spans().query("bucket == 1").ready_ms.median(), rel=0.01)
    (trace,) = figure(made, "buckets").data
    at = list(trace.ids).index("layers.1.bias")
    assert trace.labels[at] == "bias · unused"
    assert trace.customdata[at] == "bucket 0, gradient never ready: unused"
    assert [one for one, shape in enumerate(trace.marker.pattern.shape) if shape] == [at]
    assert "hatched: 1 unused parameter" in figure(made, "buckets").layout.title.text
    text = KNOWN["buckets"].picture(made)
    assert "layers.1.bias: bucket 0, gradient never ready: unused" in text
    assert text.count("<path") == 1
    assert "hatched: 1 unused parameter" in text
    assert "unused" not in str(figure(timeline_of(3), "buckets"))


def test_before_a_step_has_ended_nothing_is_unused() -> None:
    """While the first step runs, or the first with other buckets, nothing is said of its parameters."""
    made, training = Timeline(), Training(2, 2)
    for rank, one in enumerate(training.step(0, 10**12)):
        made.describe(rank, training.assignment() | {"session": 1})
        made.extend(Batch(rank, 1, 0, 0, one[:5]))
    assert readiness(made.views(0), 8)["generation"] == -1
    assert "unused" not in str(figure(made, "buckets"))
    made = timeline_of(3)
    before = readiness(made.views(0), 12)
    for rank, one in enumerate(Training(2, 3).step(3, 2 * 10**12)):
        begun = one[:5].copy()
        begun["generation"] = 1
        made.describe(rank, {**Training(2, 3).assignment(), "generation": 1})
        made._append(rank, begun)
    assert readiness(made.views(0), 12) == before
    assert "unused" not in str(figure(made, "buckets"))


def test_gradients_of_a_bucket() -> None:
    """The times of a bucket's gradients are those of its parameters, from each rank's own backward begin."""
    made = timeline_of(3)
    found = bucket_gradients(made, 0, 1, 2)
    assert found["ranks"] == [0, 1]
    assert [len(row) for row in found["ms"]] == [4, 4]
    spans = made.spans().query("step == 1 and bucket == 2")
    assert [row[0] for row in found["ms"]] == pytest.approx(list(spans.first_ready_ms), abs=1e-3)
    assert bucket_gradients(made, 0, 99, 2)["ranks"] == []


def test_what_nobody_looks_at_is_not_computed() -> None:
    """Findings, late places and readiness are computed for the views that a page shows, once for each state."""
    made = timeline_of(30, delays={(1, 1): 4.0})
    facts = ViewFacts(made)
    assert facts.update() == {}
    facts.look("page", ["collectives"], 0)
    assert facts.update() == {}
    facts.look("page", ["timeline", "sync"], 0)
    assert list(facts.update()) == ["strip"]
    facts.look("page", ["stragglers"], 0)
    tables = [one["table"] for one in facts.update()["stragglers"]["blocks"] if "table" in one]
    assert [row[0] for row in tables[0]["rows"]] == ["1"]
    assert "layers.2.weight" in tables[0]["rows"][0][1]
    assert facts.update(force=True) == {}
    facts.look("page", ["findings"], 0)
    assert facts.update()["findings"]["blocks"][1]["advice"][0]["kind"] == "straggler"
    facts.look("page", [], 0)
    made.set_status(0, {"state": "idle"})
    assert facts.update(force=True) == {}


def test_the_overhead_counts_events_of_a_step() -> None:
    """Events of one rank and step, and the step's time, are those that were recorded; the cost is asked for once. What
    a model's construction records is no event of a step: not of its first steps, and not of another model's."""
    made, training = Timeline(), Training(2, 3, forward_ms=1.0)
    asked = []
    for step in range(10):
        training.feed(made, step, 10**12 + step * 10**7)
    overhead = Overhead(made, lambda: asked.append(1) or 35.0)
    for _ in range(2):
        found = overhead.read()
    assert found["events"] == len(training.step(0)[0])
    assert found["ns"] == 35.0
    assert found["kept"] == ""
    assert found["step"] == pytest.approx(10.0, abs=0.5)
    assert asked == [1]
    made, training = Timeline(), Training(2, 3)
    overhead = Overhead(made, None)
    events, began = len(training.step(0)[0]), 10**12
    for reducer in range(2):
        training.reducer = reducer
        for rank in range(2):
            marks = rows(*[{"host_ns": began, "kind": Kind.MARK}] * 250, first=training._sequence[rank])
            training._sequence[rank] += 250
            made.extend(Batch(rank, 1, int(marks["sequence"][0]), 0, marks))
        found = []
        for step in range(4):
            training.feed(made, step, began + (step + 1) * 10**7)
            found.append(overhead.read()["events"])
        assert found == [None, events, events, events]
        began += 10**9


def test_a_step_knows_its_forward_and_the_step_before() -> None:
    """A frame holds begin and end of the forward, and when each rank ended the step before. A forward (perhaps of an
    evaluation) is not shown; under a new assignment its step follows the backward's."""
    training = Training(2, 3, forward_ms=2.0)
    steps = [training.step(step, 10**12 + step * 10**8) for step in range(2)]
    first, second = StepFrames(training.timeline(*enumerate(steps[0]), *enumerate(steps[1]))).frames(0, 2)
    np.testing.assert_array_equal(second.outside_ns[:, PREVIOUS_END], first.bounds_ns[:, END])
    assert (first.outside_ns[:, PREVIOUS_END] == 0).all()
    forward = second.outside_ns[:, FORWARD_END] - second.outside_ns[:, FORWARD_BEGIN]
    np.testing.assert_allclose(forward, 2e6, rtol=0.01)
    training = Training(1, 2, forward_ms=2.0)
    timeline = training.timeline()
    timeline.describe(0, {**Training(1, 3).assignment(), "generation": 1, "session": 1})
    (events,) = Training(1, 3, forward_ms=2.0).step(0, 10**12)
    forward = np.isin(events["kind"], (Kind.FORWARD_BEGIN, Kind.FORWARD_END))
    events["generation"][~forward] = 1
    append(timeline, (0, events[forward]))
    frames = StepFrames(timeline)
    assert frames.reducers() == []
    assert frames.frame(0, 0) is None
    append(timeline, (0, events[~forward]))
    frame = frames.latest()
    assert (frame.generation, frame.shape) == (1, (1, 3))
    assert (frame.outside_ns[0, :2] > 0).all()
