"""Which part of an object can't be pickled."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_TRIES = 500
_DEPTH = 12


class Culprit(NamedTuple):
    """The part of a value that can't be pickled.

    Attributes:
        name: the value it belongs to.
        path: the part as an expression: ``"cfg.lock"``.
        part: the part itself.
        why: the error of pickling it.
    """

    name: str
    path: str
    part: Any
    why: str


def culprit(values: Mapping[str, Any], why_not: Callable[[Any], str | None]) -> Culprit | None:
    """The innermost part of the first value that can't be pickled; None if each of them can.

    Args:
        values: name -> value.
        why_not: returns why a value can't be pickled; None if it can.
    """
    for name, value in values.items():
        why = why_not(value)
        if why is not None:
            return _innermost(Culprit(name, name, value, why), why_not)
    return None


def _innermost(found: Culprit, why_not: Callable[[Any], str | None]) -> Culprit:
    tries, seen = _TRIES, {id(found.part)}
    for _ in range(_DEPTH):
        for path, part in _parts(found.path, found.part):
            tries -= 1
            why = why_not(part) if tries >= 0 and id(part) not in seen else None
            if why is not None:
                seen.add(id(part))
                found = Culprit(found.name, path, part, why)
                break
        else:
            break
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with its path."""
    if type(value).__module__.partition(".")[0] == "ddp_lab":
        return
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{path} (its element {each!r})", each) for each in value)
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(path, value)
    elif not isinstance(value, types.ModuleType):
        yield from ((f"{path}.{name}", each) for name, each in list(getattr(value, "__dict__", {}).items()))


def _parts_of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"its variable {name}", each) for name, each in names.items() if each is not function)
    yield from ((f"{path}'s default {index}", each) for index, each in enumerate(function.__defaults__ or ()))
