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
    """A rank that is asked to end runs its atexit functions and ends well, whatever its threads still do: Python would
    wait for this one. stop() returns when every process of the cluster has ended; idle ranks have run their atexit
    functions by then. No log is left, and a result that is held has every output. A second stop() does nothing."""
    lab = Lab(2).start()
    pids = lab.pids()
    assert {"controller", "fork server", "rank 0", "rank 1"} == set(pids)
    lab.run(
        "import atexit, pathlib, subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        f"atexit.register(pathlib.Path({str(tmp_path)!r}, str(rank)).touch)\n"
        "import threading; rank == 1 and threading.Thread(target=threading.Event().wait).start()"
    )
    result = lab.run("for i in range(2_000): print(i)\nfrom IPython.display import HTML\nHTML('<b>x</b>')")
    logs = result.logs[0].parent
    assert logs.is_dir()
    os.kill(pids["rank 1"], signal.SIGTERM)
    wait_until(lambda: lab.status()[1].state == "lost", "the rank's end")
    assert lab.status()[1].exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert "Traceback" not in lab.session.processes.fork_server.log_of(1).read_text()
    lab.stop()
    assert not [pid for pid in pids.values() if leftovers.alive(pid)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert not logs.exists()
    assert result.text(0).startswith("".join(f"{i}\n" for i in range(2_000)))
    assert result.outputs[0][-1]["data"]["text/html"] == "<b>x</b>"
    assert lab.pids() == {}
    lab.stop()


_SCRIPT = """
import os, sys
{start}

def scaled(factor):
    import torch.distributed as dist
    return factor * dist.get_rank()

result = lab.run("print('on', rank); rank + 1")
assert result.values == {{0: 1, 1: 2}}, result.values
assert lab.run(scaled, 10).values == {{0: 0, 1: 10}}
lab.push({{"x": [1, 2]}})
assert lab.pull("x") == {{0: [1, 2], 1: [1, 2]}}
assert "torch" not in sys.modules
assert "ipywidgets" not in sys.modules
print("checked")
{end}
"""


# The interpreter's own end, and the end by a signal.
@pytest.mark.parametrize(
    ("end", "code"),
    [("raise ValueError", 1), pytest.param("os.kill(os.getpid(), 15)", -15, marks=pytest.mark.soak)],
)
def test_end_of_a_script_that_did_not_stop(end: str, code: int, others: set[int]) -> None:
    """A plain script runs cells and functions through Cluster, and its process never imports torch; one that ends
    without stopping its cluster, by whatever way, leaves no process."""
    with script(_SCRIPT.format(start=START, end=end)) as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert {"[rank 0] on 0", "[rank 1] on 1", "checked"} <= set(said.splitlines())
    assert process.returncode == code
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


def test_sigkill_in_the_middle_of_a_stop(others: set[int]) -> None:
    """SIGKILL of the client while it removes the cluster's files, as of a kernel that takes long to end, leaves none.

    The second cluster's processes are forked from the zygote, and leave the files to a client that is there.
    """
    process = script(
        f"""
        import os, shutil, signal
        {START}
        lab.stop()
        lab.start()
        shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        lab.stop()
        """
    )
    with process:
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
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


# The kernel is told the same for a shutdown; SIGKILL of a kernel is that of any client.
def test_end_of_a_kernel(others: set[int], kernel: tuple[KernelManager, Any]) -> None:
    """The restart of a kernel leaves no process of the cluster."""
    manager, _ = kernel
    before = cluster_processes(manager, others)
    assert len(before) >= 4
    manager.restart_kernel()
    wait_until(lambda: not [pid for pid in before if leftovers.alive(pid)], "their end")
