"""Notebooks run in kernels that find this checkout, and leave nothing behind."""

from __future__ import annotations

import os

import pytest

from .running import PROJECT


@pytest.fixture(autouse=True)
def this_checkout(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the test starts import this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])))
