"""What the tests of this folder share: the servers that run torch's tests, and a report of what ran twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.torch_suite.running import OURS, Suites


@pytest.fixture(scope="session")
def suites() -> Iterator[Suites]:
    """Runs torch's tests, by default against ours, in forked ranks; the environment may say otherwise."""
    cls = os.environ.get("DDP_LAB_TORCH_SUITE_CLASS", OURS)
    suites = Suites(cls, os.environ.get("DDP_LAB_TORCH_SUITE_START", "fork"))
    yield suites
    suites.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints each test that passed only when it was run again."""
    for report in terminalreporter.stats.get("passed", []):
        for text in (value for key, value in report.user_properties if key == "ran again"):
            terminalreporter.write_line(f"RAN AGAIN {report.nodeid}: {text}")
