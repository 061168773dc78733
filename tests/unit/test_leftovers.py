"""What tests are blamed for leaving behind is theirs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers

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
        assert other.stdout is not None
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
            assert child.stdout is not None
            name = f"sem.{child.stdout.readline().strip()}"
            more = leftovers.look() - before
            assert name in more["shared_memory"]
            assert f"(of {os.environ['PYTEST_CURRENT_TEST']})" in more["processes"][0]
            child.communicate("\n")
    assert not (leftovers.look() - before).get("shared_memory")
