"""What `make test` does with a test that has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CONFTEST = """
import pytest
from tests import unsteady
from tests.unsteady import add_option as pytest_addoption, run_again as pytest_sessionfinish

def pytest_terminal_summary(terminalreporter):
    unsteady.summarise(terminalreporter)
"""
_TESTS = """
import pathlib
import pytest

def first_time(name):
    path = pathlib.Path(__file__).with_name(name)
    return not path.exists() and not path.touch()

@pytest.fixture
def untidy():
    yield
    assert not first_time("at the end")

@pytest.fixture
def unready():
    assert not first_time("at the begin")

def test_steady(): pass
def test_unsteady():
    print("what was printed")
    assert not first_time("in the test"), "the first time"
def test_that_ends_badly(untidy): pass
def test_that_begins_badly(unready): pass
"""


def _run(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    """Exit code and output of the tests."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), *options, "test_it.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_what_passes_alone_is_unsteady(tmp_path: Path) -> None:
    """The run is green, counts and names such tests, whichever part failed, and keeps what they said first."""
    code, printed = _run(tmp_path, _TESTS, "--again", "--numprocesses=2")
    assert code == 0, printed
    assert re.search(r"=+ 1 passed, 3 unsteady in ", printed.splitlines()[-1])
    for name in ("test_unsteady", "test_that_ends_badly", "test_that_begins_badly"):
        assert f"UNSTEADY test_it.py::{name}: failed, then passed alone; see build/unsteady/" in printed
    kept = (tmp_path / "build" / "unsteady" / "test_it.py_test_unsteady.txt").read_text()
    assert "the first time" in kept
    assert "what was printed" in kept


def test_what_fails_again_is_red(tmp_path: Path) -> None:
    """Beside an unsteady test, too, which is named all the same."""
    tests = f"{_TESTS.partition('@pytest')[0]}\ndef test_wrong(): assert 1 == 2\n"
    code, printed = _run(tmp_path, f"{tests}def test_unsteady(): assert not first_time('once')\n", "--again")
    assert code == 1
    assert "FAILED test_it.py::test_wrong" in printed
    assert "UNSTEADY test_it.py::test_unsteady" in printed
    assert re.search(r"=+ 1 failed, 1 unsteady in ", printed.splitlines()[-1])


@pytest.mark.parametrize(("options", "failed"), [((), 1), (("--again",), 11)])
def test_what_is_not_run_again(tmp_path: Path, options: tuple[str, ...], failed: int) -> None:
    """Nothing without the option, as in a developer's own run, and nothing where more has failed than by chance."""
    tests = f"{_TESTS.partition('@pytest')[0]}"
    tests += "".join(f"def test_{number}(): assert not first_time('{number}')\n" for number in range(failed))
    code, printed = _run(tmp_path, tests, *options)
    assert code == 1
    assert re.search(rf"=+ {failed} failed in ", printed.splitlines()[-1])
