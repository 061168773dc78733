"""Workload: what one training step of a model computes, and when its gradients become ready."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Workload"]

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A model's step as recorded (or made up), without its communication; all times in ns.

    Attributes:
        names: of the parameters, in the order of registration.
        sizes: bytes of each parameter's gradient, int64 ``[parameters]``.
        keys: (dtype, device) of each parameter: only equal ones share a bucket.
        ready_ns: when each gradient was ready, from its rank's begin of backward, ``[ranks, parameters]``.
        computed_ns: end of each rank's own backward computation, from there, ``[ranks]``.
        forward_ns: from the begin of forward to the begin of backward, ``[ranks]``.
        other_ns: from the end of a backward to the next forward (optimizer, input data), ``[ranks]``.
        busy_ns: begin and end of the collectives that were under way meanwhile, from each rank's begin of backward,
            ``[ranks, collectives, 2]``; what they have slowed down is taken out before a replay.
        write_back_ns: after each bucket's collective: a fixed part, and one for each byte.
        order: parameters in the order in which rank 0's gradients became ready, which buckets are built from.
        caps: bytes at which the recorded buckets were closed (see `ddp_lab.bucketing.assign_buckets`); empty: unknown.
        world_size: ranks that trained.
        step_ns: median of the recorded steps, mean over the ranks; None: unknown.
        waits_ns: what a step takes beyond what a replay explains, see `ddp_lab.simulation.anchor`; may be negative.
        buffered: bytes of the buckets' buffers over `sizes`: less than 1 with mixed precision.
        carried: bytes that travelled over `sizes`, with the recorded comm hook; see `ddp_lab.simulation.bytes_on_wire`.
    """

    names: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    keys: tuple[Hashable, ...]
    ready_ns: _Floats
    computed_ns: _Floats
    forward_ns: _Floats
    other_ns: _Floats
    busy_ns: _Floats
    write_back_ns: tuple[float, float] = (0.0, 0.0)
    order: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    world_size: int = 1
    step_ns: float | None = None
    waits_ns: float = 0.0
    buffered: float = 1.0
    carried: float = 1.0

    def __post_init__(self) -> None:
        ranks, parameters = self.ready_ns.shape
        shapes = {"computed_ns": self.computed_ns, "forward_ns": self.forward_ns, "other_ns": self.other_ns}
        for name, values in shapes.items():
            if values.shape != (ranks,):
                raise ValueError(f"{name} has shape {values.shape}, but there are {ranks} ranks")
        if not len(self.sizes) == len(self.keys) == len(self.names) == parameters or parameters == 0:
            raise ValueError(
                f"{len(self.names)} names, {len(self.sizes)} sizes, {len(self.keys)} keys, {parameters} times"
            )
        if not np.isfinite(self.ready_ns).all() or (self.ready_ns < 0).any():
            raise ValueError("ready_ns must be finite and at least 0")
        if not self.order:
            by_time = np.argsort(self.ready_ns[0], kind="stable")
            object.__setattr__(self, "order", tuple(by_time.tolist()))

    @property
    def ranks(self) -> int:
        """Ranks whose times are held: one typical rank, or every rank that trained."""
        return len(self.ready_ns)

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return int(self.sizes.sum())

    @classmethod
    def made_up(
        cls,
        sizes: Sequence[int],
        *,
        forward_ns: float,
        backward_ns: float,
        other_ns: float = 0.0,
        shares: Sequence[float] | None = None,
        write_back_ns: tuple[float, float] = (0.0, 0.0),
    ) -> Workload:
        """A model that nobody has run: parameters in the order of registration, the last one's gradient comes first.

        Args:
            sizes: bytes of each parameter.
            forward_ns: computation of the forward.
            backward_ns: of the backward.
            other_ns: of the rest of the step.
            shares: of each parameter in the backward's computation; None: as much as its bytes.
            write_back_ns: see the class.
        """
        weights = np.asarray(sizes if shares is None else shares, np.float64)
        ready = (np.cumsum(weights[::-1]) / weights.sum() * backward_ns)[::-1]
        return cls(
            names=tuple(f"parameter{index}" for index in range(len(sizes))),
            sizes=np.asarray(sizes, np.int64),
            keys=("float32",) * len(sizes),
            ready_ns=ready[None, :],
            computed_ns=np.array([backward_ns]),
            forward_ns=np.array([forward_ns]),
            other_ns=np.array([other_ns]),
            busy_ns=np.zeros((1, 0, 2)),
            write_back_ns=write_back_ns,
            order=tuple(range(len(sizes)))[::-1],
        )

    def alone(self, compute_slowdown: float) -> Workload:
        """The same computation without collectives beside it, if they make it `compute_slowdown` longer (0.2: 20 %)."""
        if compute_slowdown == 0 or self.busy_ns.shape[1] == 0:
            return replace(self, busy_ns=np.zeros((self.ranks, 0, 2)))
        lost = compute_slowdown / (1 + compute_slowdown)
        ready, computed = self.ready_ns.copy(), self.computed_ns.copy()
        for rank in range(self.ranks):
            intervals = _union(self.busy_ns[rank])
            ready[rank] -= lost * _before(intervals, ready[rank])
            computed[rank] -= lost * float(_before(intervals, computed[rank : rank + 1])[0])
        return replace(self, ready_ns=ready, computed_ns=computed, busy_ns=np.zeros((self.ranks, 0, 2)))

    def without(self, rank: int) -> Workload:
        """The same step if `rank` were as fast as the others' median: "without the straggler".

        Raises:
            ValueError: there is no such rank, or no other one.
        """
        if self.ranks < 2 or not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} beside others; times of {self.ranks} ranks are known")
        others = [other for other in range(self.ranks) if other != rank]
        changed = {}
        for name in ("ready_ns", "computed_ns", "forward_ns", "other_ns", "busy_ns"):
            values = getattr(self, name).copy()
            values[rank] = np.median(values[others], axis=0)
            changed[name] = values
        return replace(self, **changed)

    def typical(self) -> Workload:
        """One rank: the median of all."""
        changed = {
            name: np.median(getattr(self, name), axis=0, keepdims=True)
            for name in ("ready_ns", "computed_ns", "forward_ns", "other_ns", "busy_ns")
        }
        return replace(self, **changed)

    def scaled(self, factor: float) -> Workload:
        """The same step on a device on which computation takes `factor` times as long."""
        fixed, per_byte = self.write_back_ns
        changed = {
            name: getattr(self, name) * factor
            for name in ("ready_ns", "computed_ns", "forward_ns", "other_ns", "busy_ns")
        }
        step = None if self.step_ns is None else self.step_ns * factor
        made = replace(self, write_back_ns=(fixed * factor, per_byte * factor), **changed)
        return replace(made, step_ns=step, waits_ns=self.waits_ns * factor)


def _union(intervals: _Floats) -> _Floats:
    """Disjoint intervals that cover the same, ascending; ``[n, 2]``."""
    made: list[list[float]] = []
    for begin, end in sorted(intervals.tolist()):
        if end <= begin:
            continue
        if made and begin <= made[-1][1]:
            made[-1][1] = max(made[-1][1], end)
        else:
            made.append([begin, end])
    return np.array(made).reshape(-1, 2)


def _before(intervals: _Floats, at: _Floats) -> _Floats:
    """How much of the intervals lies between 0 and each time; shape of `at`."""
    begin, end = intervals[:, 0], intervals[:, 1]
    inside: _Floats = np.clip(at[:, None], begin, end) - np.maximum(begin, 0)
    return np.asarray(np.maximum(inside, 0).sum(axis=1))
