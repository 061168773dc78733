"""Words for the user's module: what it is, and where its class is written."""

from __future__ import annotations

import inspect
import os

import torch

__all__ = ["module_text"]


def module_text(module: torch.nn.Module) -> str:
    """The module's class and, where Python knows it, the line where its forward is defined: ``Net (train.py:12)``."""
    forward = inspect.getattr_static(type(module), "forward")  # a scripted class has a descriptor that raises
    code = getattr(forward, "__code__", None)
    name = type(module).__name__
    if code is None or code.co_filename.startswith("<"):
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
