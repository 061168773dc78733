"""Workload: a training step's computation, the readiness of its gradients, the bytes it sends; and a step's parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import covered

__all__ = ["StepTimes", "Workload", "carried", "shares"]

_Floats = npt.NDArray[np.float64]
_BY_RANK = ("ready_ns", "computed_ns", "forward_ns", "other_ns", "busy_ns")
_HALVED = re.compile(r"\b(fp16|bf16)_compress(_hook)?$", re.IGNORECASE)  # also as c10d's built-in hooks are called
_UNKNOWN = re.compile(r"powersgd|quantization|wrapper", re.IGNORECASE)
_HALF = 2  # bytes of a number that such a hook has rounded


@dataclass(frozen=True)
class StepTimes:
    """A step by parts; ``step_ns = forward_ns + compute_ns + exposed_ns + other_ns``.

    Attributes:
        step_ns: the step.
        forward_ns: the forward.
        compute_ns: the backward's own computation.
        hidden_ns: communication beside computation (not a part of the sum).
        exposed_ns: waiting for communication.
        other_ns: the rest: optimizer, input data.
    """

    step_ns: float
    forward_ns: float
    compute_ns: float
    hidden_ns: float
    exposed_ns: float
    other_ns: float

    @property
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds by part; all but ``hidden`` add up to the step."""
        parts = ("forward", "compute", "hidden", "exposed", "other")
        return {part: getattr(self, f"{part}_ns") / 1e6 for part in parts}


@dataclass(frozen=True)
class Workload:
    """A model's step as recorded (or synthetic), without its communication; all times in ns.

    Attributes:
        names: names of the parameters, in the order of registration.
        sizes: bytes of each parameter's gradient, int64 ``[parameters]``.
        keys: (dtype, device) of each parameter: only equal ones share a bucket.
        ready_ns: when each gradient was ready, since its rank's begin of backward, ``[ranks, parameters]``.
        computed_ns: end of each rank's own backward computation, since then, ``[ranks]``.
        forward_ns: from the begin of forward to the begin of backward, ``[ranks]``.
        other_ns: from the end of a backward to the next forward (optimizer, input data), ``[ranks]``.
        busy_ns: begin and end of the collectives in flight meanwhile, since each rank's begin of backward,
            ``[ranks, collectives, 2]``; their slowdown is removed before a replay.
        write_back_ns: time after each bucket's collective: a fixed part, and a part per byte.
        order: parameters in the order in which rank 0's gradients became ready, from which buckets are built.
        caps: bytes at which the recorded buckets were closed (see `ddp_lab.bucketing.assign_buckets`); empty: unknown.
        world_size: number of ranks that trained.
        step_ns: median of the recorded steps, mean over the ranks; None: unknown.
        waits_ns: step time that a replay does not explain, see [Note: the anchor]; may be negative.
        buffered: bytes of the buckets' buffers divided by `sizes`: less than 1 with mixed precision.
        carried: bytes sent divided by `sizes`, with the recorded comm hook; see `carried`.
    """

    names: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    keys: tuple[tuple[str, str], ...]
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
        for name in ("computed_ns", "forward_ns", "other_ns"):
            if (shape := getattr(self, name).shape) != (ranks,):
                raise ValueError(f"{name} has shape {shape}, but there are {ranks} ranks")
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
    def caps_mb(self) -> list[float]:
        """`caps` in MiB."""
        return [cap / (1 << 20) for cap in self.caps]

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
    ) -> Workload:
        """A synthetic model: parameters in the order of registration; the last one's gradient is ready first.

        Args:
            sizes: bytes of each parameter.
            forward_ns: computation of the forward.
            backward_ns: of the backward.
            other_ns: of the rest of the step.
            shares: of each parameter in the backward's computation; None: as much as its bytes.
        """
        weights = np.asarray(sizes if shares is None else shares, np.float64)
        ready = (np.cumsum(weights[::-1]) / weights.sum() * backward_ns)[::-1]
        return cls(
            names=tuple(f"parameter{index}" for index in range(len(sizes))),
            sizes=np.asarray(sizes, np.int64),
            keys=(("float32", "cpu"),) * len(sizes),
            ready_ns=ready[None, :],
            computed_ns=np.array([backward_ns]),
            forward_ns=np.array([forward_ns]),
            other_ns=np.array([other_ns]),
            busy_ns=np.zeros((1, 0, 2)),
            order=tuple(range(len(sizes)))[::-1],
        )

    def alone(self, compute_slowdown: float) -> Workload:
        """The same computation without collectives beside it, if they make it `compute_slowdown` longer (0.2: 20 %)."""
        if compute_slowdown == 0 or self.busy_ns.shape[1] == 0:
            return replace(self, busy_ns=np.zeros((self.ranks, 0, 2)))
        lost = compute_slowdown / (1 + compute_slowdown)
        ready, computed = self.ready_ns.copy(), self.computed_ns.copy()
        for rank in range(self.ranks):
            busy = _busy_until(self.busy_ns[rank], np.append(ready[rank], computed[rank]))
            ready[rank] -= lost * busy[:-1]
            computed[rank] -= lost * float(busy[-1])
        return replace(self, ready_ns=ready, computed_ns=computed, busy_ns=np.zeros((self.ranks, 0, 2)))

    def without(self, rank: int) -> Workload:
        """The same step if `rank` were as fast as the others' median: "without the straggler".

        Raises:
            ValueError: there is no such rank, or no other one.
        """
        if self.ranks < 2 or not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} to compare with others; times of {self.ranks} ranks are known")
        others = [other for other in range(self.ranks) if other != rank]
        changed = {}
        for name in _BY_RANK:
            values = getattr(self, name).copy()
            values[rank] = np.median(values[others], axis=0)
            changed[name] = values
        return replace(self, **changed)


def _busy_until(intervals: _Floats, at: _Floats) -> _Floats:
    """How much of the time from 0 to each of these is covered by intervals; shape of `at`."""
    begin, end = np.maximum(intervals[:, 0], 0), np.minimum(intervals[:, 1], at[:, None])
    return covered(np.broadcast_to(begin, end.shape), end, end > begin)


def carried(assignment: Mapping[str, Any]) -> list[float] | None:
    """Bytes that the all-reduce of each bucket sends, for the times of a link.

    A bucket's buffer may be smaller than its parameters (mixed precision averages in 16 bits), and a comm hook may send
    less than the buffer.

    Args:
        assignment: as ranks describe it, see tutorials/site/descriptions.md.

    Returns:
        None if it is not known for the comm hook (PowerSGD, quantization). A hook that is not one of torch's is assumed
        to send its buffer.
    """
    hook = str((assignment.get("options") or {}).get("comm_hook") or "")
    if _UNKNOWN.search(hook):
        return None
    buffers = [float(one["bytes"]) for one in assignment["buckets"]]
    if not _HALVED.search(hook):
        return buffers
    numels = {one["index"]: one.get("numel", one["bytes"] // 4) for one in assignment["parameters"]}
    halved = [float(_HALF * sum(numels[index] for index in one["parameters"])) for one in assignment["buckets"]]
    return [min(pair) for pair in zip(buffers, halved, strict=True)]


def shares(assignment: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of all buffers, and bytes sent, divided by the bytes of the parameters in them."""
    of = {one["index"]: one["bytes"] for one in assignment["parameters"]}
    whole = sum(of[index] for one in assignment["buckets"] for index in one["parameters"])
    buffers = sum(one["bytes"] for one in assignment["buckets"])
    found = carried(assignment)
    return buffers / max(whole, 1), (buffers if found is None else sum(found)) / max(whole, 1)
