"""What tests are blamed for leaving behind is theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tests import leftovers

_HELD = """
import multiprocessing, multiprocessing.resource_tracker, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name.lstrip("/"), multiprocessing.resource_tracker._resource_tracker._pid, flush=True)
time.sleep(600)
"""


def test_a_semaphore_of_a_killed_process_of_somebody_else() -> None:
    """It lies there for good, since its tracker was killed, too; it was there before, so no test left it."""
    environment = {name: value for name, value in os.environ.items() if name != leftovers.MARK}
    command = [sys.executable, "-c", _HELD]
    other = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert other.stdout is not None
    name, tracker = other.stdout.readline().split()
    before = leftovers.look()
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()
    leftovers.wait_until(lambda: not leftovers.alive(int(tracker)), 30, "the tracker's end")
    semaphore = Path("/dev/shm", f"sem.{name}")
    assert semaphore.exists()
    blamed = (leftovers.look() - before).get("shared_memory", [])
    semaphore.unlink()
    assert semaphore.name not in blamed


def test_a_segment_of_ours() -> None:
    """It is named until it is removed."""
    before = leftovers.look()
    segment = SharedMemory(create=True, size=64)
    assert segment.name in (leftovers.look() - before)["shared_memory"]
    segment.close()
    segment.unlink()
    assert segment.name not in (leftovers.look() - before).get("shared_memory", [])
