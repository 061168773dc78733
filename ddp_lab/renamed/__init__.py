"""Former public names: one table of them (`table.py`), and how each one leads to its present name.

A former name gives a `DeprecationWarning` that points at the caller's line. Quiet ones do not: notebooks and scripts
rely on them, so they stay. `tutorials/site/reference/renamed_names.md` lists the table for users.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from .table import TABLE, Renamed

__all__ = ["TABLE", "Renamed", "former_options", "package_name", "with_former_arguments", "with_former_names"]

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _rows(owner: str) -> list[Renamed]:
    return [row for row in TABLE if row.owner == owner]


def _warn(old: str, new: str, level: int) -> None:
    """Warns at the line of a caller; `level` counts from the function that calls this one."""
    words = f"{old} is now {new}: the former name will be removed"
    warnings.warn(words, DeprecationWarning, stacklevel=level + 1)


def package_name(name: str) -> str:
    """The present name of what the package calls `name`; for its `__getattr__`, whose caller is warned."""
    for row in _rows("ddp_lab"):
        if row.old == name:
            if not row.quiet:
                _warn(row.spelled(row.old), row.spelled(row.new), 3)
            return row.new
    return name


def former_options(parser: argparse.ArgumentParser) -> None:
    """Lets a parser accept the former names of its options; its help has one line on them."""
    rows = _rows(parser.prog)
    for row in rows:
        parser._option_string_actions[row.old] = parser._option_string_actions[row.new]
    named = ", ".join(f"{row.old} (now {row.new})" for row in rows)
    parser.epilog = f"Former names are still accepted: {named}."


def with_former_arguments(function: _Function) -> _Function:
    """Decorator of a public function: it takes its arguments by their former names as well."""
    name = function.__name__
    return cast(_Function, _accepting(function, f"ddp_lab.{name}", _rows(name)))


def with_former_names(cls: _Class) -> _Class:
    """Class decorator: adds the former names of attributes, and of arguments of the constructor and public methods."""
    name, changed = cls.__name__, cast(Any, cls)
    constructor = [row for row in _rows(name) if row.old.endswith("=")]
    if constructor:
        changed.__init__ = _accepting(changed.__init__, name, constructor)
    for row in _rows(f"{name}.*"):
        for method, function in inspect.getmembers(cls, inspect.isfunction):
            if not method.startswith("_") and row.new[:-1] in inspect.signature(function).parameters:
                setattr(cls, method, _accepting(function, f"{name}.{method}", [row]))
    attributes = [row for row in _rows(name) if not row.old.endswith("=")]
    for row in attributes:
        if not row.quiet:  # quiet ones are written in the class, where type checkers see them
            setattr(cls, row.old, _FormerName(row))
    former, listed = {row.old for row in attributes}, changed.__dir__
    changed.__dir__ = lambda self: [one for one in listed(self) if one not in former]
    return cls


class _FormerName:
    """An attribute that warns and leads to the one with the present name."""

    def __init__(self, row: Renamed) -> None:
        self._new, self._words = row.new, (row.spelled(row.old), row.spelled(row.new))

    def __get__(self, owner: object, kind: type) -> Any:
        _warn(*self._words, 2)
        return getattr(kind if owner is None else owner, self._new)

    def __set__(self, owner: object, value: object) -> None:
        _warn(*self._words, 2)
        setattr(owner, self._new, value)


def _accepting(function: Callable[..., Any], name: str, rows: Sequence[Renamed]) -> Callable[..., Any]:
    """The function, which takes these arguments by their former names as well."""
    former = {row.old[:-1]: row.new[:-1] for row in rows}

    @functools.wraps(function)
    def accepting(*args: Any, **given: Any) -> Any:
        for old in former.keys() & given.keys():
            new = former[old]
            if new in given or new in list(inspect.signature(function).parameters)[: len(args)]:
                raise TypeError(f"{name} got both {old}= and {new}=: pass {new}= alone")
            _warn(f"{name}({old}=)", f"{name}({new}=)", 2)
            given[new] = given.pop(old)
        return function(*args, **given)

    return accepting
