"""Functions and classes that travel by value, and the globals that functions of the client have on a rank.

cloudpickle pickles them; from 3.1.3 on it leaves out the names of their files, which a traceback, `inspect` and the
doctor need to show a function's lines.

[Note: names of a function that was brought]
A function's globals are those of the notebook, as Python has it: what it mentions travels with it (cloudpickle) and is
its own, so that the rank's variables are not touched. Names that the notebook lacks are the rank's, looked up when
they are used. So are `RANKS_OWN`, which never travel: a `rank` that a loop left behind in the notebook must not hide
the rank's. What a function called by `Cluster.run` assigns to a `global` name is set on the rank when it ends.
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
_MODULES = ("torch", "dist", "ddp_lab")  # for who looks into the dict itself, as torch.compile does


def _reduced(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _made, (code.co_filename, make, arguments)


def _made(file: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, and each function knows its file."""

    dispatch_table: ClassVar = ChainMap({types.CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)


class RankGlobals(dict[str, Any]):
    """Globals of functions: what they brought, and the rank's names behind. See [Note: names of a function that was
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
        """Takes what a function brings."""
        brought = dict(names, **more)
        self._brought.update(brought)
        super().update(brought)

    def set_on_rank(self) -> None:
        """Gives the rank the names that were assigned since."""
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
    """Globals over the variables of the rank that unpickles them."""
    shell = importlib.import_module("IPython").get_ipython()
    made = RankGlobals(name, shell.user_ns if shell is not None else {})
    if _collected is not None:
        _collected.append(made)
    return made
