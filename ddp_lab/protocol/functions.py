"""Functions and classes that are sent by value, and the captured globals of the client's functions on a rank.

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
import importlib
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import cloudpickle

RANKS_OWN = frozenset({"rank", "world_size", "local_rank", "device", "torch", "dist", "ddp_lab", "get_ipython"})
_MODULES = ("torch", "dist", "ddp_lab")  # for code that reads the dict itself, as torch.compile does


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
