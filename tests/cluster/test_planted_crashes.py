"""Programs in which a rank crashes, in scripts and in cells: the guilty rank and the user's lines are named."""

from __future__ import annotations

import pytest

from tests.benchmarks import crashes

REPLACES_PROCESSES = True


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("where", ["script", "cell"])
def test_planted_crashes_are_named(where: str, backend: str) -> None:
    found = crashes.measure(where=[where], backend=backend)["found"]
    assert {name: one["text"] for name, one in found.items() if not one["named"]} == {}
