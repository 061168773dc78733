"""A mesh of two dimensions over two hosts with a slow network between them: which dimension crosses it, and what of it
is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp_lab.analysis.findings import Finding
from tests.cluster.conftest import Lab
from tests.hosts.network import Network

TRAIN = """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
mesh = DeviceMesh("cpu", torch.tensor({ranks}), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
for layer in model: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(20): model(torch.ones(4, 256)).sum().backward()
"""


@pytest.fixture(scope="module")
def slow(network: Network) -> Iterator[Lab]:
    """Ranks 0 and 1 on a, 2 and 3 on b."""
    for host in network.hosts.values():
        host.slow_down("50mbit")  # far less than ranks of one host exchange, also where other processes hold them up
    with Lab(hosts="a:2,b:2", hang_seconds=None) as cluster:
        yield cluster


def _found(lab: Lab, ranks: list[list[int]]) -> list[Finding]:
    lab.run(TRAIN.format(ranks=ranks))
    return [one for one in lab.timeline.findings() if one.kind == "mesh-dimension-between-hosts"]


@pytest.mark.soak
def test_a_dimension_that_crosses_the_network(slow: Lab) -> None:
    """Sharded between the hosts, steps wait for the network; sharded within them, there is nothing to change."""
    (found,) = _found(slow, [[0, 2], [1, 3]])
    assert found.title == "The mesh dimension shard sends more than replicate, but its ranks are on several hosts."
    assert found.remedy.startswith("Make shard the last dimension of init_device_mesh()")
    assert found.gain_percent > 3
    assert _found(slow, [[0, 1], [2, 3]]) == []
