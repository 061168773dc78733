"""Events of real training on two Gloo ranks, all the way to the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ddp_lab import DistributedDataParallel, recording
from ddp_lab.control.wire import Wire
from ddp_lab.engine.telemetry import Telemetry
from ddp_lab.timeline.timeline import Timeline
from tests.ranks.conftest import Ranks
from tests.waiting import DEADLINE_S

STEPS, LAYERS = 25, 6
AS_LONG = 10  # a planted delay: so many times as long as a backward takes here


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as made:
        yield made


@pytest.fixture
def timeline(wire: Wire) -> Timeline:
    made = Timeline()
    wire.on_batch(made.extend)
    wire.on_description(made.describe)
    wire.on_status(made.set_status)
    return made


def _train(rank: int, size: int, endpoint: dict[str, str], late_rank: int | None) -> dict[str, Any]:
    import torch

    telemetry = Telemetry(endpoint, rank, session=time.time_ns())
    telemetry._cursor = recording.statistics().recorded
    telemetry._described = recording.descriptions(0)[1]
    telemetry.start()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.14)
    delay = 0.0
    if rank == late_rank:
        delay = max(0.02, AS_LONG * _one_backward(torch.nn.Sequential(*layers), torch.randn(32, 128)))
        # Before layer 2's own gradients, after those of layers 5, 4 and 3.
        layers[2].register_full_backward_pre_hook(lambda *_: time.sleep(delay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(32, 128)).square().mean().backward()
        optimizer.step()
    assert telemetry.flush("trained")
    telemetry.stop()
    return {"reducer": model.model_id, "buckets": len(model.buckets()), "delay_ms": 1e3 * delay}


def _one_backward(model: Any, data: Any) -> float:
    """Seconds that a backward takes on this machine now: the longest of ten."""
    took = []
    for _ in range(10):
        loss = model(data).square().mean()
        began = time.perf_counter()
        loss.backward()
        took.append(time.perf_counter() - began)
    model.zero_grad()
    return max(took)


def test_every_span_of_a_training_is_complete_and_in_order(wire: Wire, timeline: Timeline, ranks: Ranks) -> None:
    """Every rank, step and bucket has its span, with its four times in order and the sizes of the assignment, the
    moment the cell has ended."""
    told = ranks(2, _train, wire.endpoint(), None)
    assert wire.wait_for("trained", [0, 1], DEADLINE_S)
    reducer = told[0]["reducer"]
    spans = timeline.spans(reducer)
    rebuilt = spans[spans.generation == 1]
    assert len(rebuilt) == 2 * (STEPS - 1) * told[0]["buckets"]
    assert spans[spans.generation == 0].step.unique().tolist() == [0]
    assert spans.complete.all()
    for earlier, later in [
        ("backward_begin_ns", "first_ready_ns"),
        ("first_ready_ns", "ready_ns"),
        ("ready_ns", "launched_ns"),
        ("launched_ns", "reduced_ns"),
    ]:
        assert (spans[earlier] > 0).all()
        assert (spans[earlier] <= spans[later]).all(), (earlier, later)
    assert np.allclose(spans.hidden_ms + spans.exposed_ms, spans.all_reduce_ms)
    by_rank = [spans[spans["rank"] == rank].reset_index(drop=True) for rank in (0, 1)]
    for column in ("step", "bucket", "generation", "bytes", "n_parameters"):
        assert (by_rank[0][column] == by_rank[1][column]).all()
    launched = spans.sort_values(["rank", "step", "bucket"])
    assert (launched.groupby(["rank", "step"]).launched_ns.diff().dropna() >= 0).all(), "launched in bucket order"
    for generation in (0, 1):
        described = timeline.assignment(reducer, generation)
        for bucket in described["buckets"]:
            of_bucket = spans[(spans.generation == generation) & (spans.bucket == bucket["bucket"])]
            assert set(of_bucket.bytes) == {bucket["bytes"]}
            assert set(of_bucket.n_parameters) == {len(bucket["parameters"])}
        assert described["group_ranks"] == [0, 1]
    assert len(timeline.all_reduces(reducer)) == len(spans) / 2
    assert [wire.statistics()[rank].dropped for rank in (0, 1)] == [0, 0]


def test_a_late_layer_is_named_though_wall_time_is_equal(wire: Wire, timeline: Timeline, ranks: Ranks) -> None:
    """A delay in a layer of one backward: both take as long, and readiness names rank, bucket and layer."""
    told = ranks(2, _train, wire.endpoint(), 1)
    assert wire.wait_for("trained", [0, 1], DEADLINE_S)
    reducer, delay_ms = told[0]["reducer"], told[1]["delay_ms"]
    late = timeline.stragglers(reducer, minimum_ms=delay_ms / 2)[0]
    assert (late.rank, late.parameter) in {(1, "2.weight"), (1, "2.bias")}
    members = timeline.assignment(reducer)["buckets"][late.bucket]["parameters"]
    names = [timeline.assignment(reducer)["parameters"][index]["name"] for index in members]
    assert late.parameter in names
    assert late.delay_ms >= 0.95 * delay_ms
    assert late.share > 0.8
    backward = timeline.steps(reducer).query("generation == 1").groupby("rank").backward_ms.median()
    assert abs(backward[0] - backward[1]) < 0.5 * late.delay_ms, "wall time names nobody"
    sync = timeline.all_reduces(reducer)
    waited = sync[(sync.generation == 1) & (sync.bucket == late.bucket)]
    assert (waited.last_rank == 1).mean() > 0.8
    assert waited.late_ms.median() > delay_ms / 2
    assert f"falls behind when it computes the gradient of {late.parameter}" in timeline.summary(reducer)
