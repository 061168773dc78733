"""Runs what has failed once more, alone: `make test` passes ``--again``.

A test that passes then is *unsteady*: the run is green, its closing line counts the test, and its first failure stays
in ``build/unsteady``. An unsteady test is a defect, of the test or of the product, and CONTRIBUTING.md says how to tell
which. A test that fails again is red. So is what is left behind when a worker has ended (`tests/leftovers.py`), and so
are more failures than chance makes: those are not run again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["add_option", "run_again"]

MOST = 10  # failures that are run again
FOLDER = Path("build", "unsteady")  # in the project
_FAILED = ("failed", "error")


def add_option(parser: pytest.Parser) -> None:
    """Adds ``--again``."""
    parser.addoption("--again", action="store_true", help="run failed tests once more, alone, at the end")


def run_again(session: pytest.Session) -> None:
    """Runs the failed tests again, if all of them are to be, and takes those that pass for unsteady."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if (
        not config.getoption("again")
        or hasattr(config, "workerinput")
        or session.exitstatus != pytest.ExitCode.TESTS_FAILED
    ):
        return
    folder = config.rootpath / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    failed = list(dict.fromkeys(report.nodeid for report in _reports(reporter)))
    if not 0 < len(failed) <= MOST:
        return
    for nodeid in failed:
        first = [report for report in _reports(reporter) if report.nodeid == nodeid]
        path = folder / (re.sub(r"[^\w.-]+", "_", nodeid)[-150:] + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_text(report) for report in first))
        reporter.write_line(f"\nagain, alone: {nodeid}")
        done = _alone(config, nodeid)
        if done.returncode == 0:
            _take_for_unsteady(reporter, nodeid, path)
        else:
            reporter.write_line(done.stdout[-5_000:] + done.stderr[-2_000:])
    if not any(True for _ in _reports(reporter)):
        session.exitstatus = pytest.ExitCode.OK


def _reports(reporter: Any) -> Iterator[Any]:
    for kind in _FAILED:
        yield from reporter.stats.get(kind, [])


def _alone(config: pytest.Config, nodeid: str) -> subprocess.CompletedProcess[str]:
    """Runs one test in a pytest of its own, with the marks that this run selects."""
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", "-m", config.getoption("markexpr"), nodeid]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=config.rootpath, env=environment, capture_output=True, text=True, errors="replace", check=False
    )


def _take_for_unsteady(reporter: Any, nodeid: str, path: Path) -> None:
    """The summary counts the test as unsteady, and no longer as failed."""
    for kind in _FAILED:
        reports = reporter.stats.pop(kind, [])
        left = [report for report in reports if report.nodeid != nodeid]
        if left:
            reporter.stats[kind] = left
    passed = [report for report in reporter.stats.get("passed", []) if report.nodeid != nodeid]
    reporter.stats["passed"] = passed
    reporter.stats.setdefault("unsteady", []).append(_Unsteady(nodeid, path))


class _Unsteady:
    """What the summary counts."""

    count_towards_summary = True

    def __init__(self, nodeid: str, path: Path) -> None:
        self.nodeid = nodeid
        self.path = path


def _text(report: Any) -> str:
    """What a failed report has to say: its traceback and what was printed."""
    return f"{report.nodeid} ({report.when})\n\n{report.longreprtext}\n" + "".join(
        f"\n--- {title} ---\n{content}" for title, content in report.sections
    )


def summarise(reporter: Any) -> None:
    """Names the unsteady tests above the closing line."""
    for test in reporter.stats.get("unsteady", []):
        reporter.write_line(f"UNSTEADY {test.nodeid}: failed, then passed alone; see {os.path.relpath(test.path)}")
