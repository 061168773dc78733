"""Which task of autograd ends a backward, in C++; the claims are those of `test_graph_tasks.cpp`."""

from __future__ import annotations

from collections.abc import Callable


def test_graph_tasks_program(program: Callable[..., bytes], variant: str) -> None:
    """Every claim of the C++ program holds under the sanitizers (in the soak plain, too)."""
    assert program("test_graph_tasks", variant).endswith(b" 0 failed\n")
