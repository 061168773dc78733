"""Starting a cluster: what it gives, what it says on the way, and how it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_lab
from ddp_lab import ClusterError, documentation
from ddp_lab.notebook import commands
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

_THREADS = """import os, numpy, threadpoolctl
[openblas] = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
int(os.environ["OMP_NUM_THREADS"]), torch.get_num_threads(), openblas["num_threads"]"""


def test_names_in_the_namespace(lab: Lab) -> None:
    """Each rank finds rank, world_size, local_rank, device, torch, dist and ddp_lab bound."""
    names = "(rank, world_size, local_rank, str(device), torch.__name__, dist.__name__, ddp_lab.__name__)"
    expected = (2, "cpu", "torch", "torch.distributed", "ddp_lab")
    for rank, (own, world_size, local_rank, *rest) in lab.values(names).items():
        assert own == local_rank == rank
        assert (world_size, *rest) == expected


def test_environment_of_torchrun(lab: Lab) -> None:
    """Each rank finds the variables that torchrun sets."""
    code = "import os; [os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')]"
    assert lab.values(code) == {0: ["0", "0", "2", "2"], 1: ["1", "1", "2", "2"]}
    addresses = lab.values("os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])")
    assert addresses[0] == addresses[1]
    assert addresses[0][0] == "127.0.0.1"


def test_threads_are_divided(lab: Lab) -> None:
    """The ranks share the machine's processors instead of using all of them each."""
    threads = max(1, len(os.sched_getaffinity(0)) // lab.world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        assert set(lab.values(_THREADS).values()) == {(threads, threads, threads)}


def test_cpu_ranks_give_way(lab: Lab) -> None:
    """The kernel goes before the ranks, which share one session, but can each be ended with what it started."""
    found = lab.values("import os; os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0), os.getpgid(0) == os.getpid()")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [(nice > own, leads) for nice, _, leads in found.values()] == [(True, True)] * 2
    sessions = {session for _, session, _ in found.values()}
    assert len(sessions) == 1
    assert os.getsid(0) not in sessions
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        assert set(lab.values(f"open('{autogroup}').read().split()[-1] != '0'").values()) == {True}


def test_default_timeout_is_torchs(lab: Lab) -> None:
    """The default group has torch's own time-out: a pause must kill nothing."""
    code = "from ddp_lab.engine.groups import registry as groups; groups.alive()[0].timeout_seconds"
    default = "torch.distributed.constants.default_pg_timeout.total_seconds()"
    assert lab.values(code) == lab.values(default)


def test_status(lab: Lab) -> None:
    """status() tells engine, pid, device and state of every rank."""
    records = lab.status()
    assert [record.rank for record in records] == [0, 1]
    assert {record.rank: record.pid for record in records} == lab.values("import os; os.getpid()")
    assert [record.state for record in records] == ["idle", "idle"]
    assert [record.device for record in records] == ["cpu", "cpu"]
    assert all("shm" in record.backend for record in records)
    run = lab.run("import threading; release = threading.Event(); release.wait(60)", ranks=[1], wait=False)
    try:
        states = [record.state for record in lab.status()]
        assert states[0] == "idle"
        while states[1] != "running":
            states = [record.state for record in lab.status()]
    finally:
        run.interrupt()
        with pytest.raises(ddp_lab.CellError):
            run.wait()


def test_ranks_forked_from_one_process_differ(lab: Lab) -> None:
    """Ranks share no random state of Python or numpy, though they were forked from one process."""
    assert len(set(lab.values("import random; random.random()").values())) == 2
    assert len(set(lab.values("import numpy; float(numpy.random.rand())").values())) == 2


def test_progress_and_restart(lab: Lab) -> None:
    """A start tells what it waits for, with a fraction that never falls; ranks have the variables that are given, and
    with DDP_LAB_GIVE_WAY=0 the kernel's priority. A restart gives new processes; a rank that dies in it ends it with
    the reason, and the cluster with it."""
    seen: list[tuple[float, str]] = []
    killed: list[int] = []
    options = {"backend": "gloo", "env": {"DDP_LAB_TEST_VARIABLE": "7", "DDP_LAB_GIVE_WAY": "0"}}
    with Lab(2, **options).start(lambda *step: seen.append(step)) as mine:
        fractions = [fraction for fraction, _ in seen]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        said = "\n".join(text for _, text in seen)
        for stage in ("controller", "importing torch", "starting engines", "joining", "first collective"):
            assert stage in said
        found = mine.values("import os; os.environ['DDP_LAB_TEST_VARIABLE'], os.getpriority(os.PRIO_PROCESS, 0)")
        assert found == dict.fromkeys(range(2), ("7", os.getpriority(os.PRIO_PROCESS, 0)))
        assert ddp_lab.current_cluster() is mine
        before = mine.values("x = 1; os.getpid()")
        mine.restart()
        assert not set(before.values()) & set(mine.values("import os; os.getpid()").values())
        assert mine.values("'x' in globals()") == {0: False, 1: False}
        assert mine.sum_of_ones() == {0: 2.0, 1: 2.0}
        former = mine.pids()["rank 0"]

        def kill(fraction: float, text: str) -> None:
            pid = mine.pids().get("rank 0", former)
            if pid != former and not killed:
                os.kill(pid, 9)
                killed.append(pid)

        with pytest.raises(ClusterError, match=r"rank 0 was killed by SIGKILL \(signal 9\)"):
            mine.restart(kill)
        assert killed
        assert not mine.running
    assert ddp_lab.current_cluster() is lab, "of those that run, the last one that was started"
    with pytest.raises(ClusterError, match="the cluster is not running"):
        mine.run("1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"PYTHONHOME": "/nowhere"}}, "fork server"),
        ({"backend": "gloo", "env": {"GLOO_SOCKET_IFNAME": "nowhere0"}}, r"failed on rank \d: .*nowhere0"),
    ],
)
def test_failing_start_ends_at_once_and_says_why(options: dict, message: str) -> None:
    """A rank that can't start ends the start at once, with the end of its log in the error; that of one that can't join
    begins with its words, and its traceback has whole lines."""
    lab = Lab(2, **options)
    with pytest.raises(ClusterError, match=message) as raised:
        lab.start()
    assert not lab.running
    if "backend" in options:
        trace = [line for line in str(raised.value).splitlines()[1:] if line]
        assert trace[0].startswith("Traceback")
        assert max(map(len, trace)) > 40


def test_a_magic_that_can_not_start(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """`%cluster start` ends its line and raises the reason; the cluster that was current stays so."""
    with pytest.raises(ClusterError, match=r"(?i)mpi"):
        commands.start(2, backend="mpi", name="other")
    assert "✗ starting the cluster failed after " in capsys.readouterr().err
    assert ddp_lab.current_cluster() is lab


def test_calls_that_make_no_sense(lab: Lab) -> None:
    """Each is refused with its reason, and nothing has changed."""
    with pytest.raises(ValueError, match="hang_seconds=0: give a time in seconds, or None"):
        Lab(1, hang_seconds=0)
    with pytest.raises(ClusterError, match="the cluster is already running"):
        lab.start()
    with pytest.raises(ClusterError, match="only a cluster started with detach=True"):
        lab.detach()
    with pytest.raises(ValueError, match="choose at least one rank"):
        lab.run("1", ranks=[])
    idle = Lab(1)
    for call in (idle.use, idle.detach):
        with pytest.raises(ClusterError, match="the cluster is not running"):
            call()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_too_few_files() -> None:
    """Where the system lets a process open too few files, the start says so at once, and how to raise the limit."""
    code = "from ddp_lab import Cluster; Cluster(2).start()"
    command = f'ulimit -n 64; exec "$0" -c "{code}"'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
    assert "this process may open only 64 files, but a cluster needs 128" in done.stderr
    assert "`ulimit -n 1024`" in done.stderr


# What the driver's management library of a machine with two GPUs answers.
_NVML = """
extern "C" int nvmlInit_v2() { return 0; }
extern "C" int nvmlShutdown() { return 0; }
extern "C" int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
"""


def test_gpus_that_torch_does_not_see(lab: Lab, tmp_path: Path) -> None:
    """Where the driver reports GPUs that torch can't use, the start fails with the fix and a link, and no traceback."""
    if lab.values("torch.cuda.is_available()")[0]:
        pytest.skip("torch sees the GPUs of this machine")
    source, library = tmp_path / "nvml.cpp", tmp_path / "libnvidia-ml.so.1"
    source.write_text(_NVML)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    program = tmp_path / "start.py"
    program.write_text("import ddp_lab\nif __name__ == '__main__':\n    ddp_lab.Cluster().start()\n")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    words, more = done.stderr.splitlines()[-2:]
    assert re.search(r"can't use cuda:[01], which the driver reports: .*%cluster start --backend gloo", words)
    assert more == documentation.more("torch-without-gpus")


@pytest.mark.parametrize("victim", ["fork server", "rank 1"])
def test_process_that_is_killed_while_starting(victim: str) -> None:
    """A start whose fork server or rank is killed ends at once, and names who, and by which signal."""
    lab = Lab(2)
    killed = []

    def kill(fraction: float, text: str) -> None:
        pid = lab.pids().get(victim)
        if pid and not killed and (victim.startswith("rank") or text.startswith("starting engines")):
            os.kill(pid, 9)
            killed.append(pid)

    with pytest.raises(ClusterError, match=rf"{victim} was killed by SIGKILL \(signal 9\)"):
        lab.start(kill)
    assert not lab.running


@pytest.mark.parametrize("detach", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_ranks_start_in_the_notebooks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detach: bool) -> None:
    """The one that is current when the cluster starts; their cells import from it, the cluster's processes don't."""
    for name in ("json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    (tmp_path / "mine.py").write_text("found = True")
    monkeypatch.chdir(tmp_path)
    with Lab(1, detach=detach) as lab:
        assert lab.values("import os, mine; os.getcwd(), mine.found") == {0: (str(tmp_path), True)}
        test_threads_are_divided(lab)
        os.kill(lab.pids()["rank 0"], signal.SIGKILL)
        wait_until(lambda: "rank 0" not in lab.pids(), "the end of rank 0")
        assert lab.values("import os, mine; os.getcwd()") == {0: str(tmp_path)}
        lab.stop()  # leaving the block would only detach


def test_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a cluster says so, and what to do."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ClusterError, match=r"the current folder was removed: change to another, e.g. with `%cd ~`"):
        Lab(1).start()
