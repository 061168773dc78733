"""Algorithms of collectives as data: in each step, which rank sends which parts of its buffer to which rank.

A buffer is cut into as many parts as there are ranks. Steps follow each other; the transfers of one step run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["ALGORITHMS", "Transfer", "impossible", "schedule"]


@dataclass(frozen=True)
class Transfer:
    """One message.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        parts: which parts of the source's buffer.
        reduces: they are added to what the target has; False: they replace it.
        others: where they go in the target's buffer, if not to the same places.
    """

    source: int
    target: int
    parts: tuple[int, ...]
    reduces: bool
    others: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """Which parts of the target's buffer they go to."""
        return self.others or self.parts


Step = list[Transfer]


def _ring_reduce_scatter(n: int) -> list[Step]:
    # So that rank r ends with part r.
    return [[Transfer(r, (r + 1) % n, ((r - s - 1) % n,), True) for r in range(n)] for s in range(n - 1)]


def _ring_all_gather(n: int) -> list[Step]:
    return [[Transfer(r, (r + 1) % n, ((r - s) % n,), False) for r in range(n)] for s in range(n - 1)]


def _halving_reduce_scatter(n: int) -> list[Step]:
    """Each step: exchange half of what is left with a partner half as far away."""
    steps = []
    distance = n // 2
    while distance:
        # Rank r goes on with the parts that agree with r in this bit and in all higher ones.
        steps.append([Transfer(r, r ^ distance, _block((r ^ distance), distance, n), True) for r in range(n)])
        distance //= 2
    return steps


def _block(rank: int, size: int, n: int) -> tuple[int, ...]:
    begin = rank // size * size
    return tuple(range(begin, min(begin + size, n)))


def _doubling_all_gather(n: int) -> list[Step]:
    steps = []
    distance = 1
    while distance < n:
        steps.append([Transfer(r, r ^ distance, _block(r, distance, n), False) for r in range(n)])
        distance *= 2
    return steps


def _tree_reduce(n: int) -> list[Step]:
    """Up a binomial tree to rank 0."""
    every = tuple(range(n))
    steps = []
    distance = 1
    while distance < n:
        senders = range(distance, n, 2 * distance)
        steps.append([Transfer(r, r - distance, every, True) for r in senders])
        distance *= 2
    return steps


def _tree_broadcast(n: int) -> list[Step]:
    """The same way down."""
    return [[Transfer(t.target, t.source, t.parts, False) for t in step] for step in reversed(_tree_reduce(n))]


def _tree_gather(n: int) -> list[Step]:
    """Up the same tree, each with what it has got so far."""
    return [
        [Transfer(t.source, t.target, _block(t.source, 2**s, n), False) for t in step]
        for s, step in enumerate(_tree_reduce(n))
    ]


def _tree_scatter(n: int) -> list[Step]:
    """The same way down."""
    return [[Transfer(t.target, t.source, t.parts, False) for t in step] for step in reversed(_tree_gather(n))]


def _direct_gather(n: int) -> list[Step]:
    """All to rank 0 at once."""
    return [[Transfer(r, 0, (r,), False) for r in range(1, n)]] if n > 1 else []


def _direct_scatter(n: int) -> list[Step]:
    """Rank 0 to all at once."""
    return [[Transfer(0, r, (r,), False) for r in range(1, n)]] if n > 1 else []


def _direct_all_to_all(n: int) -> list[Step]:
    """Each to all others at once: rank r's part s becomes rank s's part r."""
    every = [Transfer(r, s, (s,), False, others=(r,)) for r in range(n) for s in range(n) if r != s]
    return [every] if every else []


def _chain_broadcast(n: int) -> list[Step]:
    """Part after part along the ranks: a pipeline."""
    return [[Transfer(r, r + 1, (s - r,), False) for r in range(n - 1) if 0 <= s - r < n] for s in range(2 * n - 2)]


ALGORITHMS: Final[dict[str, dict[str, Callable[[int], list[Step]]]]] = {
    "all_reduce": {
        "ring": lambda n: _ring_reduce_scatter(n) + _ring_all_gather(n),
        "tree": lambda n: _tree_reduce(n) + _tree_broadcast(n),
        "halving": lambda n: _halving_reduce_scatter(n) + _doubling_all_gather(n),
    },
    "all_gather": {"ring": _ring_all_gather, "doubling": _doubling_all_gather},
    "reduce_scatter": {"ring": _ring_reduce_scatter, "halving": _halving_reduce_scatter},
    "broadcast": {"tree": _tree_broadcast, "chain": _chain_broadcast},
    "reduce": {"tree": _tree_reduce},
    "gather": {"direct": _direct_gather, "tree": _tree_gather},
    "scatter": {"direct": _direct_scatter, "tree": _tree_scatter},
    "all_to_all": {"direct": _direct_all_to_all},
}
_POWERS_OF_TWO: Final = {"halving", "doubling"}


def impossible(algorithm: str, ranks: int) -> str:
    """Why an algorithm can't run on so many ranks; "" if it can."""
    if algorithm in _POWERS_OF_TWO and ranks & (ranks - 1):
        return f"recursive {algorithm} needs a power of two of ranks, not {ranks}"
    return ""


def schedule(collective: str, algorithm: str, ranks: int) -> list[Step]:
    """The steps of a collective.

    Raises:
        ValueError: there is no such collective or algorithm, or it can't run on so many ranks.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    if algorithm not in ALGORITHMS[collective]:
        known = ", ".join(ALGORITHMS[collective])
        raise ValueError(f"no algorithm {algorithm!r} of {collective}; there are {known}")
    if why := impossible(algorithm, ranks):
        raise ValueError(why)
    return ALGORITHMS[collective][algorithm](ranks)
