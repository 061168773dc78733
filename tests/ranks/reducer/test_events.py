"""What a backward records: a well-formed sequence on each rank, ids that ranks agree on, bucket records."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_lab import DistributedDataParallel, recording
from ddp_lab.parallel.core.process_groups import group_index
from ddp_lab.parallel.live.model import live_models
from ddp_lab.parallel.monitoring.inspection import request_inspection
from ddp_lab.protocol.events import Kind
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks
from tests.ranks.observing import recorded
from tests.waiting import wait_until


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(24, 24), nn.ReLU()]
    return nn.Sequential(*layers)


def _check_step(events: np.ndarray, buckets: int, parameters: int) -> None:
    """One synchronised step's events, in sequence order."""
    kinds = [Kind(kind) for kind in events["kind"]]

    def only(kind: Kind) -> int:
        assert kinds.count(kind) == 1, (kind, kinds)
        return kinds.index(kind)

    order = [Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.BACKWARD_BEGIN, Kind.FINALIZE_BEGIN, Kind.BACKWARD_END]
    places = [only(kind) for kind in order]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] == len(kinds) - 1
    begin, end = int(events["host_ns"][places[2]]), int(events["host_ns"][places[-1]])
    times: dict[tuple[Kind, int], int] = {}
    for kind in (Kind.BUCKET_READY, Kind.BUCKET_LAUNCHED, Kind.BUCKET_REDUCED):
        of_kind = events[events["kind"] == kind]
        assert sorted(of_kind["bucket"]) == list(range(buckets)), kind
        assert (of_kind["bytes"] > 0).all()
        times |= {(kind, int(e["bucket"])): int(e["host_ns"]) for e in of_kind}
    grads = events[events["kind"] == Kind.GRAD_READY]
    assert sorted(grads["parameter"]) == list(range(parameters))
    for bucket in range(buckets):
        last = int(grads["host_ns"][grads["bucket"] == bucket].max())
        ready, launched, reduced = (
            times[kind, bucket] for kind in (Kind.BUCKET_READY, Kind.BUCKET_LAUNCHED, Kind.BUCKET_REDUCED)
        )
        assert begin <= last <= ready <= launched <= reduced <= end
        if bucket:
            assert times[Kind.BUCKET_LAUNCHED, bucket - 1] <= launched  # launched in bucket order
    assert (np.diff(events["sequence"].astype(np.int64)) > 0).all()  # samples may be in between


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_a_step_is_recorded_well_formed(rank: int, size: int) -> None:
    """Every step's events are complete and in order, and ranks agree on reducer id and buckets."""
    model = DistributedDataParallel(_mlp(), bucket_cap_mb=0.004)
    x = torch.randn(4, 24)

    def train() -> None:
        for _ in range(4):
            model(x).sum().backward()

    _, events, descriptions = recorded(train)
    assert set(events["reducer"]) == {model.model_id}
    assert set(events["process_group"]) == {group_index(dist.group.WORLD)}
    assert sorted(set(events["step"])) == [0, 1, 2, 3]
    rebuilt = events[events["kind"] == Kind.REBUILT]
    assert [(int(e["step"]), int(e["generation"])) for e in rebuilt] == [(1, 1)]
    for step in range(4):
        of_step = events[(events["step"] == step) & (events["kind"] != Kind.REBUILT)]
        assert set(of_step["generation"]) == {min(step, 1)}
        _check_step(of_step, 1 if step == 0 else len(model.buckets()), 12)
    assert len(model.buckets()) > 2
    (assignment,) = [d for d in descriptions if d["type"] == "assignment"]
    assert (assignment["generation"], assignment["first_step"], assignment["rebuilt"]) == (1, 1, True)
    assert assignment["group_ranks"] == list(range(size))
    assert assignment["backend"] == "gloo"
    options = assignment["options"]
    assert abs(options["bucket_cap_mb"] - 0.004) < 1e-6
    assert not options["find_unused_parameters"]
    assert options["comm_hook"] is None
    names = {p["index"]: p["name"] for p in assignment["parameters"]}
    for info, described in zip(model.buckets(), assignment["buckets"], strict=True):
        assert info.parameters == tuple(names[i] for i in described["parameters"])
        assert info.bytes == described["bytes"]
        times = info.times
        assert times is not None
        assert 0 <= times.first_ready_ms <= times.ready_ms <= times.launched_ms <= times.reduced_ms
        assert times.reduced_ms <= times.backward_ms
    assert len(set(everywhere((model.model_id, json.dumps(assignment["buckets"]))))) == 1


@on_ranks(2)
def test_options_are_described(rank: int, size: int) -> None:
    """What the model was built with, and the comm hook that it got later, travel with its assignment."""
    model = DistributedDataParallel(_mlp(), find_unused_parameters=True, gradient_as_bucket_view=True)
    _, _, descriptions = recorded(lambda: model.register_comm_hook(None, allreduce_hook))
    (assignment,) = [d for d in descriptions if d["type"] == "assignment"]
    options: dict[str, Any] = assignment["options"]
    assert options["find_unused_parameters"]
    assert options["gradient_as_bucket_view"]
    assert not options["static_graph"]
    assert options["comm_hook"] == "allreduce_hook"
    assert options["bucket_cap_mb_list"] == [1.0, 25.0]


@on_ranks(2)
def test_no_sync_windows_carry_the_coming_step(rank: int, size: int) -> None:
    """Under no_sync gradients are recorded for the coming step and no bucket; evaluation records nothing."""
    model = DistributedDataParallel(_mlp())
    x = torch.randn(4, 24)

    def accumulate() -> None:
        with model.no_sync():
            model(x).sum().backward()
            model(x).sum().backward()

    _, events, _ = recorded(accumulate)
    assert set(events["step"]) == {0}
    assert set(events["bucket"]) == {-1}
    kinds = [Kind(kind) for kind in events["kind"]]
    assert kinds == 2 * [Kind.FORWARD_BEGIN, Kind.FORWARD_END, *12 * [Kind.GRAD_READY]]
    _, events, _ = recorded(lambda: model(x).sum().backward())
    _check_step(events, 1, 12)
    assert set(events["step"]) == {0}
    model.eval()
    with torch.no_grad():
        assert len(recorded(lambda: model(x))[1]) == 0


@on_ranks(2)
def test_an_abandoned_backward_keeps_its_step(rank: int, size: int) -> None:
    """A backward that failed is recorded as abandoned, and the next one has a number of its own."""
    model = DistributedDataParallel(_mlp())
    x = torch.randn(4, 24)
    middle = model.module[4].weight
    handle = middle.register_hook(lambda _: 1 / 0)

    def fail_once() -> None:
        try:
            model(x).sum().backward()
        except ZeroDivisionError:
            handle.remove()
        model(x).sum().backward()

    _, events, _ = recorded(fail_once)
    abandoned = events[events["kind"] == Kind.ABANDONED]
    assert [int(e["step"]) for e in abandoned] == [0]
    _check_step(events[events["step"] == 1], 1, 12)


@on_ranks(2)
def test_recording_can_be_off(rank: int, size: int) -> None:
    """With recording off a model trains and records nothing."""
    model = DistributedDataParallel(_mlp())
    recording.disable()
    try:
        model(torch.randn(4, 24)).sum().backward()
        assert len(recorded(lambda: model(torch.randn(4, 24)).sum().backward())[1]) == 0
    finally:
        recording.enable()


@on_ranks(4)
def test_reducer_ids_are_agreed_and_never_reused(rank: int, size: int) -> None:
    """The ranks of a group agree on a model's id, and models of disjoint groups have different ones."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = DistributedDataParallel(nn.Linear(2, 2))
    mine = DistributedDataParallel(nn.Linear(2, 2), process_group=halves[rank // 2])
    again = DistributedDataParallel(nn.Linear(2, 2), process_group=halves[rank // 2])
    last = DistributedDataParallel(nn.Linear(2, 2))
    assert [model.sync.owner() for model in live_models()] == [first, mine, again, last]
    del again
    assert [model.sync.owner() for model in live_models()] == [first, mine, last]
    found = everywhere((first.model_id, last.model_id, mine.model_id))
    assert found == [(first.model_id, last.model_id, found[other][2]) for other in (0, 0, 2, 2)]
    assert len({*found[0], *found[2]}) == 4


@on_ranks(2)
def test_gradients_are_inspected_on_demand(rank: int, size: int) -> None:
    """Norms and checksums are equal on all ranks, asked for before, after or during training; one bit shows."""
    model = DistributedDataParallel(_mlp(), bucket_cap_mb=0.004)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))

    def run(first: int, count: int) -> None:
        for step in range(first, first + count):
            model.zero_grad()
            model(x * (step + 1)).square().sum().backward()

    run(0, 2)
    asked = model.inspect_gradients()
    for bucket, info in zip(asked, model.buckets(), strict=True):
        gradients = [dict(model.module.named_parameters())[name].grad for name in info.parameters]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
        assert abs(bucket["norm"] - norm) <= 1e-9 * norm
    request_inspection(model.model_id, 4)
    _, _, described = recorded(lambda: run(2, 4))
    (later,) = [d for d in described if d["type"] == "inspection"]
    assert (later["reducer"], later["step"]) == (model.model_id, 4)

    _, start = recording.descriptions(0)
    request_inspection(model.model_id, 0)  # long past: now
    (now,) = [d for d in recording.descriptions(start)[0] if d["type"] == "inspection"]
    assert now["step"] == 5
    request_inspection(model.model_id, 100)  # never reached: when the model has been idle for a while
    found = wait_until(
        lambda: [d for d in recording.descriptions(start)[0] if d["type"] == "inspection"][1:], "an answer when idle"
    )
    assert found[0]["step"] == 5

    with torch.no_grad():  # one bit of one gradient on one rank
        if rank == 1:
            model.module[0].bias.grad.view(torch.int32)[0] ^= 1
    first, second = everywhere([asked, later["buckets"], now["buckets"]])
    assert first == second
    assert all(int(bucket["checksum"], 16) for bucket in first[1])
    first, second = everywhere([one["checksum"] for one in model.inspect_gradients()])
    assert [mine != other for mine, other in zip(first, second, strict=True)].count(True) == 1


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_onlookers_see_averages(rank: int, size: int, as_view: bool) -> None:
    """Threads that don't train see what the last backward averaged, and nothing once views of it were written to."""
    model = DistributedDataParallel(_mlp(), bucket_cap_mb=0.004, gradient_as_bucket_view=as_view)
    assert model.reducer.inspect_averages() is None
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        model.zero_grad()
        loss = model(x).square().sum()
        if as_view:  # a backward may write to the buffers
            assert model.reducer.inspect_averages() is None
        loss.backward()
        averages = model.reducer.inspect_gradients()
        assert model.reducer.inspect_averages() == (step, averages)
        model.zero_grad(set_to_none=True)  # the buffers stay what they are
        assert model.reducer.inspect_averages() == (step, averages)
    model(x).square().sum().backward()
    model.zero_grad(set_to_none=False)
    assert (model.reducer.inspect_averages() is None) == as_view
    assert all(norm == 0 for norm, _ in model.reducer.inspect_gradients())
