"""Hosts as users or a batch system name them, what must be equal on them, and where their ranks go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_lab import Cluster
from ddp_lab.cluster.cluster import uses_hosts
from ddp_lab.cluster.processes.host_commands import host_command
from ddp_lab.cluster.processes.hosts import address_of, allocated, check_versions, parse_hosts, spread
from ddp_lab.errors import ClusterError
from ddp_lab.notebook import magics

VERSIONS = {"Python": "3.11", "torch": "2.13.0", "ddp_lab": "0.1.0", "ddp_lab's files": "abc"}


@pytest.mark.parametrize(
    ("hosts", "n", "expected"),
    [
        ("a:4,b:2", None, {"a": (0, 4), "b": (4, 6)}),
        (["a:1", "user@b:1"], None, {"a": (0, 1), "user@b": (1, 2)}),
        ({"a": 2, "localhost": 1}, 3, {"a": (0, 2), "localhost": (2, 3)}),
        ("a,b", 4, {"a": (0, 2), "b": (2, 4)}),
        ("a:1, b", 4, {"a": (0, 1), "b": (1, 4)}),
    ],
)
def test_ranks_are_numbered_by_host(hosts: Any, n: int | None, expected: dict[str, tuple[int, int]]) -> None:
    """Hosts get their ranks in the order in which they are named."""
    assert {host.name: (host.ranks.start, host.ranks.stop) for host in parse_hosts(hosts, n)} == expected


@pytest.mark.parametrize(
    ("hosts", "n", "message"),
    [
        ("a,b:2", None, "give the number of ranks on a"),
        ("a,b", 3, "can't be divided evenly among a, b"),
        ("a:2,b:2", 3, "n=3, but the hosts run 4"),
        ("a:2,a:2", None, "'a' is given twice"),
        ("a:x", None, "'a:x' does not have the form NAME:RANKS"),
        ("a:0", None, "a can't run 0 ranks"),
        ("-oProxyCommand=x:2", None, "not a valid host name"),
        ("", None, "not a valid host name"),
        ([], None, "give at least one"),
    ],
)
def test_wrong_hosts(hosts: Any, n: int | None, message: str) -> None:
    """What is wrong is named."""
    with pytest.raises(ValueError, match=message):
        parse_hosts(hosts, n)


@pytest.mark.parametrize("what", ["Python", "torch", "ddp_lab", "ddp_lab's files"])
def test_versions(what: str) -> None:
    """A difference is told with the host's name and both versions."""
    same = {"this machine": VERSIONS, "a": {**VERSIONS, "torch": "2.13.0+cu126"}}
    check_versions(same)
    with pytest.raises(ClusterError, match=f"{what}: 9.9 on host b, {VERSIONS[what]} on this machine"):
        check_versions({**same, "b": {**VERSIONS, what: "9.9"}})


def test_a_machine_without_torch() -> None:
    """The notebook's machine needs none, but the ranks' hosts need the same."""
    here = {"this machine": {**VERSIONS, "torch": ""}, "a": VERSIONS}
    check_versions(here)
    with pytest.raises(ClusterError, match=r"torch: 2\.9\.0 on host b, 2\.13\.0 on a"):
        check_versions({**here, "b": {**VERSIONS, "torch": "2.9.0"}})
    with pytest.raises(ClusterError, match="host b has no torch"):
        check_versions({**here, "b": {**VERSIONS, "torch": ""}})


def _facts(gpus: int = 0, chosen: str | None = None) -> dict[str, Any]:
    return {"gpus": gpus, "chosen_gpus": chosen, "cores": 8}


def test_devices_by_host() -> None:
    """Each host's ranks take its own GPUs, threads are divided by host. They can't train together on what only some
    have."""
    hosts = parse_hosts("a:2,b:3")
    placement, variables = spread(hosts, {"a": _facts(4, "2,3"), "b": _facts(2)}, None, {"X": "1"}, "auto")
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    assert variables["a"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["b"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert variables["a"]["X"] == variables["b"]["X"] == "1"
    assert "NCCL_HOSTID" not in placement.rank_environments[0]
    assert placement.rank_environments[4]["NCCL_HOSTID"] != placement.rank_environments[2]["NCCL_HOSTID"]
    hosts, facts = parse_hosts("a:1,b:1"), {"a": _facts(1), "b": _facts()}
    with pytest.raises(ClusterError, match="host a has GPUs, but the ranks of host b see none"):
        spread(hosts, facts, None, {}, "auto")
    assert spread(hosts, facts, None, {}, "gloo")[0].devices == ("cpu", "cpu")
    with pytest.raises(ValueError, match=r"host b: devices=\[0\]: no GPU is visible"):
        spread(hosts, facts, [0], {}, "auto")


@pytest.mark.parametrize(
    ("ssh", "addresses", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], [("lo", "127.0.0.1"), ("eth1", "10.1.0.2"), ("eth0", "10.0.0.2")], "10.0.0.2"),
        (["fe80::1", "fe80::2"], [("lo", "127.0.0.1"), ("eth1", "10.1.0.2")], "10.1.0.2"),
        (["1.2.3.4", "5.6.7.8"], [("lo", "127.0.0.1"), ("eth1", "10.1.0.2")], "10.1.0.2"),  # translated on the way
        ([], [("lo", "127.0.0.1"), ("eth1", "10.1.0.2")], "10.1.0.2"),
    ],
)
def test_address(ssh: list[str], addresses: list[tuple[str, str]], expected: str) -> None:
    """The address by which ssh came, if the host has it; else one that it has."""
    assert address_of("nowhere.invalid", {"ssh": ssh, "addresses": addresses}) == expected


def test_ssh_can_ask_nothing() -> None:
    """The command line holds no secret, takes no terminal, forwards nothing and quotes the Python's path. Also for an
    ssh of one's own the path is quoted: the other host's shell reads it."""
    command = host_command("ssh", "user@a", "/opt/my python/bin/python", 30)
    assert command[-2:] == ["user@a", "exec '/opt/my python/bin/python' -m ddp_lab.engine.processes.host_server"]
    assert {"-T", "BatchMode=yes", "ClearAllForwardings=yes", "ForwardAgent=no"} <= set(command)
    assert command[-3] == "--"
    words = ["/usr/bin/ssh", "-p", "2222", "{host}"]
    command = host_command(words, "a", "/opt/my python/bin/python", 30)
    assert command[-2:] == ["a", "exec '/opt/my python/bin/python' -m ddp_lab.engine.processes.host_server"]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("slurm", "srun --nodelist=a --nodes=1 --ntasks=1 --overlap --unbuffered --cpu-bind=none --export=ALL"),
        ("mpi", "mpiexec -n 1 -host a -bind-to none"),
        (["qrsh", "-inherit", "{host}"], "qrsh -inherit a"),
        (["docker", "exec", "-i", "lab-{host}"], "docker exec -i lab-a"),
    ],
)
def test_commands_of_batch_systems(launcher: Any, command: str) -> None:
    """Each starts the fork server on the host that is meant, with the Python that is meant."""
    words = [*command.split(), "/p/python", "-m", "ddp_lab.engine.processes.host_server"]
    assert host_command(launcher, "a", "/p/python", 30) == words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": "a:1", "launcher": "pbs"}, "launcher='pbs': choose one of ssh, slurm"),
        ({"hosts": "a:1", "launcher": ["kexec", "-i"]}, "needs {host}"),
        ({"python": "/usr/bin/python3"}, "give hosts="),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    """What is wrong is named, and what there is; a Python for other hosts without other hosts is a mistake."""
    with pytest.raises(ValueError, match=message):
        Cluster(2 if "python" in given else None, **given)


def test_commands_that_start_hosts() -> None:
    """The start says which command is missing, and starts nothing. `%cluster start --hosts a:4,b:4` is understood."""
    with pytest.raises(ClusterError, match="host a can't be reached: this machine has no command kexec"):
        Cluster(hosts="a:1", launcher=["kexec", "{host}"]).start()
    line = "start --hosts a:4,b:4 --launcher slurm --python /p --client-address 10.0.0.1"
    options = magics._MAGICS["cluster"][1].parse_line(line)
    given = options.hosts, options.launcher, options.python, options.client_address
    assert given == ("a:4,b:4", "slurm", "/p", "10.0.0.1")


VARIABLES = ("SLURM_JOB_NODELIST", "LSB_MCPU_HOSTS", "PBS_NODEFILE", "PE_HOSTFILE")


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PBS_NODEFILE", "gpu2\ngpu2\ngpu10\ngpu10\ngpu10\n"),
        ("PE_HOSTFILE", "gpu2 2 all.q@gpu2 UNDEFINED\ngpu10 3 all.q@gpu10 <NULL>\n"),
    ],
)
def test_files(variable: str, text: str, tmp_path: Path) -> None:
    """PBS names a host once for each process, Grid Engine with its slots."""
    (tmp_path / "hosts").write_text(text)
    assert list(allocated({variable: str(tmp_path / "hosts")}).items()) == [("gpu2", 2), ("gpu10", 3)]


def test_lsf(monkeypatch: pytest.MonkeyPatch) -> None:
    """LSF says hosts and slots in one variable. A rank for each slot, or as many as are asked for, evenly."""
    assert list(allocated({"LSB_MCPU_HOSTS": "gpu2 2 gpu10 3 "}).items()) == [("gpu2", 2), ("gpu10", 3)]
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 4 b 4")
    by_slots = {host.name: len(host.ranks) for host in parse_hosts("allocation")}
    assert by_slots == {"a": 4, "b": 4}
    assert {host.name: len(host.ranks) for host in parse_hosts("allocation", 4)} == {"a": 2, "b": 2}
    assert Cluster(launcher="mpi").world_size == 8
    assert uses_hosts(Cluster(2, launcher="mpi"), "a:1,b:1", None)
    assert Cluster(hosts="allocation", launcher=["blaunch", "{host}"]).world_size == 8
    with pytest.raises(ValueError, match="can't be divided evenly among a, b"):
        Cluster(3, hosts="allocation")


def test_no_allocation(tmp_path: Path) -> None:
    """Without an allocation, or with one that can't be read, the error says what was looked for."""
    with pytest.raises(ClusterError, match=r"allocation of a batch system \(SLURM_JOB_NODELIST, .*give the hosts"):
        Cluster(2, launcher="slurm")
    with pytest.raises(ClusterError, match=r"PBS_NODEFILE='.*gone' can't be read: .*No such file"):
        allocated({"PBS_NODEFILE": str(tmp_path / "gone")})
    with pytest.raises(ClusterError, match=r"LSB_MCPU_HOSTS='a 4 b' can't be read"):
        allocated({"LSB_MCPU_HOSTS": "a 4 b"})
