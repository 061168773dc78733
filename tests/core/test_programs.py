"""The C++ programs of this folder: their claims are in `test_*.cpp`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("name", ["graph_tasks", "phase", "recorder", "replay", "schedule", "static_graph"])
def test_every_claim_holds(program: Callable[..., bytes], name: str, variant: str) -> None:
    """Every claim of the C++ program holds under the sanitizers (in the soak plain, too)."""
    assert program(f"test_{name}", variant).endswith(b" 0 failed\n")
