"""Notebooks run in kernels that find this checkout, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .judging import executed
from .running import KERNEL_ENVIRONMENT, LESSONS, Notebook, module_of


@pytest.fixture(autouse=True)
def this_checkout(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the test starts import this checkout."""
    for name, value in KERNEL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `ddp-lab demo` printed, and the folder it wrote: the quickstart after "Run all", and its page."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "ddp_lab", "demo", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def lesson(request: pytest.FixtureRequest) -> Notebook:
    """The lesson that a module of tests is about, run with its wrong answers, `WRONG`, and the solutions.

    In place of what takes long there runs what is in `SHORTER`: `make docs` runs the lesson as it is.
    """
    name = request.module.__name__.rpartition(".test_")[2]
    [found] = [path.stem for path in LESSONS if module_of(path.stem) == name]
    return executed(found, request.module.WRONG, shorter=getattr(request.module, "SHORTER", None))
