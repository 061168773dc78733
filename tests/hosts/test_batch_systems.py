"""Ranks that a batch system starts: a Slurm of one host, made for the test, and Open MPI."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab.errors import CellError
from tests.cluster.conftest import Lab
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.soak

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_PROGRAM = """
import os, time
from ddp_lab import Cluster
from ddp_lab.errors import CellError

_SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"
with Cluster(launcher="slurm", hang_seconds=None) as lab:
    assert lab.run(_SUM).values == {0: 2.0, 1: 2.0}
    steps = lab.run("import os; os.environ['SLURM_STEP_ID']").values
    assert len(set(steps.values())) == 1, steps
    run = lab.run("dist.barrier() if rank else __import__('time').sleep(1000)", wait=False)
    while set(run.status().ranks.values()) != {"running"}:
        time.sleep(0.01)
    lab.interrupt()
    try:
        run.wait()
    except CellError as error:
        assert "were interrupted" in str(error), error
    assert lab.run(_SUM).values == {0: 2.0, 1: 2.0}
    print("step", steps[0])
"""


def _daemon(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"no {name} (make batch)")
    return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find a Slurm whose only host is this machine."""
    if os.getuid():
        pytest.skip("Slurm's daemons need root")
    munged, slurmctld, slurmd = (_daemon(name) for name in ("munged", "slurmctld", "slurmd"))
    tmp_path.chmod(0o755)
    for folder in ("state", "spool"):
        (tmp_path / folder).mkdir()
    key = tmp_path / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (first, second)]
    host = socket.gethostname().partition(".")[0]
    text = _CONFIGURATION.format(host=host, ports=ports, folder=tmp_path, cores=os.cpu_count())
    (tmp_path / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    options = [f"--{name}-file={tmp_path}/munge.{name}" for name in ("key", "pid", "seed")]
    options.append(f"--socket={tmp_path}/munge.socket")
    commands = ([munged, "--foreground", "--force", *options], [slurmctld, "-D"], [slurmd, "-D"])
    with (tmp_path / "daemons.log").open("wb") as log:
        daemons = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for command in commands]
        try:

            def idle() -> bool:
                command = ["sinfo", "--noheader", "--format=%T"]
                shown = subprocess.run(command, env=environment, capture_output=True, text=True)
                return shown.stdout.strip() == "idle"

            wait_until(idle, "Slurm's host is idle")
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(DEADLINE_S)


def test_slurm(slurm: dict[str, str]) -> None:
    """Inside of an allocation, ranks run in a step of it, as many as it has tasks; they train and are interrupted."""
    command = ["salloc", "--nodes=1", "--ntasks=2", sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("step 0\n"), done.stdout


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no mpiexec (make mpi)")
def test_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that mpiexec starts, here on this machine, train and are interrupted."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    with Lab(hosts={socket.gethostname(): 2}, launcher="mpi", hang_seconds=None) as lab:
        run = lab.run("dist.barrier() if rank else __import__('time').sleep(1000)", wait=False)
        wait_until(lambda: set(run.status().ranks.values()) == {"running"}, "the cell runs")
        lab.interrupt()
        with pytest.raises(CellError, match="interrupted"):
            run.wait()
        assert set(lab.sum_of_ones().values()) == {2.0}
