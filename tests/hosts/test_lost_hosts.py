"""Hosts that go: a cable that stays cut, a host without power, a notebook that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from ddp_lab.errors import CellError, ClusterError
from tests.cluster.conftest import Lab
from tests.hosts.network import ROOT, Network
from tests.leftovers import processes
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


def _train_for_ever(lab: Lab) -> object:
    lab.run(MODEL)
    run = lab.run("while True: step()", wait=False)
    wait_until(lambda: max((one.step for one in lab.timeline.ranks()), default=-1) > 3, "it trains")
    return run


def _trains_again(lab: Lab, source: int) -> None:
    """The new rank gets model and optimizer of a living one; the next steps keep them equal."""
    lab.run(f"ddp_lab.copy_state_from({source})")
    lab.run("for _ in range(3): step()")
    weights = lab.pull(WEIGHTS)
    assert np.array_equal(weights[0], weights[1])


@pytest.mark.soak
def test_a_link_that_stays_cut(impatient: Lab, network: Network) -> None:
    """The cell ends and names the host; a rejoin works once the cable is back, and leaves no former rank there."""
    host = network.hosts["b"]
    run = _train_for_ever(impatient)
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
    _trains_again(impatient, 0)


def test_a_host_without_power(impatient: Lab, network: Network) -> None:
    """The host of rank 0 and of the rendezvous is lost: rejoin says who is missing, and works when it has booted."""
    host = network.hosts["a"]
    run = _train_for_ever(impatient)
    host.kill()
    with pytest.raises(CellError, match="rank 0 was lost with host a"):
        run.wait()
    host.mend()  # its network is back before its sshd
    with pytest.raises(ClusterError, match="host a could not be reached with ssh"):
        impatient.rejoin()
    host.start()
    assert list(impatient.rejoin()) == [0]
    _trains_again(impatient, 1)


def test_a_notebook_that_is_killed(network: Network) -> None:
    """Its ranks on other hosts end with it, and the connection to them."""
    host = network.hosts["b"]
    before = len(host.processes())
    connections = {pid for pid, command in processes().items() if "host_server" in command}
    code = "import ddp_lab; ddp_lab.Cluster(hosts='b:1').start(); print('up', flush=True); input()"
    client = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with client:
        assert client.stdout is not None
        assert b"up" in client.stdout.readline()
        assert len(host.processes()) > before
        client.send_signal(signal.SIGKILL)
    wait_until(lambda: len(host.processes()) == before, "the ranks' end")
    wait_until(
        lambda: {pid for pid, command in processes().items() if "host_server" in command} == connections,
        "the connection's end",
    )


@pytest.mark.soak
def test_a_rejoin_that_comes_too_early(impatient: Lab, network: Network) -> None:
    """While the cable is cut it says so; the one after it works, and leaves no former rank there."""
    host = network.hosts["b"]
    run = _train_for_ever(impatient)
    host.cut()
    with pytest.raises(CellError, match="lost with host b"):
        run.wait()
    with pytest.raises(ClusterError, match=r"host b could not be reached with ssh: .*timed out"):
        impatient.rejoin()
    former = host.processes()
    assert former
    host.mend()
    impatient.rejoin()
    wait_until(lambda: len(host.processes()) == len(former), "the former rank's end")
    _trains_again(impatient, 0)


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
