"""Former public names: one table of them, and how each one leads to its present name.

A former name gives a `DeprecationWarning` that points at the caller's line. Quiet ones do not: notebooks and scripts
rely on them, so they stay. `tutorials/site/reference/renamed_names.md` lists the table for users.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

__all__ = ["TABLE", "Renamed", "former_options", "package_name", "with_former_arguments", "with_former_names"]

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])
# how users reach these objects
_SPELLED = {"Runs": "Cluster.results", "TrainingControl": "Cluster.training", "compare": "ddp_lab.compare"}


class Renamed(NamedTuple):
    """A public name that has changed.

    Attributes:
        owner: ``"ddp_lab"``, a class, a function of the package, a magic with its command; ``"Timeline.*"``: all
            public methods of the class.
        old: the former name: of an attribute (``name``), an argument (``name=``) or an option (``--name``).
        new: the present name, written in the same way.
        quiet: whether the former name gives no warning.
    """

    owner: str
    old: str
    new: str
    quiet: bool = False

    def spelled(self, name: str) -> str:
        """A name as users write it, with its owner."""
        owner, dot, rest = self.owner.partition(".")
        return _spelled(f"{_SPELLED.get(owner, owner)}{dot}{rest}", name)


TABLE = (
    Renamed("ddp_lab", "install", "replace_torch_ddp", quiet=True),
    Renamed("ddp_lab", "attach", "follow", quiet=True),
    Renamed("ddp_lab", "restore_from", "copy_state_from", quiet=True),
    Renamed("ddp_lab", "LinkModel", "CommModel"),
    Renamed("ddp_lab", "ScheduleError", "BucketStateError"),
    Renamed("ddp_lab", "rehearsal", "fault_injection"),
    Renamed("%%distributed", "--watch", "--dashboard", quiet=True),
    Renamed("%cluster start", "--address", "--client-address", quiet=True),
    Renamed("%cluster start", "--engines", "--launcher", quiet=True),
    Renamed("%cluster start", "--lease", "--idle-timeout", quiet=True),
    Renamed("Cluster", "find", "attach", quiet=True),
    Renamed("Cluster", "address=", "client_address="),
    Renamed("Cluster", "engines=", "launcher="),
    Renamed("Cluster", "lease_seconds=", "idle_timeout="),
    Renamed("Cluster", "watch_seconds=", "hang_seconds="),
    Renamed("Cluster", "host_seconds=", "host_timeout="),
    Renamed("Cluster", "lease_seconds", "idle_timeout"),
    Renamed("Cluster", "watch_seconds", "hang_seconds"),
    Renamed("Cluster", "left", "missed_cells"),
    Renamed("Cluster", "vitals", "health"),
    Renamed("Cluster", "looks", "monitoring"),
    Renamed("Cluster", "show_collective", "animate_collective"),
    Renamed("Cluster", "measure_link", "measure_communication"),
    Renamed("Cluster.*", "reducer=", "model="),
    Renamed("Runs", "ahead", "pending_cells"),
    Renamed("TrainingControl", "looks", "monitoring"),
    Renamed("TrainingControl.*", "reducer=", "model="),
    Renamed("DetachedCluster", "lease_seconds", "idle_timeout"),
    Renamed("Timeline", "sync", "all_reduces"),
    Renamed("Timeline", "find_late", "stragglers"),
    Renamed("Timeline", "raw", "events"),
    Renamed("Timeline.*", "reducer=", "model="),
    Renamed("compare", "reducers=", "models="),
    Renamed("DistributedDataParallel", "follow_order", "rebuild_buckets_on_reorder"),
    Renamed("DistributedDataParallel", "define_comm_hook", "register_named_comm_hook"),
    Renamed("DistributedDataParallel", "reducer_id", "model_id"),
    Renamed("Observation", "reducer_id", "model_id"),
    Renamed("RankFailure", "consequence", "secondary"),
    Renamed("RankFailure", "brief", "short_traceback"),
)
"""Every former name that still works."""


def _spelled(owner: str, name: str) -> str:
    if name.startswith("--"):
        return f"{owner} {name}"
    return f"{owner}({name})" if name.endswith("=") else f"{owner}.{name}"


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
