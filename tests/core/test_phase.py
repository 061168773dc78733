"""Where a backward stands, in C++; the claims are those of `test_phase.cpp`."""

from __future__ import annotations

from collections.abc import Callable


def test_phase_program(program: Callable[..., bytes], variant: str) -> None:
    """Every claim of the C++ program holds under the sanitizers (in the soak plain, too)."""
    assert program("test_phase", variant).endswith(b" 0 failed\n")
