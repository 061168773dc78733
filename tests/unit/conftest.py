"""Fixtures of several files of unit tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SITE = Path(__file__).resolve().parents[2] / "tutorials" / "site"
SiteModule = Callable[[str], ModuleType]


@pytest.fixture
def site_module(monkeypatch: pytest.MonkeyPatch) -> SiteModule:
    """Imports a module of `tutorials/site` by its name."""
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module
