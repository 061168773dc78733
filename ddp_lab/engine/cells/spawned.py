"""Rank side: definitions of cells, for processes that are spawned rather than forked.

[Note: cells in spawned processes]
A spawned process (`multiprocessing_context="spawn"` of a DataLoader, `torch.multiprocessing.spawn`) imports its
arguments by name, and cells can't be imported. So functions and classes of `__main__` are sent by value and put into
its `__main__`: results that refer to them by name then work on both sides. A forked process has them already.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ...protocol.functions import Pickler
from ...protocol.parcels import UNPICKLABLE

_REMEDY = "use multiprocessing_context='fork', or define it in a module that the process can import"


def install() -> None:
    """Makes processes that this rank spawns know its cells; see [Note: cells in spawned processes]."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment, unused-ignore]


def restore(value: bytes) -> Any:
    """In the spawned process: the function or class; it and the classes it uses become attributes of `__main__`."""
    made, *used = pickle.loads(value)
    for thing in (made, *used):
        if thing.__qualname__.isidentifier():
            vars(sys.modules["__main__"]).setdefault(thing.__qualname__, thing)
    return made


def _reduce(pickler: ForkingPickler, thing: Any) -> Any:
    if get_spawning_popen() is None or not isinstance(thing, type | types.FunctionType):
        return NotImplemented
    if thing.__module__ != "__main__":
        return NotImplemented
    return restore, (_by_value(thing),)


def _by_value(thing: type | Callable[..., Any]) -> bytes:
    name = thing.__qualname__
    try:
        return _pickled(Pickler, [thing, *_classes_in(thing)])
    except UNPICKLABLE as error:
        raise pickle.PicklingError(
            f"{name} was defined in a cell and could not be sent by value to a spawned process: {error}; {_REMEDY}"
        ) from error


def _classes_in(thing: Any) -> list[type]:
    """The classes of `__main__` that travel along with `thing`."""
    found: list[type] = []

    class Noting(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and obj.__module__ == "__main__" and obj is not thing:
                found.append(obj)
            return super().reducer_override(obj)

    _pickled(Noting, thing)
    return found


def _pickled(pickler: type, thing: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(thing)
    return buffer.getvalue()
