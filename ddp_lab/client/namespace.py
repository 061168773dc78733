"""Variables to and from ranks.

What is pulled is loaded by a process that has no torch: a tensor comes as a numpy array, wherever it sits (bfloat16
and float8 as float32, a 0-dim tensor as a numpy scalar). An object of a class that was defined on the rank, or that
belongs to torch (a module, an optimizer), can't be pulled; pull what it holds: `%pull model.state_dict()`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..errors import ClusterError
from .cell_run import RankFunction, check_sendable
from .outputs import SilentBoard
from .rank_sets import label_of
from .results import CellResult

__all__ = ["pull", "push"]

_WRITE = RankFunction("ddp_lab.engine.variables", "write")
_READ = RankFunction("ddp_lab.engine.variables", "read")


class Runner(Protocol):
    """What push and pull need of a cluster."""

    def run(self, code: Any, *args: Any, **options: Any) -> Any:
        """Calls a function on ranks, as `Cluster.run`."""


def push(cluster: Runner, mapping: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Sets variables on ranks.

    Args:
        cluster: where.
        mapping: name -> value; values are pickled, functions and classes of the notebook travel by value.
        ranks: which ranks.

    Raises:
        TypeError: a name is not an identifier, or a value can't be pickled; the message names it.
        CellError: a rank could not load a value.
    """
    for name, value in mapping.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"{name!r} can't name a variable on a rank")
        try:
            check_sendable(value)
        except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
            raise TypeError(f"{name} (a {type(value).__name__}) can't be pushed: {error}") from error
    cluster.run(_WRITE, tuple(mapping), *mapping.values(), ranks=ranks, label="push", board=SilentBoard())


def pull(cluster: Runner, name: str, ranks: Sequence[int]) -> dict[int, Any]:
    """Returns rank -> value of a variable or an expression.

    Args:
        cluster: where.
        name: a variable (`"loss"`) or an expression over the rank's variables (`"model.state_dict()"`).
        ranks: which ranks.

    Raises:
        NameError: ranks don't have it; the message says which.
        TypeError: it can't leave the rank; the message says what in it can't.
        CellError: evaluating the expression raised.
    """
    result: CellResult = cluster.run(_READ, name, ranks=ranks, label=f"pull {name}", board=SilentBoard())
    answers = result.values
    unknown = [rank for rank in ranks if answers[rank]["state"] == "unknown"]
    if unknown:
        have = [rank for rank in ranks if rank not in unknown]
        others = f"; {label_of(have)} {'has' if len(have) == 1 else 'have'} it" if have else ""
        raise NameError(f"no {name} on {label_of(unknown)} ({answers[unknown[0]]['why']}){others}")
    for rank in ranks:
        if answers[rank]["state"] == "kept":
            raise TypeError(
                f"{name} (a {answers[rank]['kind']} on rank {rank}) can't be pulled: {answers[rank]['why']}. "
                "Pull what it holds, for example model.state_dict()"
            )
    return {rank: _load(name, rank, answers[rank]["blob"]) for rank in ranks}


def _load(name: str, rank: int, blob: bytes) -> Any:
    try:
        return pickle.loads(blob)
    except (ImportError, AttributeError) as error:
        raise ClusterError(f"{name} of rank {rank} can't be loaded here: {error}") from error
