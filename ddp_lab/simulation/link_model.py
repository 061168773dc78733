"""A communication model of the all-reduce, fitted to measured times and scaled to other world sizes.

[Note: cost of an all-reduce]
Every algorithm costs ``overhead + hops(n) * latency + traffic(n) * bytes * ns_per_byte`` (the α-β model; the
overhead is the fixed time of a backend for each collective). For n ranks:

==================  ==================  =============  ==========================================================
algorithm           hops                traffic        source
==================  ==================  =============  ==========================================================
ring                2 (n - 1)           2 (n - 1) / n  Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms
                                                       for clusters of workstations (2009)
halving_doubling    2 log2(n)           2 (n - 1) / n  Thakur, Rabenseifner, Gropp: Optimization of collective
                                                       communication operations in MPICH (2005)
tree                2 log2(n)           2              Sanders, Speck, Träff: Two-tree algorithms for full bandwidth
                                                       broadcast, reduction and scan (2009); NCCL since 2.4
one_host            2 (n - 1)           2 (n - 1)      the ring, where all ranks' bytes pass the same cores: n send
                                                       2 (n - 1) / n each
==================  ==================  =============  ==========================================================

``hierarchical`` (m nodes of g ranks) is a reduce-scatter within each node, g all-reduces between the nodes at the same
time on 1 / g of the bytes each, and an all-gather within each node (Cho et al.: BlueConnect, 2019): a ring of g on the
link inside, plus `between` (ring or tree) of m on the node's link to the others, which carries all bytes once.
The addition of numbers costs time for each byte, too: a fitted ``ns_per_byte`` contains it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

__all__ = ["ALGORITHMS", "LANES", "CommModel", "Fit", "Point", "hops", "traffic"]

ALGORITHMS = ("ring", "tree", "halving_doubling", "one_host", "hierarchical")
LANES = {"gloo": 2}
"""Collectives that a backend runs side by side: threads of torch's ProcessGroupGloo; elsewhere one."""
Point = tuple[float, float, int]  # bytes, nanoseconds, ranks
_CLEARLY_BETTER = 0.5  # share of what a ring leaves unexplained; noise alone favours any of them
_Floats = npt.NDArray[np.float64]


def hops(algorithm: str, ranks: int) -> float:
    """Latencies that follow each other; see [Note: cost of an all-reduce]."""
    if ranks < 2:
        return 0.0
    return 2.0 * math.ceil(math.log2(ranks)) if algorithm in ("tree", "halving_doubling") else 2.0 * (ranks - 1)


def traffic(algorithm: str, ranks: int) -> float:
    """Bytes through a rank's link, as a multiple of the buffer's; see [Note: cost of an all-reduce]."""
    if ranks < 2:
        return 0.0
    if algorithm == "one_host":
        return 2.0 * (ranks - 1)
    return 2.0 if algorithm == "tree" else 2.0 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Fit:
    """How well the formula fits the measurements, before any correction by size.

    Attributes:
        points: number of (size, ranks) pairs that it was fitted to, after the median over repetitions.
        r2: share of the variance of log(time) that the model explains; 1 is perfect.
        median_error: median of |model / measured - 1|.
        worst_error: the largest of these errors.
    """

    points: int
    r2: float
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class CommModel:
    """Time of an all-reduce as a function of bytes and ranks, and its contention with computation.

    Attributes:
        latency_ns: latency of one message between two ranks (α); for a hierarchical link, between nodes.
        ns_per_byte: time per byte on a rank's link (β); for a hierarchical link, on a node's link to the others.
        overhead_ns: fixed overhead of each collective, for any number of ranks.
        algorithm: one of `ALGORITHMS`.
        inside: link within a node (hierarchical only); its algorithm is a ring.
        ranks_per_node: hierarchical only.
        between: hierarchical only: "ring" or "tree" between the nodes.
        lanes: collectives that the backend runs at the same time (NCCL: 1 stream; torch's Gloo: 2 threads).
        sharing: 1: concurrent collectives share one link; 0: they don't slow each other down.
        compute_slowdown: how much longer a rank computes while a collective is in flight (0.2: by 20 %).
        comm_slowdown: how much longer a collective takes while all ranks compute.
        launch_ns: CPU time of a rank for each launch.
        correction: (bytes, factor) at the measured sizes: the measurement divided by the formula; interpolated over
            log(bytes), constant outside. Empty: only the formula.
        fit: None for a model that was not fitted.
    """

    latency_ns: float
    ns_per_byte: float
    overhead_ns: float = 0.0
    algorithm: str = "ring"
    inside: CommModel | None = None
    ranks_per_node: int = 1
    between: str = "ring"
    lanes: int = 1
    sharing: float = 1.0
    compute_slowdown: float = 0.0
    comm_slowdown: float = 0.0
    launch_ns: float = 0.0
    correction: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    fit: Fit | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is not valid; choose one of {', '.join(ALGORITHMS)}")
        if self.algorithm == "hierarchical" and (self.inside is None or self.ranks_per_node < 1):
            raise ValueError("a hierarchical link needs `inside`, the link within a node, and `ranks_per_node`")
        times = (self.latency_ns, self.ns_per_byte, self.overhead_ns, self.launch_ns)
        slowdowns = (self.sharing, self.compute_slowdown, self.comm_slowdown)
        if not all(math.isfinite(value) and value >= 0 for value in (*times, *slowdowns)):
            raise ValueError(f"times and slowdowns of a link must be finite and at least 0, got {times + slowdowns}")
        if self.lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {self.lanes}")

    def parts(self, size: npt.ArrayLike, ranks: int) -> tuple[_Floats, _Floats]:
        """Latency and transfer of all-reduces in ns, each of the shape of `size` (bytes)."""
        wanted = np.asarray(size, np.float64)
        if ranks < 2:
            return np.zeros_like(wanted), np.zeros_like(wanted)
        if self.algorithm == "hierarchical":
            latency, transfer = self._hierarchical(wanted, ranks)
        else:
            latency = np.full_like(wanted, hops(self.algorithm, ranks) * self.latency_ns)
            transfer = traffic(self.algorithm, ranks) * self.ns_per_byte * wanted
        factor = self._factor(wanted)
        return (latency + self.overhead_ns) * factor, transfer * factor

    def time_ns(self, size: npt.ArrayLike, ranks: int) -> _Floats:
        """Time of all-reduces without contention, in ns.

        Args:
            size: bytes of the buffers, any shape.
            ranks: world size; 1 takes no time.
        """
        latency, transfer = self.parts(size, ranks)
        return latency + transfer

    def _hierarchical(self, size: _Floats, ranks: int) -> tuple[_Floats, _Floats]:
        assert self.inside is not None
        of_node = min(self.ranks_per_node, ranks)
        nodes = math.ceil(ranks / of_node)
        inside, inside_transfer = self.inside.parts(size, of_node)
        latency = inside + hops(self.between, nodes) * self.latency_ns
        return latency, inside_transfer + traffic(self.between, nodes) * self.ns_per_byte * size

    def _factor(self, size: _Floats) -> _Floats | float:
        if not self.correction:
            return 1.0
        at, factors = zip(*self.correction, strict=True)
        return np.asarray(np.interp(np.log(np.maximum(size, 1.0)), np.log(at), factors))

    @property
    def bandwidth_gb_s(self) -> float:
        """Bandwidth of the link in 10⁹ bytes per second."""
        return 1 / self.ns_per_byte if self.ns_per_byte else math.inf

    def scaled(self, factor: float) -> CommModel:
        """The same link on which every all-reduce takes `factor` times as long."""
        inside = None if self.inside is None else self.inside.scaled(factor)
        times = {name: getattr(self, name) * factor for name in ("latency_ns", "ns_per_byte", "overhead_ns")}
        return replace(self, inside=inside, **times)

    @classmethod
    def fitted(
        cls, points: Iterable[Point], *, algorithm: str | None = "ring", per_size: bool = True, lanes: int = 1
    ) -> CommModel:
        """Fits latency, bandwidth and overhead to measured all-reduces.

        Repetitions of one size count with their median. Errors are relative to the time, with Huber's weights
        (beyond 10 % the loss grows only linearly). Parameters are at least 0. With times of a single world size,
        overhead and latency can't be separated: all of it is then latency, which scales with the hops.

        Args:
            points: (bytes, nanoseconds, ranks) of each measurement; at least two different sizes.
            algorithm: one of `ALGORITHMS` but not "hierarchical"; None: "ring", unless another formula leaves less than
                half of its unexplained variance (times of a single world size can't distinguish them).
            per_size: keep the remaining error at each measured size as `correction`.
            lanes: see the class.

        Raises:
            ValueError: too few points, or a size or time that is not positive.
        """
        points = list(points)
        if algorithm is None:
            tried = [cls.fitted(points, algorithm=one, per_size=False, lanes=lanes) for one in ALGORITHMS[:-1]]
            unexplained = [1 - one.fit.r2 if one.fit else 1.0 for one in tried]
            best = int(np.argmin(unexplained))
            chosen = ALGORITHMS[best if unexplained[best] < _CLEARLY_BETTER * unexplained[0] else 0]
            return cls.fitted(points, algorithm=chosen, per_size=per_size, lanes=lanes)
        if algorithm == "hierarchical":
            raise ValueError("fit the links inside a node and between nodes separately, then build a CommModel of both")
        size, ranks, time = _medians(points)
        several = float(len(set(ranks.tolist())) > 1)
        terms = np.array(
            [(several, hops(algorithm, n), one * traffic(algorithm, n)) for one, n in zip(size, ranks, strict=True)]
        )
        overhead, latency, per_byte = _non_negative_fit(terms, time)
        made = cls(latency, per_byte, overhead, algorithm, lanes=lanes)
        predicted = np.array([float(made.time_ns(one, n)) for one, n in zip(size, ranks.tolist(), strict=True)])
        at = np.unique(size) if per_size else ()
        correction = tuple((float(one), float(np.median((time / predicted)[size == one]))) for one in at)
        return replace(made, correction=correction, fit=_goodness(predicted, time))


def _medians(points: Iterable[Point]) -> tuple[_Floats, npt.NDArray[np.int64], _Floats]:
    groups: dict[tuple[float, int], list[float]] = {}
    for size, nanoseconds, ranks in points:
        if size <= 0 or nanoseconds <= 0 or ranks < 2:
            raise ValueError(
                f"a point needs bytes > 0, nanoseconds > 0 and ranks ≥ 2, got {(size, nanoseconds, ranks)}"
            )
        groups.setdefault((float(size), int(ranks)), []).append(float(nanoseconds))
    if len({size for size, _ in groups}) < 2:
        raise ValueError(f"a link is fitted to at least two sizes, got {sorted({size for size, _ in groups})}")
    keys = sorted(groups)
    sizes, worlds = zip(*keys, strict=True)
    return np.array(sizes), np.array(worlds), np.array([np.median(groups[key]) for key in keys])


def _non_negative_fit(terms: _Floats, time: _Floats) -> tuple[float, float, float]:
    """Non-negative coefficients of three terms (shape ``[points, 3]``) with small relative errors."""
    weights = np.ones(len(time))
    found = np.zeros(terms.shape[1])
    for _ in range(20):
        found = _non_negative(terms * (weights / time)[:, None], weights)
        errors = np.abs(terms @ found / time - 1)
        weights = np.sqrt(np.minimum(1.0, 0.1 / np.maximum(errors, 1e-12)))
    overhead, latency, per_byte = found.tolist()
    return overhead, latency, per_byte


def _non_negative(matrix: _Floats, target: _Floats) -> _Floats:
    """Least squares with coefficients ≥ 0: the best of all subsets of columns (there are few)."""
    best, best_error = np.zeros(matrix.shape[1]), math.inf
    columns = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
            error = float(np.square(matrix[:, chosen] @ part - target).sum())
            if (part >= 0).all() and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = part
    return best


def _goodness(predicted: _Floats, time: _Floats) -> Fit:
    logs = np.log(time)
    spread = float(np.square(logs - logs.mean()).sum())
    left = float(np.square(logs - np.log(np.maximum(predicted, 1e-9))).sum())
    errors = np.abs(predicted / time - 1)
    return Fit(len(time), 1 - left / spread if spread else 1.0, float(np.median(errors)), float(errors.max()))
