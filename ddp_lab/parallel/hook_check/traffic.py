"""What a rank gives to collectives, from a log of them: see [Note: counting what a hook sends]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Collective", "Traffic", "traffic"]

Collective = tuple[str, int, list[int], int, int]  # operator, ranks, bytes of its arguments, begin and end in ns


@dataclass(frozen=True)
class Traffic:
    """What a rank gave to collectives: payload bytes, bytes that it sends for that, and how many of each operator."""

    payload: int
    wire: float
    operators: dict[str, int]


# Which of an operator's tensor arguments is what the rank contributes, and how many times its bytes a rank sends with
# a bandwidth-optimal algorithm on n ranks.
_SENDS: dict[str, tuple[int, Callable[[int], float]]] = {
    "allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced_": (0, lambda n: 2 * (n - 1) / n),
    "allgather_": (1, lambda n: n - 1),
    "_allgather_base_": (1, lambda n: n - 1),
    "allgather_coalesced_": (1, lambda n: n - 1),
    "allgather_into_tensor_coalesced_": (1, lambda n: n - 1),
    "reduce_scatter_": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base_": (1, lambda n: (n - 1) / n),
    "reduce_scatter_tensor_coalesced_": (1, lambda n: (n - 1) / n),
    "alltoall_": (1, lambda n: (n - 1) / n),
    "alltoall_base_": (1, lambda n: (n - 1) / n),
    "broadcast_": (0, lambda n: (n - 1) / n),
    "reduce_": (0, lambda n: (n - 1) / n),
    "gather_": (1, lambda n: (n - 1) / n),
    "scatter_": (1, lambda n: (n - 1) / n),
    "send": (0, lambda n: 1.0),
}


def traffic(collectives: list[Collective]) -> Traffic:
    """Sums up what `take_collectives` returned; see [Note: counting what a hook sends]."""
    payload, wire = 0, 0.0
    operators: dict[str, int] = {}
    for name, ranks, sizes, _, _ in collectives:
        operators[name.strip("_")] = operators.get(name.strip("_"), 0) + 1
        if name in _SENDS:
            which, factor = _SENDS[name]
            contributed = sizes[which] if which < len(sizes) else 0
            payload += contributed
            wire += contributed * factor(max(1, ranks))
    return Traffic(payload, wire, operators)
