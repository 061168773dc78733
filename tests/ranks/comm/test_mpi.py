"""The backend "mpi" on processes that mpiexec started, against Gloo; and what is said where it can't work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_lab import native
from ddp_lab.comm import mpi

ROOT = Path(__file__).resolve().parents[3]
BUILT = native.path_of("_mpi", torch.__version__) is not None

with_mpi = pytest.mark.skipif(
    not BUILT or shutil.which("mpiexec") is None or shutil.which("ompi_info") is None,
    reason="no Open MPI, or ddp_lab was built without it (make mpi)",
)


def _run(words: list[str], code: int = 0) -> str:
    """What a program printed, errors included."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))},
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (code == 0), done.stdout
    return done.stdout


def _mpiexec(size: int, *arguments: str, code: int = 0) -> str:
    words = ["mpiexec", "-n", str(size), "--oversubscribe", "--bind-to", "none", sys.executable, *arguments]
    return _run(words, code)


def _program(name: str) -> str:
    return str(ROOT / "tests/ranks/programs" / name)


@with_mpi
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (3, 4))])
def test_operations_training_and_time_outs(size: int) -> None:
    """Every operation gives what Gloo gives, torch's DDP and ours the same model; who waits too long is told so, and
    MPI still ends well."""
    printed = _mpiexec(size, _program("mpi_operations.py"))
    assert printed.count("done") == size
    assert "exited" not in printed


@with_mpi
def test_ranks_that_mpi_numbers_otherwise_and_an_exception() -> None:
    """Ranks that torch is given in another order than mpiexec's are refused, with both. One rank raises while the other
    waits for it: mpiexec ends both."""
    program = (
        "import os, pytest, torch, torch.distributed as dist, ddp_lab.comm\n"
        "mine = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "told = f'this process is rank {mine} of 2 for MPI, but rank {1 - mine} of 2 for torch.distributed'\n"
        "with pytest.raises(RuntimeError, match=told):\n"
        "    dist.init_process_group('cpu:mpi', store=dist.HashStore(), rank=1 - mine, world_size=2)\n"
        "dist.init_process_group('mpi')\n"
        "if mine: raise ValueError('rank 1 has enough')\n"
        "dist.all_reduce(torch.ones(1))"
    )
    assert "rank 1 has enough" in _mpiexec(2, "-c", program, code=1)


@with_mpi
def test_processes_that_mpi_knows_nothing_of() -> None:
    """Without mpiexec MPI would see one process; that is told instead of training alone. accelerate takes MPI if torch
    has it: under another launcher it has none (under mpiexec: mpi_operations.py)."""
    program = (
        "import os, torch.distributed as dist, ddp_lab.comm\n"
        "print('MPI:', dist.is_mpi_available())\n"
        "os.environ['WORLD_SIZE'] = '2'\n"
        "print('under another launcher:', dist.is_mpi_available())\n"
        "dist.init_process_group('cpu:mpi', store=dist.HashStore(), rank=1, world_size=2)"
    )
    printed = _run([sys.executable, "-c", program], code=1)
    assert "MPI: True" in printed
    assert "under another launcher: False" in printed
    assert "mpiexec did not start this process, which is rank 1 of 2 for torch.distributed" in printed
    assert "mpiexec -n 2 python" in printed


def test_without_mpi_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No extension and no MPI in torch: how to get it; with one of them there is nothing to say."""
    if dist.is_mpi_available():
        assert mpi.why_not() == ""
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    monkeypatch.setattr(mpi, "_EXTENSION", "_nowhere")
    assert "apt install libopenmpi-dev openmpi-bin" in mpi.why_not()
    assert "make mpi" in mpi.why_not()
