"""Trainers of third parties, unmodified, under `ddp-lab run`: the parameters that they end with under torchrun."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_lab.timeline.timeline import read_run
from tests.ranks.compare import assert_same
from tests.ranks.harness import ROOT

pytestmark = pytest.mark.soak

PROGRAMS = Path(__file__).parents[1] / "programs"
TWO = ["--standalone", "--nproc-per-node", "2"]
TORCHRUN = ["-m", "torch.distributed.run", *TWO]
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def _saved(folder: Path, launcher: list[str], program: str, name: str) -> list[Any]:
    """What each rank of a program has saved."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *launcher, str(PROGRAMS / program), name, str(folder / "saved")]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    return [torch.load(folder / f"saved.{rank}", weights_only=True) for rank in range(2)]


def _compare(tmp_path: Path, program: str, name: str) -> dict[str, int]:
    """Runs the program three times; how many steps on rank 0 were recorded, with ours and observed."""
    expected = _saved(tmp_path / "torchrun", TORCHRUN, program, name)
    steps = {}
    for kind, options in (("ours", []), ("observed", ["--observe"])):
        folder = tmp_path / kind
        launcher = ["-m", "ddp_lab", "run", *TWO, "--record", str(folder / "run"), *options]
        assert_same(_saved(folder, launcher, program, name), expected)
        recorded = read_run([folder / "run"]).timeline.steps()
        steps[kind] = int((recorded["rank"] == 0).sum()) if len(recorded) else 0
    return steps


@pytest.mark.parametrize(
    ("library", "steps"), [("accelerate", 3), ("transformers", 6), ("ignite", 18), ("lightning", 4)]
)
def test_trainer(tmp_path: Path, library: str, steps: int) -> None:
    """Every rank ends with the parameters that it has under torchrun, bit by bit; all its steps are recorded."""
    importlib.metadata.version({"ignite": "pytorch-ignite"}.get(library, library))  # `make soak` installs it
    assert _compare(tmp_path, "trainers.py", library) == {"ours": steps, "observed": steps}
