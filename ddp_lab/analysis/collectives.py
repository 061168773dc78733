"""Algorithms of collectives as data: in each step, which rank sends which parts of its buffer to which rank.

A buffer is divided into as many parts as there are ranks. Steps run one after the other; the transfers of one step run
at the same time. A `CollectiveRun` records a collective that was run step by step: who sent what, and what each rank
held after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["ALGORITHMS", "CollectiveRun", "CollectiveStep", "Holds", "Transfer", "impossible", "schedule"]


@dataclass(frozen=True)
class Transfer:
    """One message.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        parts: which parts of the source's buffer.
        reduces: whether they are added to the target's data; False: they replace it.
        others: their places in the target's buffer, if not the same.
    """

    source: int
    target: int
    parts: tuple[int, ...]
    reduces: bool
    others: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The parts of the target's buffer that receive them."""
        return self.others or self.parts


Step = list[Transfer]


def _ring_reduce_scatter(n: int) -> list[Step]:
    # So that rank r ends with part r.
    return [[Transfer(r, (r + 1) % n, ((r - s - 1) % n,), True) for r in range(n)] for s in range(n - 1)]


def _ring_all_gather(n: int) -> list[Step]:
    return [[Transfer(r, (r + 1) % n, ((r - s) % n,), False) for r in range(n)] for s in range(n - 1)]


def _distances(n: int) -> list[int]:
    """The powers of two below n."""
    return [1 << bit for bit in range((n - 1).bit_length())]


def _block(rank: int, size: int, n: int) -> tuple[int, ...]:
    begin = rank // size * size
    return tuple(range(begin, min(begin + size, n)))


def _halving_reduce_scatter(n: int) -> list[Step]:
    """Each step: exchange half of what is left with a partner half as far away."""
    # Rank r continues with the parts that agree with r in this bit and in all higher ones.
    return [[Transfer(r, r ^ d, _block(r ^ d, d, n), True) for r in range(n)] for d in reversed(_distances(n))]


def _doubling_all_gather(n: int) -> list[Step]:
    return [[Transfer(r, r ^ d, _block(r, d, n), False) for r in range(n)] for d in _distances(n)]


def _tree_reduce(n: int) -> list[Step]:
    """Up a binomial tree to rank 0."""
    return [[Transfer(r, r - d, tuple(range(n)), True) for r in range(d, n, 2 * d)] for d in _distances(n)]


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
    """Why an algorithm can't run on this number of ranks; "" if it can."""
    if algorithm in _POWERS_OF_TWO and ranks & (ranks - 1):
        return f"recursive {algorithm} needs a power of two of ranks, not {ranks}"
    return ""


def schedule(collective: str, algorithm: str, ranks: int) -> list[Step]:
    """The steps of a collective.

    Raises:
        ValueError: there is no such collective or algorithm, or it can't run on this number of ranks.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    if algorithm not in ALGORITHMS[collective]:
        known = ", ".join(ALGORITHMS[collective])
        raise ValueError(f"no algorithm {algorithm!r} of {collective}; there are {known}")
    if why := impossible(algorithm, ranks):
        raise ValueError(why)
    return ALGORITHMS[collective][algorithm](ranks)


Holds = tuple[tuple[tuple[int, ...], ...], ...]
"""By rank and part: the ranks whose contributions are in it."""


@dataclass(frozen=True)
class CollectiveStep:
    """One step of an algorithm, as it happened.

    Attributes:
        transfers: the messages, sent at the same time.
        bytes: size of each transfer.
        holds: what each rank holds after the step.
        ms: time on the slowest rank; the median of several runs.
    """

    transfers: tuple[Transfer, ...]
    bytes: tuple[int, ...]
    holds: Holds
    ms: float

    @property
    def adds(self) -> bool:
        """Whether received data is added; otherwise it replaces the old data."""
        return any(one.reduces for one in self.transfers)

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent."""
        return sum(count for one, count in zip(self.transfers, self.bytes, strict=True) if one.source == rank)


@dataclass(frozen=True)
class CollectiveRun:
    """A collective, step by step; the same on all ranks.

    Attributes:
        collective: e.g. ``"all_reduce"``.
        algorithm: e.g. ``"ring"``.
        ranks: the number of ranks.
        bytes: size of each rank's buffer, which has as many parts as there are ranks.
        begin: what each rank holds before the first step.
        steps: the steps in order.
    """

    collective: str
    algorithm: str
    ranks: int
    bytes: int
    begin: Holds
    steps: tuple[CollectiveStep, ...]

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent in all steps."""
        return sum(step.sent(rank) for step in self.steps)

    @property
    def busiest_bytes(self) -> int:
        """The bytes sent by the busiest rank of each step, summed: the time depends on them (β)."""
        return sum(max((step.sent(rank) for rank in range(self.ranks)), default=0) for step in self.steps)

    @property
    def ms(self) -> float:
        """All steps."""
        return sum(step.ms for step in self.steps)
