"""Hosts that stay away: a cable that stays cut, for the cluster and for the host behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ddp_lab.errors import CellError
from tests.cluster.conftest import Lab
from tests.hosts.network import Network
from tests.waiting import wait_until

MODEL = """
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
"""
WEIGHTS = "model.module.weight.detach().clone()"


@pytest.fixture(scope="module")
def impatient(network: Network) -> Iterator[Lab]:
    """One rank on each host; a host that is silent for 5 s is lost."""
    with Lab(hosts="a:1,b:1", hang_seconds=None, host_timeout=5) as cluster:
        yield cluster


def train_for_ever(lab: Lab) -> object:
    lab.run(MODEL)
    run = lab.run("while True: step()", wait=False)
    wait_until(lambda: max((one.step for one in lab.timeline.ranks()), default=-1) > 3, "it trains")
    return run


def trains_again(lab: Lab, source: int) -> None:
    """The new rank gets model and optimizer of a living one; the next steps keep them equal."""
    lab.run(f"ddp_lab.copy_state_from({source})")
    lab.run("for _ in range(3): step()")
    weights = lab.pull(WEIGHTS)
    assert np.array_equal(weights[0], weights[1])


@pytest.mark.soak
def test_a_link_that_stays_cut(impatient: Lab, network: Network) -> None:
    """The cell ends and names the host; a rejoin works once the cable is back, and leaves no former rank there."""
    host = network.hosts["b"]
    run = train_for_ever(impatient)
    host.cut()
    with pytest.raises(CellError, match="rank 1 was lost with host b: it did not respond for 5 s") as raised:
        run.wait()
    assert raised.value.failures[0].secondary
    assert [record.state for record in impatient.status()][1] == "lost"
    former = host.processes()
    assert former  # it does not know yet
    host.mend()
    assert "lost with host b" in impatient.rejoin()[1]
    wait_until(lambda: len(host.processes()) == len(former), "the former rank's end")
    trains_again(impatient, 0)


@pytest.mark.soak
def test_a_host_that_hears_nothing(network: Network) -> None:
    """Behind a cut cable ranks end by themselves, four times as late as their client gives them up."""
    host = network.hosts["b"]
    before = len(host.processes())
    with Lab(hosts="b:1", hang_seconds=None, host_timeout=5) as lab:
        run = lab.run("while True: pass", wait=False)
        host.cut()
        with pytest.raises(CellError, match="lost with host b"):
            run.wait()
        assert len(host.processes()) > before
        wait_until(lambda: len(host.processes()) == before, "the ranks' end")
        host.mend()
