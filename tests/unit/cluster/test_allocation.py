"""The hosts that a batch system has given to this job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab import Cluster
from ddp_lab.cluster.processes.hosts import allocated, parse_hosts
from ddp_lab.errors import ClusterError

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


def test_lsf() -> None:
    """LSF says hosts and slots in one variable."""
    assert list(allocated({"LSB_MCPU_HOSTS": "gpu2 2 gpu10 3 "}).items()) == [("gpu2", 2), ("gpu10", 3)]


def test_ranks_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank for each slot, or as many as are asked for, evenly."""
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 4 b 4")
    by_slots = {host.name: len(host.ranks) for host in parse_hosts("allocation")}
    assert by_slots == {"a": 4, "b": 4}
    assert {host.name: len(host.ranks) for host in parse_hosts("allocation", 4)} == {"a": 2, "b": 2}
    assert Cluster(launcher="lsf").world_size == 8
    assert Cluster(2, launcher="lsf").runs_on("a:1,b:1", None)
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
