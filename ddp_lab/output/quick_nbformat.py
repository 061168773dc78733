"""Lets nbformat be imported in a tenth of a plain import's time, by whomever.

plotly imports nbformat to display its first figure. nbformat imports jsonschema, which imports `rfc3987_syntax` where
JupyterLab's packages have installed it. That compiles grammars of web addresses for two seconds, but no field of a
notebook is checked with them. So it is hidden during the import.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["install"]


class _Loader(importlib.abc.Loader):
    """Loads nbformat as its own loader does, without the grammars."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        hidden = {"jsonschema", "rfc3987_syntax"}.isdisjoint(sys.modules)
        if hidden:
            sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
        try:
            self._own.exec_module(module)
        finally:
            if hidden:
                del sys.modules["rfc3987_syntax"]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "nbformat":
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader)
        return found


def install() -> None:
    """From now on, the import of nbformat is quick; once is enough."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
