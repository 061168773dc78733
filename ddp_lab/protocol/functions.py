"""Functions and classes that are sent by value, what part of an object can't be, and captured globals on a rank.

cloudpickle pickles them; from 3.1.3 on it omits the names of their files, which tracebacks, `inspect` and the doctor
need to show a function's lines.

[Note: names of a function that was brought]
A function's globals are those of the notebook, as in Python: the names it uses are captured and sent with it
(cloudpickle) and belong to it, so that the rank's variables are not touched. Names that the notebook lacks are looked
up on the rank when they are used. So are `RANKS_OWN`, which are never sent: a `rank` that a loop left in the notebook
must not hide the rank's. When a function called by `Cluster.run` ends, its assignments to `global` names are set on the
rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple

import cloudpickle

RANKS_OWN = frozenset({"rank", "world_size", "local_rank", "device", "torch", "dist", "ddp_lab", "get_ipython"})
_MODULES = ("torch", "dist", "ddp_lab")  # for code that reads the dict itself, as torch.compile does
_TRIES = 500
_DEPTH = 12


def _reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _made, (code.co_filename, make, arguments)


def _made(file: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, but each function keeps its file's name."""

    dispatch_table: ClassVar = ChainMap({types.CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)


class RankGlobals(dict[str, Any]):
    """Globals of functions: the captured ones, then the rank's names. See [Note: names of a function that was
    brought].

    Args:
        name: ``__name__`` of the module they were defined in.
        behind: the rank's names.
    """

    def __init__(self, name: str, behind: MutableMapping[str, Any]) -> None:
        super().__init__({each: behind[each] for each in _MODULES if each in behind})
        self["__name__"] = name
        self._behind = behind
        self._brought: dict[str, Any] = dict(self)

    def __missing__(self, name: str) -> Any:
        return self._behind[name]

    def update(self, names: Any = (), /, **more: Any) -> None:
        """Adds a function's captured globals."""
        brought = dict(names, **more)
        self._brought.update(brought)
        super().update(brought)

    def set_on_rank(self) -> None:
        """Sets the names assigned since on the rank."""
        for name, value in self.items():
            if name != "__builtins__" and (name not in self._brought or self._brought[name] is not value):
                self._behind[name] = value


_collected: list[RankGlobals] | None = None


@contextlib.contextmanager
def collected() -> Iterator[list[RankGlobals]]:
    """Fills a list with the globals that are made until the block ends."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


def rank_globals(name: str) -> RankGlobals:
    """Globals on top of the variables of the rank that unpickles them."""
    shell = importlib.import_module("IPython").get_ipython()
    made = RankGlobals(name, shell.user_ns if shell is not None else {})
    if _collected is not None:
        _collected.append(made)
    return made


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
