"""Variables to and from ranks.

Large arrays and tensors travel through memory that client and ranks share; see [Note: how objects travel] in
`ddp_lab.protocol.parcels`. Pushed objects arrive unchanged: arrays, tensors (those of a GPU on the host), models
and classes of the notebook. Pulled objects are loaded by a process that may have no torch. Tensors of any device arrive
as tensors only if this process has imported torch itself, else as numpy arrays (bfloat16 and float8 as float32, a 0-dim
tensor as a numpy scalar). For a model, an optimizer or a scheduler, its `state_dict()` arrives. An object of a class
that only the rank knows can't be pulled; pull what it contains.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...formatting import label_of
from ...output.board import SilentBoard
from ...protocol.entry_points import BIND, READ, STAGE
from .packing import Receiving, pickled_for_ranks, say_in_messages, shared
from .results import CellResult

_Run = Callable[..., Any]
_pushes = itertools.count(1)


def push(run: _Run, mapping: Mapping[str, Any], ranks: Sequence[int], far: Collection[int]) -> None:
    """Sets variables on ranks: all of them on all ranks, or none; see [Note: a push in two halves] in
    `ddp_lab.engine.cells.variables`.

    Args:
        run: calls a function on ranks, as `Cluster.run`.
        mapping: name -> value; functions and classes of the notebook travel by value. Each rank has a copy of its own.
        ranks: which ranks.
        far: those among them that share no memory with this process.

    Raises:
        TypeError: a name is not an identifier, or a value can't be pickled; the message names it.
        CellError: a rank could not load a value.
    """
    for name in mapping:
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"{name!r} can't name a variable on a rank")
    value = pickled_for_ranks(mapping, "pushed")
    token = f"{os.getpid()}-{next(_pushes)}"
    options: dict[str, Any] = {"ranks": ranks, "label": "push", "board": SilentBoard()}
    with shared(value, far) as parcel:
        staged: CellResult = run(STAGE, token, parcel, **options)
    if not all(staged.values.values()):
        say_in_messages("a rank can't open this process's shared memory")
        run(STAGE, token, value.inline(), **options)
    run(BIND, token, **options)


def pull(run: _Run, name: str, ranks: Sequence[int], far: Collection[int]) -> dict[int, Any]:
    """Returns rank -> value of a variable or an expression.

    Args:
        run: calls a function on ranks, as `Cluster.run`.
        name: a variable (`"loss"`) or an expression over the rank's variables (`"model.state_dict()"`).
        ranks: which ranks.
        far: those among them that share no memory with this process.

    Raises:
        NameError: some ranks don't have it; the message says which.
        TypeError: it can't be sent; the message names the part that can't.
        ClusterError: it can't be loaded here.
        CellError: evaluating the expression raised.
    """
    with Receiving(ranks, far=far) as receiving:
        result: CellResult = run(
            READ, name, receiving.request(), ranks=ranks, label=f"pull {name}", board=SilentBoard()
        )
        answers = result.values
        _check(name, ranks, answers)
        return {rank: receiving.unpack(name, rank, answers[rank]["parcel"]) for rank in ranks}


def _check(name: str, ranks: Sequence[int], answers: Mapping[int, Any]) -> None:
    """Raises if a rank does not have the value, or can't send it."""
    unknown = [rank for rank in ranks if answers[rank]["state"] == "unknown"]
    if unknown:
        have = [rank for rank in ranks if rank not in unknown]
        others = f"; {label_of(have)} {'has' if len(have) == 1 else 'have'} it" if have else ""
        raise NameError(f"no {name} on {label_of(unknown)} ({answers[unknown[0]]['why']}){others}")
    for rank in ranks:
        if answers[rank]["state"] == "kept":
            raise TypeError(
                f"{name} (a {answers[rank]['kind']} on rank {rank}) can't be pulled: {answers[rank]['why']}. "
                "Pull what it contains, for example its numbers or its state_dict()"
            )
