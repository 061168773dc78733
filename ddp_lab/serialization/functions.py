"""The globals of functions that were brought from the client to a rank.

[Note: names of a function that was brought]
A function's globals are those of the notebook, as Python has it: what it mentions travels with it (cloudpickle) and is
its own, so that the rank's variables are not touched. Names that the notebook lacks are the rank's, looked up when
they are used. So are `RANKS_OWN`, which never travel: a `rank` that a loop left behind in the notebook must not hide
the rank's. What a function called by `Cluster.run` assigns to a `global` name is set on the rank when it ends.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any

__all__ = ["RANKS_OWN", "RankGlobals", "collected", "rank_globals"]

RANKS_OWN = frozenset({"rank", "world_size", "local_rank", "device", "torch", "dist", "ddp_lab", "get_ipython"})
_MODULES = ("torch", "dist", "ddp_lab")  # for who looks into the dict itself, as torch.compile does


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


_made: list[RankGlobals] | None = None


@contextlib.contextmanager
def collected() -> Iterator[list[RankGlobals]]:
    """Fills a list with the globals that are made until the block ends."""
    global _made
    _made = []
    try:
        yield _made
    finally:
        _made = None


def rank_globals(name: str) -> RankGlobals:
    """Globals over the variables of the rank that unpickles them."""
    shell = importlib.import_module("IPython").get_ipython()
    made = RankGlobals(name, shell.user_ns if shell is not None else {})
    if _made is not None:
        _made.append(made)
    return made
