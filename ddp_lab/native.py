"""Loads the compiled extension `_C`, or says why it can't be loaded and how to rebuild it."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import ExtensionError

__all__ = ["load"]

_REBUILD = (
    "rebuild it with `make` in the source tree, or `pip install --no-build-isolation --force-reinstall --no-deps .`"
)


def load() -> ModuleType:
    """Returns `ddp_lab._C` after checking that it was compiled against the torch that is installed.

    Raises:
        ExtensionError: it is missing, or was compiled against another torch (both versions are named).
    """
    import torch

    try:
        built_for: str = importlib.import_module("ddp_lab._built_for").TORCH
    except ImportError as error:
        raise ExtensionError(f"ddp_lab's extension has not been built: {_REBUILD}") from error
    if built_for != torch.__version__:
        raise ExtensionError(
            f"ddp_lab's extension was compiled against torch {built_for}, but torch {torch.__version__} is installed: "
            f"{_REBUILD}, or install torch=={built_for.split('+')[0]}"
        )
    try:
        return importlib.import_module("ddp_lab._C")
    except ImportError as error:
        raise ExtensionError(f"ddp_lab's extension does not load ({error}): {_REBUILD}") from error
