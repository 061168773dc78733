"""What tests are blamed for leaving behind is theirs."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import leftovers
from tests.waiting import wait_until

_HELD = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name.lstrip("/"), flush=True)
input()
"""


def test_a_semaphore_of_somebody_else() -> None:
    """No test is blamed for what a process without our mark makes meanwhile."""
    environment = {name: value for name, value in os.environ.items() if name != leftovers.MARK}
    before = leftovers.look()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _HELD], env=environment, text=True, **pipes) as other:
        name = other.stdout.readline().strip()
        assert Path("/dev/shm", f"sem.{name}").exists()
        assert not leftovers.look() - before
        other.communicate("\n")


@pytest.mark.parametrize("ours", ["here", "in a child"])
def test_a_semaphore_of_ours(ours: str) -> None:
    """A semaphore of this process, or of one that a test started, is found until it is removed."""
    before = leftovers.look()
    if ours == "here":
        lock = multiprocessing.get_context("spawn").Lock()
        name = f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
        assert name in (leftovers.look() - before)["shared_memory"]
        del lock
    else:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", _HELD], text=True, **pipes) as child:
            name = f"sem.{child.stdout.readline().strip()}"
            more = leftovers.look() - before
            assert name in more["shared_memory"]
            assert f"(of {os.environ['PYTEST_CURRENT_TEST']})" in more["processes"][0]
            child.communicate("\n")
    assert not (leftovers.look() - before).get("shared_memory")


def test_a_folder_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's folder whose owner is gone is found if it was made in this session; an older one may carry the id of
    a process that had the same since."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        pass
    before = leftovers.look()
    old, new = (tmp_path / f"ddp_lab-{gone.pid}-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1e9, 1e9))
    assert leftovers.look() - before == {"directories": [str(new)]}


_CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure, pytest_sessionfinish, pytest_sessionstart
from tests.conftest import pytest_terminal_summary, pytest_testnodedown
"""
_LEAVES = """
import pathlib, subprocess
def leave(name):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name(f"{name}.pid").write_text(str(child.pid))
    child.returncode = 0  # Python does not wait for it
def test_passes():
    leave("passes")
"""
_CRASHES = """
def test_crashes():
    leave("crashes")
    import os; os._exit(1)
"""


_KILLS = """
import multiprocessing, signal
from multiprocessing import resource_tracker
from pathlib import Path

def hold(pipe):
    lock = multiprocessing.get_context("spawn").Lock()
    pipe.send(lock._semlock.name)
    signal.pause()

def test_kills():
    resource_tracker.ensure_running()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,))
    child.start()
    name = ours.recv()
    child.kill()
    child.join()
    assert Path("/dev/shm", "sem." + name.lstrip("/")).exists()
"""


def _run_suite(folder: Path, test: str, workers: int, patience: str = "1") -> subprocess.CompletedProcess[str]:
    """Runs a suite of one file that looks for what it leaves as this one does."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_it.py").write_text(test)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DDP_LAB_TEST_PATIENCE": patience}
    command = [sys.executable, "-m", "pytest", f"--numprocesses={workers}", "--rootdir", str(folder), "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("workers", "more"), [(0, ""), (2, _CRASHES)], ids=["alone", "crash"])
def test_a_suite_that_leaves_a_process_is_red(tmp_path: Path, workers: int, more: str) -> None:
    """Whether its test passes or ends the worker, the suite fails, names the process and the test that started it."""
    done = _run_suite(tmp_path, _LEAVES + more, workers, patience="0.005")
    for path in tmp_path.glob("*.pid"):
        os.kill(int(path.read_text()), signal.SIGKILL)
        (line,) = (line for line in done.stdout.splitlines() if f"(of test_it.py::test_{path.stem}" in line)
        assert re.match(r"LEFT BEHIND .* sleep 600 ", line)
        assert line in done.stdout.splitlines()[-5:], "far above the closing line"
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    assert ("crashed while running" in done.stdout) == bool(more)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_suite_that_kills_a_process_is_green(tmp_path: Path, workers: int) -> None:
    """The semaphores of a process that was killed, as the ranks of a failed test are, go with the suite's end."""
    done = _run_suite(tmp_path, _KILLS, workers)
    assert done.returncode == 0, done.stdout
    assert "LEFT BEHIND" not in done.stdout


def test_what_an_interrupted_suite_has_started_ends(tmp_path: Path) -> None:
    """After Ctrl-C no test ends what it shares with others, so the suite does, and waits for nothing else."""
    done = _run_suite(tmp_path, _LEAVES + "\ndef test_interrupt(): raise KeyboardInterrupt", 0)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert pids
    wait_until(lambda: not any(map(leftovers.alive, pids)), "their end")
    assert (done.returncode, "LEFT BEHIND" in done.stdout) == (2, False), done.stdout
