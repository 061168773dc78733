"""Simulation of a step whose parameters are sharded or replicated by groups: torch's `fully_shard` (FSDP2, HSDP) and
`replicate`, and ZeRO-1.

[Note: the schedule of a sharded step]
A step runs group by group: the forward in the order of `ShardedWorkload.order`, the backward in the reverse one. Before
a group computes, its parameters are gathered, if they are not held: copied into a flat buffer, sent, and copied out of
it. After its backward, its gradients are copied, sent and reduced. Where there are several replicas of the parameters
(HSDP), each rank then averages its part of the gradients with the same part of the others; where no parameter is
sharded (`replicate`), that is all. All collectives pass one link, one after the other.

Who waits decides what overlaps (`waits`). ``"host"``: torch on the CPU waits inside the call of each collective. A
gathering goes on beside the computation only if the program asked for it before the module in front computes, which is
`Sharding.prefetch`. That counts in the forward only: in the backward torch gathers ahead by itself, and waits all the
same. ``"streams"``: on devices only the stream waits that needs the result. There torch starts the next gathering one
group ahead by itself, and a reduction runs beside the backward of the next group.

A computation and a collective that run at the same time slow each other down: while both run, each takes
1 + `contention` times as long. With a contention of 1 nothing is gained, as where all cores are busy anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .link_model import CommModel, non_negative_fit
from .parameter_groups import Sharding
from .step_times import StepTimes

__all__ = ["WAITS", "Cost", "GroupPoint", "ShardedStep", "ShardedWorkload", "ShardingCosts", "Span"]
__all__ += ["simulate_sharded", "simulate_zero_1"]

WAITS: Final = ("host", "streams")
GroupPoint = tuple[float, int, float]
"""Bytes, tensors, nanoseconds."""
_SIZES: Final = tuple(float(1 << power) for power in range(10, 28, 2))
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """Time of one operation of a group in ns.

    Attributes:
        fixed_ns: for each group.
        tensor_ns: for each tensor in it.
        byte_ns: for each byte.
        correction: (bytes, factor) at measured sizes: the measurement divided by the formula; interpolated over
            log(bytes), constant outside. Memory of large groups costs more, for example.
    """

    fixed_ns: float = 0.0
    tensor_ns: float = 0.0
    byte_ns: float = 0.0
    correction: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    def ns(self, size: float, tensors: int) -> float:
        """Of a group of so many bytes and tensors; a group without bytes takes no time."""
        if not size:
            return 0.0
        factor = 1.0
        if self.correction:
            at, factors = zip(*self.correction, strict=True)
            factor = float(np.interp(np.log(size), np.log(at), factors))
        return factor * (self.fixed_ns + self.tensor_ns * tensors + self.byte_ns * size)

    def scaled(self, factor: float) -> Cost:
        """One that takes `factor` times as long."""
        times = {name: getattr(self, name) * factor for name in ("fixed_ns", "tensor_ns", "byte_ns")}
        return replace(self, **times)

    @classmethod
    def fitted(cls, points: Iterable[GroupPoint]) -> Cost:
        """The cost that fits measured times; relative errors count, and parts are at least 0.

        Without times above 0 there is no cost.
        """
        known = [one for one in points if one[2] > 0]
        if not known:
            return cls()
        size, tensors, time = (np.array(values, np.float64) for values in zip(*known, strict=True))
        made = cls(*non_negative_fit(np.stack([np.ones_like(size), tensors, size], axis=1), time))
        ratios = time / np.array([made.ns(*one[:2]) for one in known])
        at = np.unique(size)
        return replace(made, correction=tuple((float(one), float(np.median(ratios[size == one]))) for one in at))

    def over(self, ranks: int, measured: int) -> Cost:
        """Of a ring of other size: each rank sends (n - 1) / n of the bytes in n - 1 messages."""
        if ranks < 2:
            return Cost()
        if measured < 2:
            return self
        share = (ranks - 1) / ranks / ((measured - 1) / measured)
        return replace(self, fixed_ns=self.fixed_ns * (ranks - 1) / (measured - 1), byte_ns=self.byte_ns * share)


@dataclass(frozen=True)
class ShardingCosts:
    """What sharding adds to a step. Bytes are those of the whole parameters.

    Attributes:
        all_gather: of the collective alone.
        reduce_scatter: of the collective alone.
        gathering: of what a rank does around an all-gather: memory, copies, Python.
        reducing: of what a rank does around a reduce-scatter.
        broadcast: of parameters, each by the rank that updates it (ZeRO-1).
        optimizer_ns: by how much longer an update takes for each tensor that is sharded.
        contention: while a computation and a collective run at the same time, each takes 1 + this times as long.
        ranks: that it was measured on: of one replica.
        all_reduce: of a rank's part of the gradients with those of other replicas; bytes are those of the part.
        replicas: that `all_reduce` was measured on.
    """

    all_gather: Cost
    reduce_scatter: Cost
    gathering: Cost = Cost()
    reducing: Cost = Cost()
    broadcast: Cost = Cost()
    optimizer_ns: float = 0.0
    contention: float = 1.0
    ranks: int = 2
    all_reduce: Cost = Cost()
    replicas: int = 2

    @classmethod
    def measured(cls, found: dict[str, Any]) -> ShardingCosts:
        """Of what `ddp_lab.parallel.monitoring.sharding_cost.measure` returns."""
        gathers, gathering = _parted(found["gather"], found["all_gather"])
        scatters, reducing = _parted(found["reduce"], found["reduce_scatter"])
        return cls(
            all_gather=gathers,
            reduce_scatter=scatters,
            gathering=gathering,
            reducing=reducing,
            broadcast=Cost.fitted(found["broadcast"]),
            all_reduce=Cost.fitted(found["all_reduce"]),
            optimizer_ns=found["optimizer_ns"],
            contention=found["contention"],
            ranks=found["ranks"],
            replicas=found["ranks"],
        )

    @classmethod
    def of_all_reduce(cls, link: CommModel, ranks: int, copy_ns: float = 0.0) -> ShardingCosts:
        """A guess from all-reduces: one is a reduce-scatter and an all-gather, and takes as long as both.

        Args:
            link: of the all-reduce.
            ranks: world size.
            copy_ns: of a byte, into a buffer or out of it.
        """
        whole = Cost.fitted([(size, 1, float(link.time_ns(size, ranks))) for size in _SIZES])
        whole = Cost(whole.fixed_ns + whole.tensor_ns, 0.0, whole.byte_ns, whole.correction)
        half, copies = whole.scaled(0.5), Cost(byte_ns=copy_ns)
        return cls(half, half, copies, copies, half, ranks=ranks, all_reduce=whole, replicas=ranks)

    def scaled(self, factor: float) -> ShardingCosts:
        """Where all that groups do takes `factor` times as long."""
        names = ("all_gather", "reduce_scatter", "all_reduce", "gathering", "reducing")
        return replace(self, **{one: getattr(self, one).scaled(factor) for one in names})

    def over(self, ranks: int, replicas: int = 1) -> ShardingCosts:
        """With so many replicas of the parameters, each sharded over so many ranks."""
        names = ("all_gather", "reduce_scatter", "broadcast")
        made: dict[str, Any] = {one: getattr(self, one).over(ranks, self.ranks) for one in names}
        made["all_reduce"] = self.all_reduce.over(replicas, self.replicas)
        return replace(self, ranks=ranks, replicas=replicas, **made)


def _parted(whole: Sequence[GroupPoint], collective: Sequence[GroupPoint]) -> tuple[Cost, Cost]:
    """The collective, and what is around it: together as long as the whole."""
    inside = [(size, tensors, min(ns, own)) for (size, tensors, ns), (_, _, own) in zip(whole, collective, strict=True)]
    rest = [(size, tensors, ns - own) for (size, tensors, ns), (_, _, own) in zip(whole, inside, strict=True)]
    return Cost.fitted(inside), Cost.fitted(rest)


@dataclass(frozen=True)
class ShardedWorkload:
    """A model's step without what sharding, or averaging, costs; times in ns.

    Attributes:
        names: of the parameters, in the order of registration.
        sizes: bytes of each.
        order: parameters in the order of the forward.
        forward_ns, backward_ns: computation of each parameter's part of the model, ``[ranks, steps, parameters]``.
        optimizer_ns: updating all parameters on one rank.
        other_ns: the rest of the step.
        ranks: world size of the recording.
    """

    names: tuple[str, ...]
    sizes: npt.NDArray[np.int64]
    order: tuple[int, ...]
    forward_ns: _Floats
    backward_ns: _Floats
    optimizer_ns: float
    other_ns: float
    ranks: int

    def scaled(self, factor: float) -> ShardedWorkload:
        """Where forward and backward take `factor` times as long."""
        return replace(self, forward_ns=self.forward_ns * factor, backward_ns=self.backward_ns * factor)


@dataclass(frozen=True)
class Span:
    """What happens in a predicted step.

    Attributes:
        what: "gather", "reduce" or "all-reduce" (collectives), "forward", "backward" or "copies" (computation),
            "optimizer".
        group: number of the group; -1: of none.
        in_backward: whether in the backward.
        begin_ns, end_ns: from when to when.
    """

    what: str
    group: int
    in_backward: bool
    begin_ns: float
    end_ns: float


@dataclass(frozen=True)
class ShardedStep(StepTimes):
    """A predicted step. Forward and backward are their computation with copies.

    Attributes:
        groups: parameters of each group, the root's first.
        spans: in the order of their begin.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    spans: tuple[Span, ...] = ()


def simulate_sharded(
    workload: ShardedWorkload,
    sharding: Sharding,
    costs: ShardingCosts,
    *,
    ranks: int | None = None,
    replicas: int = 1,
    waits: str = "host",
) -> ShardedStep:
    """Predicts a step with `fully_shard`, or with `replicate`.

    Args:
        workload: what a rank computes.
        sharding: its groups.
        costs: of collectives, and what is around them.
        ranks: world size; None: as recorded.
        replicas: how often all parameters exist: 1 for `fully_shard` on one dimension, more for HSDP, and for
            `replicate` the world size.
        waits: one of `WAITS`.

    Raises:
        ValueError: the world size is below 1, it is no multiple of `replicas`, or there is no such way to wait.
    """
    if waits not in WAITS:
        raise ValueError(f"waits={waits!r} is not valid; choose one of {', '.join(WAITS)}")
    ranks = _world_size(workload, ranks)
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"{replicas} replicas of the parameters need a world size that is a multiple, got {ranks}")
    return _Schedule(workload, sharding, costs.over(ranks // replicas, replicas), waits == "host").run()


def _world_size(workload: ShardedWorkload, ranks: int | None) -> int:
    if ranks is not None and ranks < 1:
        raise ValueError(f"world_size must be at least 1, got {ranks}")
    return ranks or workload.ranks


class _Link:
    """The collectives of a step, one after the other.

    What delays those that are under way delays all later ones as long. So all delays are one sum. Each collective has
    its times as they were when it was sent, and the sum as it was then, until it has begun, or ended.
    """

    def __init__(self) -> None:
        self.free = 0.0  # when all that was sent has ended
        self._what: list[tuple[str, int, bool]] = []
        self._begin: list[float] = []
        self._end: list[float] = []
        self._sums: list[float] = []
        self._sum = 0.0
        self._begun = self._ended = 0  # how many have

    def send(self, at: float, ns: float, what: str, group: int, in_backward: bool) -> int:
        """The number of a collective that is sent then, and takes so long."""
        begin = max(at, self.free)
        self.free = begin + ns
        self._what.append((what, group, in_backward))
        self._begin.append(begin)
        self._end.append(self.free)
        self._sums.append(self._sum)
        return len(self._what) - 1

    def end_of(self, number: int) -> float:
        """When a collective ends, as far as it is known."""
        return self._end[number] + (self._sum - self._sums[number]) * (number >= self._ended)

    def delay(self, since: float, by: float) -> None:
        """What is under way then takes so much longer; `since` never decreases."""
        self._begun = self._settle(self._begin, self._begun, since)
        self._ended = self._settle(self._end, self._ended, since)
        self._sum += by
        self.free += by

    def _settle(self, times: list[float], first: int, until: float) -> int:
        while first < len(times) and (time := times[first] + (self._sum - self._sums[first])) <= until:
            times[first] = time
            first += 1
        return first

    def spans(self) -> list[Span]:
        """All collectives, in order."""
        self._begun = self._settle(self._begin, self._begun, math.inf)
        self._ended = self._settle(self._end, self._ended, math.inf)
        times = zip(self._what, self._begin, self._end, strict=True)
        return [Span(*what, begin, end) for what, begin, end in times]


class _Schedule:
    """One step; its clock is that of the computation, and of the host where that waits."""

    def __init__(self, workload: ShardedWorkload, sharding: Sharding, costs: ShardingCosts, host: bool) -> None:
        self.workload, self.sharding, self.costs, self.host = workload, sharding, costs, host
        groups = [one.parameters for one in sharding.groups]
        inside = {index for group in groups for index in group}
        root = tuple(index for index in range(len(workload.sizes)) if index not in inside)
        place = {index: number for number, index in enumerate(workload.order)}
        ordered = sorted(groups, key=lambda group: min(place[index] for index in group))
        self.has_root = bool(root)
        self.groups = ((root,) if root else ()) + tuple(ordered)
        self.size = [float(workload.sizes[list(group)].sum()) for group in self.groups]
        self.clock = self.exposed = self.hidden = self.computed = 0.0
        self.link = _Link()
        self.under_way: dict[int, int] = {}  # group -> number of its all-gather
        self.spans: list[Span] = []

    def run(self) -> ShardedStep:
        held: set[int] = set()
        order = list(range(len(self.groups)))
        self._pass(order, held, in_backward=False)
        forward = self.computed
        if self.sharding.reshard_after_forward:
            held &= {0} if self.has_root else set()
        self._pass(order[::-1], held, in_backward=True)
        self._wait(self.link.free)
        return self._done(forward)

    def _pass(self, order: list[int], held: set[int], *, in_backward: bool) -> None:
        ahead = self.sharding.prefetch
        if ahead is None or (in_backward and self.host):
            ahead = 0 if self.host else 1
        for place, group in enumerate(order):
            for other in order[place : place + 1 + ahead]:
                if other not in held:
                    held.add(other)
                    self._gather(other, in_backward, waits=self.host and other == group)
            if group in self.under_way:
                self._wait(self.link.end_of(self.under_way.pop(group)))
                self._compute("copies", group, self._tensors(self.costs.gathering, group) / 2, in_backward)
            work = self.workload.backward_ns if in_backward else self.workload.forward_ns
            self._compute("backward" if in_backward else "forward", group, self._sum(work, group), in_backward)
            if in_backward:
                self._reduce(group)

    def _sum(self, values: _Floats, group: int) -> float:
        """Ranks meet in the next collective: of each step the slowest one counts."""
        return float(values[..., list(self.groups[group])].sum(axis=-1).max(axis=0).mean())

    def _tensors(self, cost: Cost, group: int) -> float:
        return cost.ns(self.size[group], len(self.groups[group]))

    def _gather(self, group: int, in_backward: bool, *, waits: bool) -> None:
        copies = self._tensors(self.costs.gathering, group)
        took = self._tensors(self.costs.all_gather, group)
        if not took:  # no other rank has a part of it
            self._compute("copies", group, copies, in_backward)
            return
        self._compute("copies", group, copies / 2, in_backward)
        sent = self._send("gather", group, took, in_backward)
        self.under_way[group] = sent
        if waits:
            self._wait(self.link.end_of(sent))

    def _reduce(self, group: int) -> None:
        self._compute("copies", group, self._tensors(self.costs.reducing, group), True)
        part = self.costs.all_reduce.ns(self.size[group] / self.costs.ranks, len(self.groups[group]))
        for what, took in (("reduce", self._tensors(self.costs.reduce_scatter, group)), ("all-reduce", part)):
            if took:
                sent = self._send(what, group, took, True)
                if self.host:
                    self._wait(self.link.end_of(sent))

    def _send(self, what: str, group: int, ns: float, in_backward: bool) -> int:
        return self.link.send(self.clock, ns, what, group, in_backward)

    def _wait(self, until: float) -> None:
        self.exposed += max(until - self.clock, 0.0)
        self.clock = max(until, self.clock)

    def _compute(self, what: str, group: int, ns: float, in_backward: bool) -> None:
        """Computes beside what is under way: both take longer while they run together."""
        if ns <= 0:
            return
        begin, busy = self.clock, max(self.link.free - self.clock, 0.0)
        together = min(ns, busy)  # until the shorter one would end
        later = together * self.costs.contention
        self.clock += ns + later
        if later:
            self.link.delay(begin, later)
        self.hidden += together + later
        self.computed += self.clock - begin
        self.spans.append(Span(what, group, in_backward, begin, self.clock))

    def _done(self, forward: float) -> ShardedStep:
        ranks = self.costs.ranks
        updated = self.workload.optimizer_ns / ranks + self.costs.optimizer_ns * len(self.workload.sizes) * (ranks > 1)
        other = self.workload.other_ns + updated
        end = self.clock + self.workload.other_ns
        self.spans.append(Span("optimizer", -1, False, end, end + updated))
        return ShardedStep(
            step_ns=self.clock + other,
            forward_ns=forward,
            compute_ns=self.computed - forward,
            hidden_ns=self.hidden,
            exposed_ns=self.exposed,
            other_ns=other,
            groups=self.groups,
            spans=tuple(sorted([*self.spans, *self.link.spans()], key=lambda one: (one.begin_ns, one.end_ns))),
        )


def simulate_zero_1(
    workload: ShardedWorkload, recorded: StepTimes, costs: ShardingCosts, ranks: int | None = None
) -> ShardedStep:
    """Predicts a step of DDP whose optimizer's state is sharded: torch's `ZeroRedundancyOptimizer`.

    Each rank updates whole parameters, and then sends them to the others.

    Args:
        workload: what a rank computes.
        recorded: the step of DDP.
        costs: of broadcasts.
        ranks: world size; None: as recorded.

    Raises:
        ValueError: the world size is below 1.
    """
    ranks = _world_size(workload, ranks)
    size = float(workload.sizes.sum())
    largest = np.zeros(ranks)  # torch gives the largest parameter that is left to the rank with the least
    for one in sorted(workload.sizes.tolist(), reverse=True):
        largest[largest.argmin()] += one
    sent = costs.over(ranks).broadcast.ns(size, len(workload.sizes))
    saved = workload.optimizer_ns * (1 - float(largest.max()) / size)
    return ShardedStep(
        step_ns=recorded.step_ns - saved + sent,
        forward_ns=recorded.forward_ns,
        compute_ns=recorded.compute_ns,
        hidden_ns=recorded.hidden_ns,
        exposed_ns=recorded.exposed_ns + sent,
        other_ns=recorded.other_ns - saved,
    )
