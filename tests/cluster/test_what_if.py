"""What-if questions to a real cluster."""

from __future__ import annotations

import pytest

from ddp_lab.insight.link_model import LinkModel
from tests.cluster.conftest import Lab

TRAINING = """
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]))
for _ in range(8):
    model(torch.randn(8, 64)).square().mean().backward()
    model.zero_grad()
"""


def test_a_cluster_predicts_its_own_step(lab: Lab) -> None:
    """After some steps the cluster measures its link and predicts other caps and worlds, buckets and all."""
    lab.run(TRAINING)
    link = lab.measure_link(sizes=[1 << 10, 1 << 14, 1 << 18], repeats=2)
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
    free = lab.simulate(LinkModel(0.0, 0.0))
    assert free.breakdown["exposed"] == pytest.approx(0.0, abs=1e-6)
