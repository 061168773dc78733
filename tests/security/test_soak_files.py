"""Two thousand damaged and made-up files: none ends its reader, fills the memory, takes long or lies.

``DDP_LAB_SOAK_FILES`` and ``DDP_LAB_SOAK_SEED`` choose how many, and which; what was seen is printed (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ranks.harness import ROOT

FILES = os.environ.get("DDP_LAB_SOAK_FILES", "2000")
SEED = os.environ.get("DDP_LAB_SOAK_SEED", "1")
_BAD = ("crashed", "timed out", "other numbers", "less, and no word")


@pytest.mark.soak
def test_two_thousand_files() -> None:
    """Each is read or refused by name within 20 s of the processor and 1 GiB; of a damaged one nothing is read that was
    not recorded, and nothing is missing without a word."""
    command = [sys.executable, "-m", "tests.security.soak_files", FILES, SEED]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stdout)
    found = json.loads(done.stdout)
    assert sum(found["seen"].values()) == int(FILES)
    assert not [kind for kind in found["seen"] if kind.endswith(_BAD)], found["worst"]
