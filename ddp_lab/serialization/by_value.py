"""cloudpickle's pickler for functions and classes that travel by value, with the names of their files.

cloudpickle leaves these out from 3.1.3 on; a traceback, `inspect` and the doctor need them to show a function's lines.
"""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

__all__ = ["Pickler"]


def _reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _made, (code.co_filename, make, arguments)


def _made(file: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, and each function knows its file."""

    dispatch_table: ClassVar = ChainMap({types.CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)
