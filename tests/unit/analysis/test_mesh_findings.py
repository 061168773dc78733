"""Which dimension of a mesh crosses the network: found only where it sends more, more slowly, and is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_lab.analysis import findings
from ddp_lab.analysis.findings import Facts, MeshDimension
from tests.unit.step_model import StepModel

MODEL = StepModel(
    gradients=[1.0] * 4, sizes=[1_000_000] * 4, buckets=[[0, 1], [2, 3]], options={"gradient_as_bucket_view": True}
)
SHARD = MeshDimension("shard", between_hosts=True, bytes=3e6, ns=3e6, waited_ns=2e6)  # 1 GB/s
REPLICATE = MeshDimension("replicate", between_hosts=False, bytes=1e6, ns=1e5, waited_ns=1e5)  # 10 GB/s


def gains(*dimensions: MeshDimension) -> list[float]:
    """What is to be gained by exchanging dimensions, in ns of a step."""
    facts = MODEL.record(20).judgement()
    assert isinstance(facts, Facts)
    found = [
        one for one in findings.findings(replace(facts, dimensions=dimensions)) if one.kind.startswith("mesh-dimension")
    ]
    return [one.gain_percent / 100 * facts.step_ns for one in found]


def test_the_dimension_that_sends_more_belongs_within_a_host() -> None:
    """What is saved is the difference of what they send, at the difference of their rates; at most what is waited."""
    assert gains(SHARD, REPLICATE) == pytest.approx([2e6 * (1 - 0.1)])
    assert gains(REPLICATE, replace(SHARD, waited_ns=1e6)) == pytest.approx([1e6])


@pytest.mark.parametrize(
    "dimensions",
    [
        (SHARD,),
        (SHARD, replace(REPLICATE, between_hosts=True)),
        (replace(SHARD, between_hosts=False), REPLICATE),
        (replace(SHARD, bytes=0.9e6), REPLICATE),  # it sends less
        (SHARD, replace(REPLICATE, ns=0.8e6)),  # at nearly the same rate
        (SHARD, replace(REPLICATE, bytes=0.0)),
        (replace(SHARD, waited_ns=0.0), REPLICATE),  # it is overlapped
    ],
)
def test_nothing_is_to_be_gained(dimensions: tuple[MeshDimension, ...]) -> None:
    """Where they are at their places, or it is not known."""
    assert gains(*dimensions) == []
