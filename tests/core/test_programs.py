"""The C++ programs of this folder: their claims are in `test_*.cpp`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

NAMES = ["black_box", "graph_tasks", "phase", "recorder", "replay", "schedule", "static_graph"]
THREADS = ["black_box", "recorder"]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("address", name) for name in NAMES),
        *(("thread", name) for name in THREADS),
        # Compiled against torch, which takes a minute.
        *(pytest.param(variant, "shared_memory", marks=pytest.mark.soak) for variant in ("address", "thread")),
        *(pytest.param("plain", name, marks=pytest.mark.soak) for name in [*NAMES, "shared_memory"]),
    ],
)
def test_every_claim_holds(program: Callable[..., bytes], variant: str, name: str) -> None:
    """Every claim of the C++ program holds under the sanitizers (in the soak plain, too)."""
    assert program(f"test_{name}", variant).endswith(b" 0 failed\n")
