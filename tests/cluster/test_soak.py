"""A thousand random cells on two ranks: nothing hangs, nothing grows.

``DDP_LAB_SOAK_CELLS`` and ``DDP_LAB_SOAK_SEED`` choose how many, and which; what was seen is printed (``pytest -s``).
"""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.cluster.conftest import Lab
from tests.cluster.soak import Soak

CELLS = int(os.environ.get("DDP_LAB_SOAK_CELLS", "1000"))
SEED = int(os.environ.get("DDP_LAB_SOAK_SEED", "1"))
_M_ARENA_MAX = -8  # of malloc.h
# Growth a cell that passes. Client and controller: an allocator's high water is a few megabytes. A rank remembers each
# cell's text and tree (IPython's history, for tracebacks and `inspect`), and its allocator has a high-water mark, too.
LIMITS = {"KiB": 32.0, "rank KiB": 48.0, "files": 0.02, "threads": 0.02, "segments": 0.002, "processes": 0.002}


def limit(figure: str) -> float:
    """How much a figure may grow a cell."""
    words = figure.split()
    rank = f"rank {words[-1]}"
    return LIMITS[rank] if words[0] == "rank" and rank in LIMITS else LIMITS.get(words[-1], 0.002)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random cells, interrupts, kills and errors: after each the ranks work and know what they knew; no memory, file,
    thread, process or segment stays behind."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # so the controller, which nobody can ask, gives back what is free
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(64 << 10))
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # so does this process
    with Lab(2, hang_seconds=None) as lab:
        soak = Soak(lab, SEED)
        try:
            soak.run(CELLS)
        finally:
            print(f"seed {SEED}: {soak.figures.report()}")
    trends = soak.figures.trends().items()
    growing = {name: slope for name, (_, _, slope) in trends if not slope <= limit(name)}  # also what nobody could tell
    assert not growing, f"growth a cell (NaN: too few cells to tell): {growing}"
