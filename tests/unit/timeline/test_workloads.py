"""Workloads, links and predictions from a timeline's events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddp_lab.analysis.steps import SLOWEST_COPY
from ddp_lab.dashboard.step_feed import StepFeed
from ddp_lab.protocol.events import Kind
from ddp_lab.simulation.calibration import Measured, calibrated, errors
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.simulator import Configuration, simulate
from ddp_lab.simulation.workload import Workload
from ddp_lab.timeline import what_if
from ddp_lab.timeline.timeline import Timeline
from tests.unit.backwards import MS, Bucket, Recorder, assignment
from tests.unit.timeline.test_parameter_groups import recorded as recorded_groups

MIB = 1 << 20
# Rank 1's last gradients come 3 ms late. Collectives: 2 to 6 ms (hidden), 10 or 13 to 15 (exposed).
FIRST = Bucket((1.0, 2.0), 2.0, 6.0, (3, 2), 2 * MIB)
BUCKETS = [
    [FIRST, Bucket((8.0, 10.0), 10.0, 15.0, (1, 0), MIB)],
    [FIRST, Bucket((11.0, 13.0), 13.0, 15.0, (1, 0), MIB)],
]
SIZES = [MIB // 2, MIB // 2, MIB, MIB]


def described() -> dict[str, Any]:
    """The assignment of those buckets, as ranks describe it."""
    options = {"bucket_cap_mb_list": [2.0, 1.0]}
    return assignment([[3, 2], [1, 0]], generation=1, sizes=SIZES) | {"session": 1, "options": options}


def trained(
    *buckets: list[Bucket], steps: int = 9, finalize: tuple[float, float] = (10.0, 10.0), **fields: Any
) -> Timeline:
    """Steps of two ranks, every 18 ms, whose buckets have these times; `fields`: of their description."""
    made = Timeline()
    for rank in range(2):
        made.describe(rank, described() | fields)
        recorder = Recorder(rank)
        for step in range(steps):
            recorder.backward(step, (step + 1) * 18 * MS, buckets[rank % len(buckets)], finalize[rank], generation=1)
        made.extend(recorder.batch())
    return made


def recorded(steps: int = 20) -> Timeline:
    """Steps of 18 ms: 2 between the backwards' ends and the next forward, 1 forward, 15 backward."""
    return trained(*BUCKETS, steps=steps, finalize=(10.0, 13.0))


def test_a_workload_holds_what_the_events_state() -> None:
    """Times of readiness by rank and parameter, phases, busy intervals, order and caps are those of the events. Without
    steps, and with too few, the user is told what to do."""
    found = recorded().workload()
    assert found.names == ("layer0", "layer1", "layer2", "layer3")
    assert found.ready_ns.tolist() == [[10e6, 8e6, 2e6, 1e6], [13e6, 11e6, 2e6, 1e6]]
    assert found.computed_ns.tolist() == [10e6, 13e6]
    assert found.forward_ns.tolist() == [1e6, 1e6]
    assert found.other_ns.tolist() == [2e6, 2e6]
    assert found.busy_ns[0].tolist() == [[2e6, 6e6], [13e6, 15e6]]
    assert found.order == (3, 2, 1, 0)
    assert found.caps == (2 * MIB, MIB)
    assert found.world_size == 2
    with pytest.raises(ValueError, match="train some steps"):
        Timeline().workload()
    with pytest.raises(ValueError, match="train a few more"):
        recorded(1).workload()
    with pytest.raises(ValueError, match="a model with fully_shard has no buckets: how long its step would take"):
        recorded_groups().simulate()
    with pytest.raises(ValueError, match="needs a CommModel"):
        recorded().simulate(2.0)  # type: ignore[arg-type]


def test_the_recorded_step_is_predicted() -> None:
    """With a link fitted to the recorded all-reduces the recorded configuration takes the recorded 18 ms."""
    timeline = recorded()
    link = what_if.fit_link(timeline)
    assert link.time_ns([MIB, 2 * MIB], 2) == pytest.approx([2e6, 4e6])
    found = timeline.simulate()
    assert found.step_ms == pytest.approx(18.0, abs=0.1)
    assert found.configuration.bucket_cap_mb == [2.0, 1.0]
    assert sum(value for name, value in found.breakdown.items() if name != "hidden") == pytest.approx(found.step_ms)
    assert timeline.simulate(without_rank=1).step_ms == pytest.approx(15.0, abs=0.1)
    assert timeline.simulate(world_size=1).step_ms == pytest.approx(16.0, abs=0.1)
    assert "18.0" in repr(found)


def test_a_prediction_is_a_timeline() -> None:
    """The predicted events give back the predicted times, through the same tables as recorded ones."""
    found = recorded().simulate(bucket_cap_mb=1)
    predicted = found.timeline()
    spans = predicted.columns()
    assert set(spans["rank"].tolist()) == {0, 1}
    assert len(found.prediction.buckets) == 3
    of_rank = (spans["rank"] == 1) & (spans["step"] == 0)
    assert spans["reduced_ns"][of_rank] == pytest.approx(found.prediction.reduced_ns, abs=2)
    assert spans["launched_ns"][of_rank] == pytest.approx(found.prediction.launched_ns[1], abs=2)
    again = predicted.workload()
    assert again.ready_ns == pytest.approx(found.prediction.gradients_ns - found.prediction.begin_ns[:, None], abs=3)
    assert what_if.step_times(predicted) == pytest.approx(found.prediction.step_ns, rel=1e-3)
    assert predicted.reducers()[0].module == "Net (predicted)"
    assert predicted.figure().data


def test_all_reduces_that_had_the_link_to_themselves() -> None:
    """A collective that was launched while one before it was under way is left out of the link's points. Of PowerSGD no
    time is expected; of a hook of one's own, that of the bucket."""
    timeline = trained([FIRST, Bucket((4.0, 5.0), 5.0, 8.0, (1, 0), MIB)], finalize=(5.0, 5.0))
    assert set(what_if.all_reduces(timeline)) == {(2 * MIB, 4e6, 2)}
    assert float(what_if.fit_link(timeline).time_ns(MIB, 2)) == pytest.approx(2e6)
    made, link = recorded(), CommModel(0.0, 4e6 / MIB)
    feed = StepFeed(made, lambda *message: None)
    for name, wanted in [("powerSGD_hook", [None, None]), ("mine", [8e6, 4e6]), (None, [8e6, 4e6])]:
        for rank in range(2):
            made.describe(rank, described() | {"options": HOOK | {"comm_hook": name}})
        assert feed.expected(0, 1, link)["ns"] == wanted


HALVED = [{"bucket": 0, "bytes": MIB, "parameters": [3, 2]}, {"bucket": 1, "bytes": MIB // 2, "parameters": [1, 0]}]
HOOK = {"bucket_cap_mb_list": [2.0, 1.0], "comm_hook": "fp16_compress_hook"}


@pytest.mark.parametrize("fields", [{"buckets": HALVED}, {"options": HOOK}, {"buckets": HALVED, "options": HOOK}])
def test_bytes_that_travel(fields: dict[str, object]) -> None:
    """With mixed precision, or a hook that rounds to 16 bits, half of the parameters' bytes count: for a link that is
    fitted to these steps, and for one that was measured apart."""
    made = recorded()
    for rank in range(2):
        made.describe(rank, described() | fields)
    assert {size for size, _, _ in what_if.all_reduces(made)} == {MIB, MIB // 2}
    assert what_if.fit_link(made).time_ns([MIB // 2, MIB], 2) == pytest.approx([2e6, 4e6])
    assert made.simulate().step_ms == pytest.approx(18.0, abs=0.1)
    link, workload = CommModel(0.0, 4e6 / MIB), made.workload()  # two ranks send the buffer's bytes once
    found = simulate(workload, Configuration([2.0, 1.0]), link)
    assert (found.reduced_ns - found.begun_ns).tolist() == pytest.approx([4e6, 2e6])
    feed = StepFeed(made, lambda *message: None)
    assert feed.expected(0, 1, link)["ns"] == pytest.approx([4e6, 2e6])


@pytest.mark.parametrize(
    ("used", "ready"),
    [
        ([FIRST, Bucket((8.0,), 10.0, 15.0, (1,), MIB)], [8e6, 8e6, 2e6, 1e6]),
        ([Bucket((2.0,), 2.0, 6.0, (2,), 2 * MIB), BUCKETS[0][1]], [10e6, 8e6, 2e6, 2e6]),
    ],
    ids=["the first", "the last"],
)
def test_an_unused_parameter_is_ready_with_its_bucket(used: list[Bucket], ready: list[float]) -> None:
    """A parameter without a single gradient does not hold up the workload, wherever the module has it."""
    assert trained(used).workload().ready_ns[0].tolist() == ready


def test_what_follows_a_tiny_bucket_is_not_all_copying() -> None:
    """Half a millisecond after a last bucket of 16 bytes does not make a bucket of 3 MiB take 98 s."""
    small = [one | {"bytes": 8} for one in described()["parameters"][:2]]
    fields = {"parameters": [*small, *described()["parameters"][2:]]}
    fields["buckets"] = [described()["buckets"][0], {"bucket": 1, "bytes": 16, "parameters": [1, 0]}]
    timeline = Timeline()
    for rank in range(2):
        timeline.describe(rank, described() | fields)
        recorder = Recorder(rank)
        for step in range(9):
            recorder.backward(step, (step + 1) * 18 * MS, [FIRST, replace(BUCKETS[0][1], bytes=16)], 10.0, generation=1)
        batch = recorder.batch()
        batch.events["host_ns"][batch.events["kind"] == Kind.BACKWARD_END] += MS // 2
        timeline.extend(batch)
    assert timeline.workload().write_back_ns == (0.0, SLOWEST_COPY)
    assert timeline.simulate(CommModel(1e6, 1.0), bucket_cap_mb=25).step_ms < 40


def on_devices(*spans: list[tuple[int, int]], **fields: object) -> Timeline:
    """Nine steps of ranks whose devices run the buckets from and to these ms of the backward."""
    timeline = Timeline()
    for rank, of_rank in enumerate(spans):
        timeline.describe(rank, described() | fields)
        recorder = Recorder(rank)
        for step in range(9):
            begin = (step + 1) * 30 * MS
            recorder.backward(step, begin, BUCKETS[0], 10.0, generation=1)
            for bucket, (first, last) in enumerate(of_rank):
                times = {"device_begin_ns": begin + first * MS, "device_end_ns": begin + last * MS}
                of_bucket = {"step": step, "reducer": 0, "process_group": 0, "bucket": bucket, "generation": 1}
                recorder.record(Kind.DEVICE_SPAN, begin + 20 * MS, **of_bucket, **times)
        timeline.extend(recorder.batch())
    return timeline


def test_on_devices_readiness_is_the_devices() -> None:
    """A bucket is ready at the device's launch; NCCL's collectives that queue take as long as they run, Gloo's, which
    run two at a time, are left out."""
    timeline = on_devices([(4, 9), (12, 17)], [(6, 9), (14, 17)])
    found = timeline.workload()
    assert found.ready_ns.tolist() == [[12e6, 8e6, 4e6, 2e6], [14e6, 10e6, 6e6, 3e6]]
    assert found.computed_ns.tolist() == [12e6, 14e6]
    assert set(what_if.all_reduces(timeline)) == {(2 * MIB, 3e6, 2), (MIB, 3e6, 2)}
    queued = [(2, 6), (4, 8)], [(3, 7), (4, 9)]
    made = on_devices(*queued, backend="nccl")
    assert set(what_if.all_reduces(made)) == {(2 * MIB, 4e6, 2), (MIB, 2e6, 2)}
    assert what_if.fit_link(made).time_ns([MIB, 2 * MIB], 2) == pytest.approx([2e6, 4e6])
    assert set(what_if.all_reduces(on_devices(*queued))) == {(2 * MIB, 4e6, 2)}


def test_calibration_finds_the_slowdowns() -> None:
    """Steps of a contended link are predicted within 1 % after calibration, with caps and a model it has not seen."""
    link = CommModel(2e5, 0.9, lanes=2)
    true = replace(link, compute_slowdown=0.45, comm_slowdown=0.8)

    def run(backward_ns: float, caps: list[float]) -> Measured:
        made = Workload.made_up([MIB // 2] * 30, forward_ns=1e7, backward_ns=backward_ns, other_ns=1e6)
        workload, tried = replace(made, world_size=2), [Configuration(cap) for cap in caps]
        return Measured(workload, tried, [simulate(workload, one, true).step_ns for one in tried])

    # Where communication is hidden only the product of both slowdowns counts; where it is not they differ.
    found = calibrated([run(4e7, [0.5, 6]), run(1e7, [0.5, 6])], link)
    held_out = [run(4e7, [1, 2, 12]), run(2e7, [1, 2, 12])]
    assert np.abs(errors(held_out, link)).max() > 0.05
    assert np.abs(errors(held_out, found)).max() < 0.01
