"""Notebooks run in kernels that find this checkout, and leave nothing behind."""

from __future__ import annotations

import pytest

from .running import KERNEL_ENVIRONMENT


@pytest.fixture(autouse=True)
def this_checkout(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the test starts import this checkout."""
    for name, value in KERNEL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
