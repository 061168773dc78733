"""Ranks that are killed, or stopped for a while, at random moments of a sum through shared memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUM_FOR_EVER = Path(__file__).parent / "programs" / "sum_for_ever.py"
TIMES = 60


def _kill_one(draw: random.Random, size: int, folder: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SUM_FOR_EVER), str(rank), str(size), str(folder / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(draw.random() * 0.3)
        victim = draw.randrange(size)
        if draw.random() < 0.5:
            ranks[victim].send_signal(signal.SIGSTOP)
            time.sleep(draw.random())
            ranks[victim].send_signal(signal.SIGCONT)
            time.sleep(0.1)
            assert all(process.poll() is None for process in ranks), "who is slow is waited for"
        ranks[victim].kill()
        for rank, process in enumerate(ranks):
            told, _ = process.communicate(timeout=30)
            assert rank == victim or f"rank {victim} has ended" in told, told
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.soak
def test_a_death_at_any_moment_is_told(tmp_path: Path) -> None:
    """By all other ranks; nothing is left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    draw = random.Random(1)
    for number in range(TIMES):
        (tmp_path / str(number)).mkdir()
        _kill_one(draw, draw.choice((2, 3)), tmp_path / str(number))
    assert set(os.listdir("/dev/shm")) <= before
