"""A cluster on two hosts: it trains, is interrupted, survives a cut cable and a lost host, and tells the time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ddp_lab import Cluster
from ddp_lab.errors import CellError, ClusterError
from tests.cluster.conftest import Lab
from tests.hosts.conftest import CLOCKS
from tests.hosts.network import ROOT, Network
from tests.hosts.test_lost_hosts import train_for_ever, trains_again
from tests.leftovers import alive, processes
from tests.waiting import wait_until

MODEL = """
torch.manual_seed(rank)
model = ddp_lab.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = [p.detach().clone() for p in model.parameters()]
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
def weights():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
"""
TRAIN_UNTIL_TOLD = """
steps, stop = 0, torch.zeros(1)
while True:
    stop.fill_(float(os.path.exists(told)))
    dist.all_reduce(stop)
    if stop:
        break
    step()
    steps += 1
steps
"""
LISTENING = """
tables = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
{row[1].partition(":")[0] for row in tables if row[3] == "0A" and row[1].partition(":")[2] != "0016"}
"""


def _same(arrays: dict[int, np.ndarray]) -> bool:
    return all(np.array_equal(arrays[0], other) for other in arrays.values())


def test_ranks_are_numbered_by_host(lab: Lab, network: Network) -> None:
    """Each rank runs on its host, knows its place there, and uses the interface that reaches the others."""
    place = "import os, socket; (socket.gethostname(), local_rank, *map(os.environ.get, names))"
    lab.push({"names": ["LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]})
    master = network.hosts["a"].address
    assert lab.values(place) == {
        0: ("a", 0, "1", "0", master, "eth7"),
        1: ("b", 0, "2", "1", master, "eth7"),
        2: ("b", 1, "2", "1", master, "eth7"),
    }
    assert [record.host for record in lab.status()] == ["a", "b", "b"]


def test_training(lab: Lab) -> None:
    """The ranks of all hosts train one model: their parameters move, and stay equal."""
    lab.run(MODEL)
    lab.run("for _ in range(5): step()")
    assert _same(lab.pull("weights()"))
    assert all(lab.values("any(not torch.equal(a, b) for a, b in zip(start, model.parameters()))").values())


def test_large_objects_travel(lab: Lab) -> None:
    """Arrays of megabytes arrive whole, in cells, functions and pulls, though no memory is shared."""
    array = np.arange(1 << 18, dtype=np.float64)
    lab.push({"pushed": array})
    assert all(np.array_equal(value, array) for value in lab.pull("pushed").values())
    assert all(np.array_equal(value, array + 1) for value in lab.values(lambda given: given + 1, array).values())


def test_interrupt(lab: Lab) -> None:
    """A collective that hangs across hosts is interrupted; variables are kept and the next cell works."""
    lab.run("kept = rank")
    run = lab.run("if rank: dist.all_reduce(torch.ones(1))\nelse:\n  while True: pass", wait=False)
    wait_until(lambda: set(run.status().ranks.values()) == {"running"}, "the cell runs")
    lab.interrupt()
    with pytest.raises(CellError, match="interrupted"):
        run.wait()
    assert lab.values("kept") == {0: 0, 1: 1, 2: 2}
    assert set(lab.sum_of_ones().values()) == {3.0}


def test_clocks(lab: Lab) -> None:
    """Each host's clock is found within what is said to be uncertain, and is told with the timeline."""
    lab.run(MODEL)
    lab.run("for _ in range(5): step()")
    clocks = {clock.host: clock for clock in lab.timeline.clocks}
    for host, ahead_s in CLOCKS.items():
        error_ns = abs(clocks[host].offset_ns + ahead_s * 10**9)
        assert error_ns <= clocks[host].uncertain_ns, clocks[host]
    assert clocks["b"].ranks == (1, 2)
    told = re.search(r"ranks 1–2 on b were clock-aligned .* by (\S+) s ± (\S+) ms\.", lab.timeline.summary())
    assert told
    assert float(told[1].replace(",", "")) + CLOCKS["b"] == pytest.approx(0, abs=float(told[2]) / 1000 + 1e-6)
    assert all(record.clock.startswith("±") for record in lab.status())


def test_one_time_axis(lab: Lab) -> None:
    """No rank has a bucket reduced before the last rank launched it, within what is uncertain."""
    lab.run(MODEL)
    lab.run("for _ in range(20): step()")
    spans = lab.timeline.spans()
    spans = spans[(spans.reduced_ns > 0) & (spans.launched_ns > 0)]
    uncertain_ns = 2 * max(clock.uncertain_ns for clock in lab.timeline.clocks)
    steps = spans.groupby(["reducer", "step", "bucket"])
    whole = steps["rank"].count() == 3
    early = (steps["launched_ns"].max() - steps["reduced_ns"].min())[whole]
    assert len(early) >= 20
    assert early.max() <= uncertain_ns
    assert (steps["launched_ns"].max() - steps["launched_ns"].min())[whole].max() < 60e9


def test_a_rank_that_dies_there(lab: Lab) -> None:
    """The cell names the rank and the last lines of its log, which is on the other host; the rank is replaced."""
    # To the log itself: what goes through sys.stderr's descriptor is read by a thread, which the signal may overtake.
    code = (
        "import os, signal, sys\nlog = getattr(sys.stderr, '_original_stdstream_copy', None) or 2\n"
        "if rank == 2: os.write(log, b'a last word\\n'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(CellError, match="rank 2 was killed by SIGKILL") as raised:
        lab.run(code + "dist.barrier()")
    assert "a last word" in "\n".join(raised.value._render_traceback_())
    assert list(lab.rejoin()) == [2]
    assert set(lab.sum_of_ones().values()) == {3.0}


def test_what_listens(lab: Lab, network: Network) -> None:
    """Nothing listens on every address; here only the address that the hosts reach and loopback are used."""
    own = {f"{network.prefix}.1", "127.0.0.1"}
    for pid in (os.getpid(), lab.pids()["controller"]):
        listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
        assert {each.laddr.ip for each in listening} <= own
    there = lab.values(LISTENING)
    expected = {rank: _hexadecimal(network.hosts[host].address) for rank, host in enumerate("abb")}
    assert all(found <= {expected[rank]} for rank, found in there.items())
    assert there[0]  # the rendezvous


def _hexadecimal(address: str) -> str:
    """As /proc/net/tcp writes it."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def test_what_is_written_there(lab: Lab, network: Network) -> None:
    """Only this user can read what lies on a host, and no key is in it, nor in arguments or variables."""
    keys = [lab.wire.endpoint()["client_secret"].encode(), lab.session.processes._connection["engine"]["key"].encode()]
    for host in network.hosts.values():
        folders = host.folders()
        assert folders
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files if path.suffix == ".log"} == {0o600}
        assert not any(key in path.read_bytes() for path in files for key in keys if key)
        for text in host.process_texts():
            assert not any(key in text for key in keys if key)


def test_a_controller_that_is_killed(lab: Lab) -> None:
    """Its successor listens on the same ports: ranks on other hosts connect again, and keep processes and variables."""
    before = lab.values("import os; kept = rank + 70; os.getpid()")
    pid = lab.pids()["controller"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the controller's end")
    assert lab.values("os.getpid()") == before
    assert lab.values("kept") == {0: 70, 1: 71, 2: 72}
    assert set(lab.sum_of_ones().values()) == {3.0}


def test_a_link_that_is_cut_for_5_s(lab: Lab, network: Network, tmp_path: Path) -> None:
    """Training goes on when the cable is back: no rank is lost, and parameters stay equal."""
    lab.run(MODEL)
    pids = lab.values("import os; os.getpid()")
    told = tmp_path / "stop"
    lab.push({"told": str(told)})
    run = lab.run(TRAIN_UNTIL_TOLD, wait=False)
    wait_until(lambda: _newest(lab) > 3, "it trains")
    network.hosts["b"].cut()
    begin = time.monotonic()
    wait_until(lambda: time.monotonic() - begin > 5, "the end of the outage")
    stood = _newest(lab)
    network.hosts["b"].mend()
    wait_until(lambda: _newest(lab) > stood + 3, "it trains again")
    told.touch()
    assert len(set(run.wait().values.values())) == 1
    assert _same(lab.pull("weights()"))
    assert lab.values("os.getpid()") == pids


def _newest(lab: Lab) -> int:
    """The newest step of which ranks have told."""
    return max((one.step for one in lab.timeline.ranks()), default=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "a:1,nowhere.invalid:1"}, "host nowhere.invalid could not be reached with ssh: .*resolve"),
        ({"hosts": "b:1", "python": "/no/python"}, "host b: .*/no/python.*Give a Python that exists there"),
        ({"hosts": "a:1", "python": "/usr/bin/python3"}, "host a.*(Python: 3|can't import ddp_lab|has no torch)"),
        (
            {"hosts": "a:1", "client_address": "10.255.255.1"},
            "10.255.255.1.: no interface of this machine has this address",
        ),
        ({"hosts": "a:1", "client_address": "127.0.0.1"}, "host a can't reach 127.0.0.1 port .*refused.*firewall"),
    ],
)
def test_hosts_that_do_not_fit(network: Network, options: dict, message: str) -> None:
    """What is wrong with a host is said at the start, with its name and the remedy."""
    with pytest.raises(ClusterError, match=message):
        Cluster(**options).start()


def test_this_machine_and_another_command_than_ssh(network: Network) -> None:
    """Ranks here and elsewhere make one cluster, those here share its clock; any command that passes on streams starts
    those elsewhere.
    """
    engines = [network.ip, "netns", "exec", f"{network.bridge}{{host}}"]
    with Lab(hosts={"localhost": 1, "b": 1}, launcher=engines, hang_seconds=None) as lab:
        assert set(lab.sum_of_ones().values()) == {2.0}
        assert lab.timeline.clocks == ()  # this command gives no clock of its own
        lab.push({"large": np.zeros(1 << 17)})
        assert lab.values("large.nbytes") == {0: 1 << 20, 1: 1 << 20}
        interfaces = lab.values("import os; os.environ['GLOO_SOCKET_IFNAME']")
        assert interfaces == {0: network.bridge, 1: "eth7"}


@pytest.mark.soak
def test_a_host_without_power(lab: Lab, network: Network) -> None:
    """The host of rank 0 and of the rendezvous is lost: rejoin says who is missing, and works when it has booted."""
    host = network.hosts["a"]
    run = train_for_ever(lab)
    host.kill()
    with pytest.raises(CellError, match="rank 0 was lost with host a"):
        run.wait()
    host.mend()  # its network is back before its sshd
    with pytest.raises(ClusterError, match="host a could not be reached with ssh"):
        lab.rejoin()
    host.start()
    assert list(lab.rejoin()) == [0]
    trains_again(lab, 1)


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
