"""Runs first in every Python process of the suite: swaps the class as soon as torch has been imported.

The folder of this file is on PYTHONPATH, which spawned processes inherit; forked ones inherit the swap itself.
Environment variables say what to do: see `swap_class.py`.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any


class _AfterTorch:
    """A finder that wraps the first import of torch and then leaves `sys.meta_path`."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        import_torch = spec.loader.exec_module

        def import_torch_and_swap(module: ModuleType) -> None:
            import_torch(module)
            import swap_class

            swap_class.main()

        spec.loader.exec_module = import_torch_and_swap  # type: ignore[method-assign]
        return spec


if "DDP_LAB_SUITE_CLASS" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
