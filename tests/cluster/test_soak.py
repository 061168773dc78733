"""A thousand random cells on two ranks: nothing hangs, nothing grows.

``DDP_LAB_SOAK_CELLS`` and ``DDP_LAB_SOAK_SEED`` choose how many, and which; what was seen is printed (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CELLS = int(os.environ.get("DDP_LAB_SOAK_CELLS", "1000"))
SEED = int(os.environ.get("DDP_LAB_SOAK_SEED", "1"))
# Growth a cell that passes. Client and controller: an allocator's high water is a few megabytes. A rank remembers each
# cell's text and tree (IPython's history, for tracebacks and `inspect`), and its allocator has a high-water mark, too.
LIMITS = {"KiB": 32.0, "rank KiB": 48.0, "files": 0.02, "threads": 0.02, "segments": 0.002, "processes": 0.002}


def limit(figure: str) -> float:
    """How much a figure may grow a cell."""
    words = figure.split()
    rank = f"rank {words[-1]}"
    return LIMITS[rank] if words[0] == "rank" and rank in LIMITS else LIMITS.get(words[-1], 0.002)


@pytest.mark.soak
def test_a_thousand_cells() -> None:
    """Random cells, interrupts, kills and errors: after each the ranks work and know what they knew; no memory, file,
    thread, process or segment stays behind. The client is a process of its own: in this one other tests left memory."""
    # So client and controller, which nobody can ask, give back what is free.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
    command = [sys.executable, "-m", "tests.cluster.soak", str(CELLS), str(SEED)]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0
    trends = json.loads(done.stdout.splitlines()[-1])
    growing = {name: slope for name, (_, _, slope) in trends.items() if not slope <= limit(name)}  # also NaN
    assert not growing, f"growth a cell (NaN: too few cells to tell): {growing}"
