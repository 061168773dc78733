"""What-if questions to a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.dashboard.controls.buckets import compared
from ddp_lab.dashboard.controls.what_if import WhatIfStage
from ddp_lab.dashboard.live import ViewFacts
from ddp_lab.errors import CellError
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.timeline.timeline import Timeline
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

TRAINING = """
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]))
for _ in range(8):
    model(torch.randn(8, 64)).square().mean().backward()
    model.zero_grad()
"""


def test_a_cluster_predicts_its_own_step(lab: Lab) -> None:
    """After some steps the cluster measures its link and predicts other caps and worlds, buckets and all."""
    lab.run(TRAINING)
    link = lab.measure_communication(sizes=[1 << 10, 1 << 14, 1 << 18], repeats=2)
    assert link.lanes == 1
    assert link.fit is not None
    one, many = lab.simulate(bucket_cap_mb=1000), lab.simulate(bucket_cap_mb=0)
    assert one.link.lanes == link.lanes
    assert one.link.time_ns(1 << 14, 2) <= link.time_ns(1 << 14, 2)  # as measured, or faster if the recording was
    assert (len(one.prediction.buckets), len(many.prediction.buckets)) == (1, 12)
    parts = one.breakdown
    assert sum(parts.values()) - parts["hidden"] == pytest.approx(one.step_ms)
    large = lab.simulate(world_size=16384)
    assert large.step_ms > one.step_ms
    assert large.timeline().summary()


def test_another_link(lab: Lab) -> None:
    """A link that is given is used as it is: without latency and without limit nothing but computation is left."""
    lab.run(TRAINING)
    free = lab.simulate(CommModel(0.0, 0.0))
    assert free.breakdown["exposed"] == pytest.approx(0.0, abs=1e-6)


SHARDED = """
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
for layer in net:
    fully_shard(layer)
fully_shard(net)
for _ in range(6):
    net(torch.randn(8, 64)).square().mean().backward()
    net.zero_grad()
"""


def test_a_sharded_model_is_recorded_and_not_predicted(lab: Lab) -> None:
    """A cell that shards a model and trains it has its parameter groups on the timeline, with no further call."""
    lab.run(SHARDED)
    rows = lab.timeline.parameter_groups()
    assert rows.groupby("module").size().to_dict() == dict.fromkeys("012345", 12)
    assert rows["complete"].all()
    with pytest.raises(ValueError, match="a model with fully_shard has no buckets"):
        lab.simulate()


STRAGGLER = """
import time
model = ddp_lab.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.05)
def step():
    if rank == 1: time.sleep(0.004)
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
for _ in range(40): step()
"""
STUCK = """
step()
if rank == 0: step()
else: time.sleep(600)
"""


def _told(timeline: Timeline) -> dict[str, object]:
    """All that is said of the steps."""
    facts = ViewFacts(timeline)
    facts.look("page", ["findings", "stragglers"], None)
    answer = WhatIfStage(timeline).snapshot()
    sliders = {name: answer[name] for name in ("state", "recorded", "same", "about")}
    return {"found": timeline.findings(), "summary": timeline.summary(), **facts.update(force=True), **sliders}


def _judged(timeline: Timeline) -> list[int]:
    found = timeline.analysis_input()
    return [-1] if found is None else found.steps.step.tolist()


def test_a_rejoin_keeps_the_analysis(lab: Lab, tmp_path: Path) -> None:
    """A cell is interrupted in a collective, and the next one finds its ranks in new groups: what findings, stragglers,
    summary and sliders say of the steps is what they said before it, also of a saved timeline."""
    lab.run(STRAGGLER)
    number = lab.timeline.reducers()[-1].reducer
    run = lab.run(STUCK, wait=False)
    wait_until(lambda: _judged(lab.timeline)[-1] == 40 and lab.timeline.reducers()[-1].last_step == 41, "the steps")
    before = _told(lab.timeline)
    run.interrupt()
    with pytest.raises(CellError):
        run.wait()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    wait_until(lambda: len(lab.timeline.reducers()[-1].generations) > 2, "the first assignment is back")
    assert lab.timeline.reducers()[-1].reducer == number
    found = lab.timeline.findings()
    assert (found[0].kind, found[0].rank, found[0].steps) == ("straggler", 1, (4, 40))
    assert _told(lab.timeline) == before
    assert _told(Timeline.load(lab.timeline.save(tmp_path / "run.npz"))) == before
    assert compared(lab.timeline, number)["sides"] == []
    lab.run("for _ in range(12): step()")
    after = lab.timeline.findings()[0]
    assert (after.kind, after.rank) == ("straggler", 1)
    assert compared(lab.timeline, number)["sides"] == []
