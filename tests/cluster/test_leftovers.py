"""However the client ends, every process it started for a cluster ends with it, within three seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from ddp_lab import CellError
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.waiting import DEADLINE_S, wait_until

START = "from ddp_lab import Cluster; lab = Cluster(2).start()"


def script(code: str) -> subprocess.Popen[str]:
    """A Python process that runs `code`; its output is read a line at a time, and its errors stay with the test's."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def all_gone(but: set[int]) -> None:
    """Waits until no process of this test but these is left."""
    wait_until(lambda: not set(leftovers.processes()) - but, f"end of {leftovers.processes()}")


@pytest.fixture
def others() -> set[int]:
    """Processes of this session that don't belong to the test."""
    return set(leftovers.processes())


def test_stop_ends_everything(tmp_path: Path) -> None:
    """stop() returns when every process of the cluster has ended; idle ranks have run their atexit functions by then. A
    second stop() does nothing."""
    lab = Lab(2).start()
    pids = lab.pids()
    assert {"controller", "fork server", "rank 0", "rank 1"} == set(pids)
    lab.run(
        "import atexit, pathlib, subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        f"atexit.register(pathlib.Path({str(tmp_path)!r}, str(rank)).touch)"
    )
    lab.stop()
    assert not [pid for pid in pids.values() if leftovers.alive(pid)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert lab.pids() == {}
    lab.stop()


def test_a_rank_that_is_asked_to_end(tmp_path: Path) -> None:
    """It runs its atexit functions and ends well, whatever its threads still do: Python would wait for this one."""
    ran = tmp_path / "ran"
    with Lab(1) as lab:
        lab.run(
            "import atexit, pathlib, threading; threading.Thread(target=threading.Event().wait).start()\n"
            f"atexit.register(pathlib.Path({str(ran)!r}).touch)"
        )
        os.kill(lab.pids()["rank 0"], signal.SIGTERM)
        wait_until(lambda: lab.status()[0].state == "lost", "the rank's end")
        assert lab.status()[0].exit_code == 0
        assert ran.exists()
        assert "Traceback" not in lab.session.processes.fork_server.log_of(0).read_text()


def test_stop_while_a_rank_hangs() -> None:
    """stop() ends ranks that sit in a collective, too."""
    with Lab(2) as lab:
        run = lab.run("if rank == 0: dist.all_reduce(torch.ones(1))", wait=False)
        wait_until(lambda: lab.status()[1].state == "idle", "rank 1's end")
        pids = lab.pids()
    assert not [pid for pid in pids.values() if leftovers.alive(pid)]
    run._follower.join(DEADLINE_S)


# The interpreter's own end, after an exception as without one, and the end by a signal.
@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError",
        "os.kill(os.getpid(), 15)",
        *(pytest.param(end, marks=pytest.mark.soak) for end in ("pass", "raise SystemExit(1)")),
    ],
)
def test_end_of_a_script_that_did_not_stop(end: str, others: set[int]) -> None:
    """A script that ends without stopping its cluster, by whatever way, leaves no process."""
    process = script(f"import os\n{START}\nprint('started')\n{end}")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.wait(DEADLINE_S)
    all_gone(others)


def test_sigkill_while_a_cell_runs(others: set[int]) -> None:
    """SIGKILL of the client in the middle of a cell, with a child of its own that lives on, leaves no process."""
    process = script(
        f"""
        import os, time
        {START}
        child = os.fork()
        if child == 0:
            time.sleep(600)
        run = lab.run("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)", wait=False)
        while any(record.state != "running" for record in lab.status()):
            pass
        print(child)
        time.sleep(600)
        """
    )
    with process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        try:
            all_gone(others | {child})
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "stage",
    [
        "starting the controller",
        "importing torch",
        "starting engines 0/2",
        pytest.param("starting engines 2/2", marks=pytest.mark.soak),
        "joining",
    ],
)
def test_sigkill_in_the_middle_of_a_start(stage: str, others: set[int]) -> None:
    """SIGKILL of the client at any stage of a start leaves no process and no files."""
    process = script(
        f"""
        import os, signal
        from ddp_lab import Cluster
        def progress(fraction, text):
            if text.startswith({stage!r}):
                os.kill(os.getpid(), signal.SIGKILL)
        Cluster(2).start(progress)
        print("too late")
        """
    )
    with process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(DEADLINE_S) == (0 if said else -signal.SIGKILL)
    all_gone(others)


@pytest.fixture
def kernel() -> Iterator[tuple[KernelManager, Any]]:
    """A Jupyter kernel in which a cluster was started."""
    manager, client = start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    try:
        reply = client.execute_interactive(START, timeout=DEADLINE_S, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok"
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def cluster_processes(manager: KernelManager, others: set[int]) -> set[int]:
    """What runs besides the kernel itself."""
    return {pid for pid in set(leftovers.processes()) - others if pid != manager.provisioner.pid}


# The kernel is told the same for a restart and for a shutdown.
@pytest.mark.parametrize("way", ["restart", pytest.param("shutdown", marks=pytest.mark.soak), "kill"])
def test_end_of_a_kernel(way: str, others: set[int], kernel: tuple[KernelManager, Any]) -> None:
    """Restart, shutdown and SIGKILL of the kernel leave no process of the cluster."""
    manager, _ = kernel
    before = cluster_processes(manager, others)
    assert len(before) >= 4
    if way == "restart":
        manager.restart_kernel()
    elif way == "shutdown":
        manager.shutdown_kernel()
    else:
        os.kill(manager.provisioner.pid, signal.SIGKILL)
    wait_until(lambda: not [pid for pid in before if leftovers.alive(pid)], f"end after {way}")


def test_sigkill_of_the_fork_server() -> None:
    """Ranks end with the fork server, the cell that ran says so, and restart() starts a new one."""
    with Lab(2) as lab:
        pids = lab.pids()
        run = lab.run("import time; time.sleep(600)", wait=False)
        os.kill(pids["fork server"], signal.SIGKILL)
        wait_until(lambda: not leftovers.alive(pids["rank 0"]) and not leftovers.alive(pids["rank 1"]), "ranks' end")
        wait_until(lambda: {record.state for record in lab.status()} == {"lost"}, "status")
        with pytest.raises(CellError, match=r"ended: the fork server was killed by SIGKILL \(signal 9\) \(`%cluster r"):
            run.wait()
        lab.restart()
        assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
