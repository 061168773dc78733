"""What a static graph learns, in C++; the claims are those of `test_static_graph.cpp`."""

from __future__ import annotations

from collections.abc import Callable


def test_static_graph_program(program: Callable[..., bytes], variant: str) -> None:
    """Every claim of the C++ program holds under the sanitizers (in the soak plain, too)."""
    assert program("test_static_graph", variant).endswith(b" 0 failed\n")
