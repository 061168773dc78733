"""What if about parameter groups of constructed events: the recorded step comes back, and changes have their effect."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.protocol.events import Batch
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.sharding import Cost, ShardingCosts
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training
from tests.unit.timeline.test_parameter_groups import NAMES, SIZE, STEP, recorded, streamed

EACH = ["blocks.*"]


def test_what_is_recorded_is_predicted() -> None:
    """Without a change, and with the recorded groups by name, the step is the recorded one. Of a device the stream is
    predicted, though its host is far ahead, and what the stream waits for is hidden or exposed."""
    timeline = recorded()
    for what in ({}, {"groups": EACH, "reshard_after_forward": True}):
        found = timeline.simulate(**what)
        assert found.step_ms == pytest.approx(STEP)
        assert sum(found.breakdown.values()) - found.breakdown["hidden"] == pytest.approx(STEP)
    assert f"recorded: {STEP:.2f}" in repr(found)
    timeline = streamed()
    found = timeline.simulate()
    assert found.step_ms == pytest.approx(STEP)
    assert found.breakdown["hidden"] > 0
    assert timeline.simulate(reshard_after_forward=False).step_ms < STEP
    with pytest.raises(ValueError, match="no module with parameters is called 'layers'"):
        timeline.simulate(groups="layers")


def test_changes_have_their_effect() -> None:
    """Without resharding the gatherings of the backward are gone, and of a single group, too; more ranks cost more.
    What was measured says how costs grow with sizes; the recorded collectives say how long they took."""
    timeline = recorded()
    usual = timeline.simulate(prefetch=0)
    kept, whole, more = (
        timeline.simulate(prefetch=0, **what)
        for what in ({"reshard_after_forward": False}, {"groups": []}, {"world_size": 16})
    )
    assert kept.step_ms < usual.step_ms < more.step_ms
    assert whole.breakdown["exposed"] < usual.breakdown["exposed"]
    assert timeline.simulate(prefetch=1).breakdown["hidden"] > usual.breakdown["hidden"] == 0
    assert [len(one) for one in whole.prediction.groups] == [len(NAMES)]
    measured = ShardingCosts(Cost(byte_ns=1), Cost(byte_ns=1), optimizer_ns=1e6)
    found = recorded().simulate(measured)
    assert found.step_ms == pytest.approx(STEP)
    assert found.costs.all_gather.ns(1000, 1) > 1000 * measured.all_gather.ns(1000, 1)
    assert found.breakdown["other"] == pytest.approx(recorded().simulate().breakdown["other"])


def test_two_dimensions() -> None:
    """HSDP is predicted as it was, and in larger groups; its part of the gradients is all-reduced. `replicate` is
    predicted as it was, in larger groups, and on more ranks."""
    timeline = recorded(mesh=(2, 2))
    found = timeline.simulate()
    assert found.step_ms == pytest.approx(STEP)
    assert {one.what for one in found.prediction.spans} >= {"gather", "reduce", "all-reduce"}
    reduced, scattered = found.costs.all_reduce.ns(SIZE / 2, 1), found.costs.reduce_scatter.ns(SIZE, 1)
    assert reduced / scattered == pytest.approx(3 / 5)  # a part in 3 ms; the whole in 6, 5 and 1, of which the median
    assert timeline.simulate(groups=[]).step_ms < found.step_ms < timeline.simulate(world_size=8).step_ms
    with pytest.raises(ValueError, match="2 replicas of the parameters need a world size that is a multiple, got 3"):
        timeline.simulate(world_size=3)
    timeline = recorded(kind="replicate")
    found = timeline.simulate()
    assert found.step_ms == pytest.approx(STEP)
    forward, backward, reduced = 35 - 0.9, (60 - 39) + (80 - 66) + (90 - 85), 3 * 5  # equal groups: the median of all
    scale = (STEP - 0.9) / (forward + backward + reduced)  # what is in none of them belongs to all of them
    named = ("forward", "compute", "exposed", "hidden")
    assert [found.breakdown[name] / scale for name in named] == pytest.approx([forward, backward, reduced, 0])
    whole, more = timeline.simulate(groups=[]), timeline.simulate(world_size=8)
    assert whole.breakdown["exposed"] < found.breakdown["exposed"] < more.breakdown["exposed"]


@pytest.mark.parametrize(("kind", "mesh"), [("fully_shard", (2,)), ("fully_shard", (2, 2)), ("replicate", (2,))])
def test_a_recording_of_one_rank(kind: str, mesh: tuple[int, ...]) -> None:
    """The step of the rank that was recorded is predicted, though what the others did is not known."""
    whole, found = recorded(kind=kind, mesh=mesh).events(), Timeline()
    for rank, description in whole.described:
        if rank == 0:
            found.describe(rank, description)
    [events] = [chunk for rank, chunk in whole.chunks if rank == 0]
    found.extend(Batch(0, 1, 0, 0, events))
    assert found.simulate().step_ms == pytest.approx(STEP)


def test_zero_1_on_more_ranks_has_their_all_reduces() -> None:
    """ZeRO-1 adds broadcasts to a step of DDP with as many ranks, and saves work of the optimizer."""
    timeline = Training(2, 3, forward_ms=1.0).trained(12)
    zero, more = (timeline.simulate(sharding="zero-1", world_size=ranks).breakdown for ranks in (2, 64))
    plain = timeline.simulate(world_size=64).breakdown
    assert more["exposed"] > plain["exposed"] > zero["exposed"] > timeline.simulate(world_size=2).breakdown["exposed"]
    for name in ("forward", "compute", "hidden"):
        assert more[name] == plain[name]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"groups": ["block.*"]}, r"no module with parameters is called 'block\.\*'"),
        ({"bucket_cap_mb": 5}, "bucket_cap_mb: not an option of a step with fully_shard; those are groups, prefetch"),
        ({"without_rank": 1}, "without_rank: not an option"),
        ({"sharding": "zero-1"}, "Net was recorded with fully_shard, from which no step with zero-1 can be"),
        ({"sharding": "replicate"}, "Net was recorded with fully_shard, from which no step with replicate can be"),
        ({"sharding": "zero-3"}, "sharding='zero-3' is not valid; choose one of fully_shard, replicate, zero-1"),
        ({"prefetch": -1}, "prefetch must be at least 0"),
        ({"link": CommModel(0, 1)}, "needs ShardingCosts"),
    ],
)
def test_refusals(what: dict[str, Any], reason: str) -> None:
    """An option that makes no sense is refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        recorded().simulate(**what)


def test_what_can_not_be_predicted() -> None:
    """So is what a recording does not hold."""
    with pytest.raises(ValueError, match="a model with fully_shard has no buckets"):
        recorded().workload()
    with pytest.raises(ValueError, match="prefetch: not an option of a step with replicate; those are groups, world_"):
        recorded(kind="replicate").simulate(prefetch=1)
    with pytest.raises(ValueError, match="Net has replicate and runs on a device, which records nothing of its forw"):
        streamed(kind="replicate").simulate()
    with pytest.raises(ValueError, match="no step has been recorded"):
        Timeline().simulate(sharding="fully_shard")
