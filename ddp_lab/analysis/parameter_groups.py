"""Steps of a model with `fully_shard` or `replicate`: what its parameter groups communicated, and which rank was late.

[Note: late in a parameter group]
Ranks meet in each collective of each group, so that all of them take equally long, and the last one to enter has often
only waited for another one before. So it counts what a rank did by itself between two collectives: the time from
entering one to entering the next, without its waits for collectives. Ranks do the same there, in the same order; the
rank that takes longer than all others is late, and the collective before tells where: after an all-gather the forward
of that group runs, before a reduction the backward of its group. Only what comes back in most steps counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["ALL_REDUCE", "BACKWARD", "BACKWARD_UNSHARD", "BEFORE", "FORWARD", "FORWARD_UNSHARD", "KINDS", "REDUCE"]
__all__ += ["REDUCE_SCATTER", "GroupedSteps", "LateGroup", "ModelCollectives", "done_between", "late_groups"]
__all__ += ["missed_prefetches"]

_Times = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

KINDS: Final = ("forward_unshard", "backward_unshard", "reduce_scatter", "all_reduce")
"""What a parameter group communicates in a step."""
FORWARD_UNSHARD, BACKWARD_UNSHARD, REDUCE_SCATTER, ALL_REDUCE = range(len(KINDS))
BEFORE, FORWARD, BACKWARD, REDUCE = "before the forward", "forward", "backward", "reduction"
_LEAST_NS, _LEAST_SHARE_OF_STEP = 1e6, 0.01
_MOSTLY, _FEWEST = 0.7, 5  # share of the steps, and number of steps


@dataclass(frozen=True)
class ModelCollectives:
    """The collectives of one model on one rank that lie in some steps, in the order of `met`.

    Attributes:
        on_device: whether a device runs them: times are those of its streams then.
        begin, end: shape ``[steps]``: ns at which the rank began each step, and on a device at which it had ended it; 0
            where unknown.
        row: of the step.
        group: number of the parameter group.
        kind: place in `KINDS`.
        ahead: whether it was prefetched.
        goes_on: whether the rank goes on while it runs.
        bytes: of its input or output, whichever is more.
        entered, ended: ns; 0 if it has not ended. It lasts until the thread that waits for it goes on.
        met: when the rank had come so far in its own work: when it entered it, or on a device when it needed it.
        wait_begin, wait_ns: when the rank began to wait for it, and how long; 0 where it did not.
        told: whether that is known.
    """

    on_device: bool
    begin: _Times
    end: _Times
    row: _Times
    group: _Times
    kind: _Times
    ahead: _Flags
    goes_on: _Flags
    bytes: _Times
    entered: _Times
    ended: _Times
    met: _Times
    wait_begin: _Times
    wait_ns: _Times
    told: _Flags


@dataclass(frozen=True)
class LateGroup:
    """A rank that takes longer than all others in one parameter group.

    Attributes:
        rank: position of the rank.
        group: number of the group; -1 before the first one.
        phase: `BEFORE`, `FORWARD`, `BACKWARD` or `REDUCE`.
        delay_ns: by how much, median over the steps in which it does.
        share: of the steps in which it does.
    """

    rank: int
    group: int
    phase: str
    delay_ns: float
    share: float


@dataclass(frozen=True)
class GroupedSteps:
    """Analysed steps by parameter group.

    Attributes:
        names: of the modules.
        sizes: bytes of the whole parameters.
        took, exposed: ns of each of `KINDS`: shape ``[kinds, ranks, steps, groups]``; `exposed` is NaN where unknown.
        late: where ranks are late, the longest delay first.
        missed: groups whose prefetch misses the next one, see `missed_prefetches`.
        device_step_ns: typical time of a step on devices; 0 on the CPU, or if it is not known.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    took: _Values
    exposed: _Values
    late: Sequence[LateGroup] = ()
    missed: Sequence[tuple[int, Sequence[int], int]] = ()
    device_step_ns: float = 0.0

    @property
    def made_by(self) -> str:
        """The function of torch that made the groups: "fully_shard", or "replicate", which gathers nothing."""
        return "fully_shard" if self.took[[FORWARD_UNSHARD, BACKWARD_UNSHARD]].any() else "replicate"

    def typical(self, values: _Values) -> _Values:
        """Medians over the steps of the least over the ranks, without waits for a late rank: ``[kinds, groups]``."""
        return np.asarray(np.median(values.min(axis=1), axis=1))


def late_groups(
    by_rank: Sequence[ModelCollectives], layout: Sequence[Mapping[str, Any]], step_ns: float
) -> list[LateGroup]:
    """Where ranks are late, see [Note: late in a parameter group]; the longest delay first.

    Args:
        by_rank: the same steps on each rank.
        layout: the parameter groups as they are described.
        step_ns: typical time of a step.
    """
    if len(by_rank) < 2 or not len(by_rank[0].begin):
        return []
    own = [_own_times(one) for one in by_rank]
    orders = [_orders(one) for one in by_rank]
    counted = Counter(order for of_rank in orders for order in of_rank if order)
    if not counted:
        return []
    usual = counted.most_common(1)[0][0]
    unknown = sum(np.bincount(one.row[~one.told], minlength=len(one.begin)) for one in by_rank)
    steps = [row for row in np.flatnonzero(unknown == 0).tolist() if all(one[row] == usual for one in orders)]
    if len(steps) < _FEWEST:
        return []
    times = np.stack(
        [np.stack([mine[one.row == step] for step in steps]) for mine, one in zip(own, by_rank, strict=True)]
    )
    ordered = np.sort(times, axis=0)
    slowest, excess = times.argmax(axis=0), ordered[-1] - ordered[-2]
    least = max(_LEAST_NS, _LEAST_SHARE_OF_STEP * step_ns)
    made = []
    for place, (phase, group) in enumerate(_places(usual, layout)):
        for rank in range(len(by_rank)):
            hit = (slowest[:, place] == rank) & (excess[:, place] >= least)
            if hit.mean() >= _MOSTLY:
                made.append(LateGroup(rank, group, phase, float(np.median(excess[hit, place])), float(hit.mean())))
    return sorted(made, key=lambda one: -one.delay_ns * one.share)


def missed_prefetches(
    one: ModelCollectives, layout: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Sequence[int], int]]:
    """Groups that prefetch others in the forward, but not the one that a device needs next.

    Args:
        one: the collectives of a rank; those of a device are in the order in which it needs them.
        layout: the parameter groups as they are described.

    Returns:
        The group, the groups that it prefetches, and the one that comes next, in the last step.
    """
    gathers = (one.kind == FORWARD_UNSHARD) & (one.row == len(one.begin) - 1)
    order, ahead = one.group[gathers].tolist(), one.ahead[gathers].tolist()
    made: list[tuple[int, Sequence[int], int]] = []
    for (group, _), (then, was_ahead) in pairwise(zip(order, ahead, strict=True)):
        announced = tuple(layout[group].get("forward_prefetch", ())) if 0 <= group < len(layout) else ()
        if announced and not was_ahead and then not in announced:
            made.append((group, announced, then))
    return made


def done_between(
    one: ModelCollectives, rows: _Times, layout: Sequence[Mapping[str, Any]]
) -> list[tuple[str, int, int, int]]:
    """What a rank did between collectives of one step: phase, group, and from when to when in ns.

    Args:
        one: the collectives of a rank.
        rows: which of them, of one step.
        layout: the parameter groups as they are described.
    """
    order = _orders(one)[int(one.row[rows[0]])] if len(rows) else ()
    later = one.on_device & (one.kind >= REDUCE_SCATTER)  # it goes on, and waits before the next reduction
    free = np.where((one.wait_begin > 0) & ~later, one.wait_begin + one.wait_ns, one.met)
    free = np.maximum.accumulate(free[rows])
    spans = zip(_places(order, layout)[1:], free[:-1].tolist(), one.met[rows[1:]].tolist(), strict=True)
    return [(phase, group, begin, end) for (phase, group), begin, end in spans]


_Order = tuple[tuple[int, int, bool], ...]  # kind, group and whether it was prefetched, of each collective


def _orders(one: ModelCollectives) -> list[_Order]:
    found: list[list[tuple[int, int, bool]]] = [[] for _ in one.begin]
    ahead = one.ahead & ~np.array(one.on_device)  # a device meets it when it needs it
    for row, *what in zip(*(values.tolist() for values in (one.row, one.kind, one.group, ahead)), strict=True):
        found[row].append(tuple(what))
    return [tuple(order) for order in found]


def _own_times(one: ModelCollectives) -> _Times:
    """ns that the rank spent by itself before it met each collective, since it met the one before."""
    ends = one.wait_begin + one.wait_ns
    waited = one.wait_begin > 0
    order = np.argsort(ends[waited], kind="stable")
    ends, total = ends[waited][order], np.concatenate([[0], np.cumsum(one.wait_ns[waited][order])])

    def by_itself(at: _Times) -> _Times:
        return np.asarray(at - total[np.searchsorted(ends, at, side="right")])

    here = by_itself(one.met)
    before = np.concatenate([here[:1], here[:-1]])
    first = np.diff(one.row, prepend=-1) != 0
    begin = one.begin[one.row]
    return np.where(first, np.where(begin > 0, here - by_itself(begin), 0), here - before)


def _places(order: _Order, layout: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Phase and group of what a rank does before each collective of a step."""
    issuers = {target: number for number, one in enumerate(layout) for target in one.get("forward_prefetch", ())}
    made: list[tuple[str, int]] = []
    for place, (kind, group, _ahead) in enumerate(order):
        before = order[place - 1] if place else None
        if kind == ALL_REDUCE and before is not None and before[:2] == (REDUCE_SCATTER, group):
            made.append((REDUCE, group))
        elif kind in (REDUCE_SCATTER, ALL_REDUCE):
            made.append((BACKWARD, group))
        elif before is None:
            made.append((BEFORE, -1))
        elif before[0] == FORWARD_UNSHARD:
            made.append((FORWARD, issuers.get(before[1], before[1]) if before[2] else before[1]))
        elif kind == FORWARD_UNSHARD:
            made.append((FORWARD, group))
        else:  # for the group whose backward begins, or ahead of it for another one: that begins which is reduced next
            reduced = (other for what, other, _ in order[place:] if what in (REDUCE_SCATTER, ALL_REDUCE))
            made.append((BACKWARD, next(reduced, group)))
    return made
