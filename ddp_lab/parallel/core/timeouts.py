"""Timeouts of process groups' backends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ... import native

__all__ = ["set_timeout", "timeout_of"]

_C = native.load()


def timeout_of(backend: Any) -> timedelta | None:
    """How long the operations of a group's backend may take; None where it does not tell."""
    try:
        options = backend.options
    except (AttributeError, RuntimeError):  # a backend without; RuntimeError from torch 2.14 on
        options = None
    found: timedelta | None = _C.shared_memory_timeout(backend) if options is None else options._timeout
    return found


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """For the operations that a group's backend is given from now on."""
    _C.set_timeout(backend, timeout)
