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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from .step_metrics import EDGES, Communication, Overlap, covered, edges, milliseconds
from .step_parts import SPANS

__all__ = ["ALL_REDUCE", "BACKWARD", "BACKWARD_UNSHARD", "BEFORE", "FORWARD", "FORWARD_UNSHARD", "KINDS", "REDUCE"]
__all__ += ["REDUCE_SCATTER", "DeviceCollectives", "DeviceWaits", "GroupedSteps", "LateGroup", "ModelCollectives"]
__all__ += ["NO_GROUPS", "Waits", "done_between", "grouped_steps", "late_groups", "missed_prefetches"]

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

    def prefetched(self) -> _Flags:
        """Which of them a rank met before it needed them."""
        return self.ahead

    def free_from(self) -> _Times:
        """From when on a rank computed after each: when it had waited for it, or when it had met it."""
        return np.where(self.wait_begin > 0, self.wait_begin + self.wait_ns, self.met)

    def first_ns(self, row: int, forward: int, backward: int) -> int:
        """When a step begins in a picture: with its forward, if that is known, else with its backward."""
        return forward or backward

    def waits(self, windows: Mapping[str, _Times], buckets: int, unknown: _Flags) -> Waits:
        """How long the rank waited for them.

        Args:
            windows: begin and end of each step's ``"forward"``, ``"backward"`` and ``"computation"`` of the backward,
                shape ``[steps, 2]``.
            buckets: number of parameter groups.
            unknown: shape ``[steps]``: of which steps not all of them are known.
        """
        steps, end = len(self.begin), self.wait_begin + self.wait_ns

        def waited(begin: _Times, end: _Times) -> _Values:
            return np.where(unknown, np.nan, _union(self.row, begin, end, (begin > 0) & (end > begin), steps))

        reducing = (self.kind >= REDUCE_SCATTER) & (self.group >= 0) & (self.group < buckets)
        of_reductions = np.zeros((steps, buckets))
        np.add.at(of_reductions, (self.row[reducing], self.group[reducing]), self.wait_ns[reducing])
        of_reductions[unknown] = np.nan
        in_flight = (
            np.concatenate([self.row, self.row]),
            np.concatenate([self.wait_begin, self.entered]),
            np.concatenate([end, self.ended]),
            np.concatenate([(self.wait_begin > 0) & (end > self.wait_begin), self.goes_on & (self.ended > 0)]),
        )
        return self._waits_type(
            exposed=waited(self.wait_begin, end),
            in_flight=_union(*in_flight, steps),
            in_forward=waited(*self._within(windows["forward"], self.kind == FORWARD_UNSHARD)),
            in_backward=waited(*self._within(windows["backward"], self.kind != FORWARD_UNSHARD)),
            in_computation=waited(*self._within(windows["computation"], self.kind != FORWARD_UNSHARD)),
            of_reductions=of_reductions,
            device_step=np.where((self.end > 0) & (self.begin > 0), (self.end - self.begin).astype(float), np.nan),
        )

    @property
    def _waits_type(self) -> type[Waits]:
        return Waits

    def _within(self, window: _Times, here: _Flags) -> tuple[_Times, _Times]:
        """Begin and end of the waits in a part of the steps; `here`: which collectives belong to that part."""
        low, high = window[self.row].T
        return np.clip(self.wait_begin, low, high), np.clip(self.wait_begin + self.wait_ns, low, high)

    def reductions(self, buckets: int) -> _Times:
        """Which of them are reductions whose times on a device are known; `buckets`: number of parameter groups."""
        return np.zeros(0, np.int64)


@dataclass(frozen=True)
class DeviceCollectives(ModelCollectives):
    """Collectives that a device runs: their times are those of its streams, and a rank is its stream that computes."""

    def prefetched(self) -> _Flags:
        """None: a device meets them when it needs them."""
        return np.zeros(len(self.ahead), bool)

    def free_from(self) -> _Times:
        """The same; after a reduction a device computes on, and waits before the next one."""
        later = self.kind >= REDUCE_SCATTER
        return np.where((self.wait_begin > 0) & ~later, self.wait_begin + self.wait_ns, self.met)

    def first_ns(self, row: int, forward: int, backward: int) -> int:
        """When a step begins in a picture: with what the device meets first."""
        return int(self.met[self.row == row].min(initial=np.iinfo(np.int64).max))

    @property
    def _waits_type(self) -> type[Waits]:
        return DeviceWaits

    def _within(self, window: _Times, here: _Flags) -> tuple[_Times, _Times]:
        """The same; the windows are the host's."""
        return np.where(here, self.wait_begin, 0), np.where(here, self.wait_begin + self.wait_ns, 0)

    def reductions(self, buckets: int) -> _Times:
        """All that have ended."""
        known = (self.group >= 0) & (self.group < buckets) & (self.ended > 0)
        return np.flatnonzero((self.kind >= REDUCE_SCATTER) & known)


def _union(row: _Times, begin: _Times, end: _Times, valid: _Flags, rows: int) -> _Values:
    """ns of each row in which at least one of its intervals is open."""
    row, begin, end = row[valid], begin[valid], end[valid]
    counts = np.bincount(row, minlength=rows)
    order = np.argsort(row, kind="stable")
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=0))
    table = np.zeros((3, rows, width), np.int64)
    for number, values in enumerate((begin, end, np.ones_like(row))):
        table[number, row[order], place] = values[order]
    return covered(table[0], table[1], table[2] > 0).astype(np.float64)


@dataclass(frozen=True)
class Waits(Communication):
    """How long a rank waited for collectives of a model whose parameters are sharded: ns, NaN where it is not known.

    Attributes:
        exposed: shape ``[steps]``: in the whole step.
        in_flight: same shape: how long a rank waited for at least one of them, or went on while one was running.
        in_forward, in_backward, in_computation: same shape: the part of `exposed` in the last forward, in the backward,
            and in the backward until all gradients were there.
        of_reductions: shape ``[steps, buckets]``: for the reduction of each.
        device_step: shape ``[steps]``: from the end of the step before to its own end, as the stream of a device comes
            to them.
    """

    tells_gradients: ClassVar[bool] = False
    _on_device: ClassVar[bool] = False

    exposed: _Values
    in_flight: _Values
    in_forward: _Values
    in_backward: _Values
    in_computation: _Values
    of_reductions: _Values
    device_step: _Values

    def of(self, row: int) -> Waits:
        """Those in one step, in one row."""
        return replace(self, **{name: values[row : row + 1] for name, values in vars(self).items()})

    def together(self, rows: Sequence[Communication | None], buckets: int) -> Waits:
        """The waits of some ranks in one step each, a row per rank, NaN where one has none."""
        made = {
            name: np.full((len(rows), *([buckets] * (values.ndim - 1))), np.nan) for name, values in vars(self).items()
        }
        for row, one in enumerate(rows):
            for name, values in vars(one).items() if one is not None else ():
                if values.ndim > 1:
                    made[name][row, : values.shape[1]] = values[0, :buckets]
                else:
                    made[name][row] = values[0]
        return replace(self, **made)

    def overlap(
        self, launched: _Times, reduced: _Times, device_begin: _Times, device_end: _Times, finalize: _Times
    ) -> Overlap:
        """What a rank waited for of reductions and of its communication, and what was overlapped: no reduction is."""
        took = milliseconds(reduced, launched)
        exposed = np.where(np.isnan(took), np.nan, self.of_reductions / 1e6)
        of_rank = self.exposed / 1e6
        hidden = np.where(np.isnan(exposed), np.nan, 0.0), np.maximum(self.in_flight / 1e6 - of_rank, 0.0)
        return Overlap(hidden[0], exposed, hidden[1], of_rank, np.full(len(of_rank), self._on_device))

    def edges(self, first: _Times, ready: _Times, launched: _Times, reduced: _Times, finalize: _Times) -> _Times:
        """The same; the rank waits at once."""
        made = edges(first, ready, launched, reduced, finalize)
        made[..., EDGES.index("exposed_from")] = launched
        return made

    def step_ms(self, ms: _Values) -> _Values:
        """The time of each step: that of a device whose stream waits, as far as it is known. The host may run ahead of
        it by several steps."""
        return np.where(np.isnan(self.device_step), ms, self.device_step / 1e6)

    def net_ms(self, part: str, ms: _Values) -> _Values:
        """The host's time of a part of each step without its waits in it."""
        waited = {
            "forward": self.in_forward,
            "compute": self.in_computation,
            "accumulation": self.exposed - self.in_forward - self.in_backward,
        }
        return np.maximum(ms - np.nan_to_num(waited[part]) / 1e6, 0.0) if part in waited else ms

    def backward_ms(self, columns: Mapping[str, _Values], whole_ms: _Values) -> _Values:
        """The same; a rank waits before the backward as well, and all of that is exposed."""
        before = np.nan_to_num(self.exposed - self.in_backward)
        return np.asarray(columns["backward_ms"] + np.maximum(before, 0.0) / 1e6)

    def unknown(self, exposed_ms: _Values) -> _Flags:
        """Steps of which not all waits are known."""
        return np.isnan(exposed_ms)


@dataclass(frozen=True)
class DeviceWaits(Waits):
    """The same where the stream of a device waits, and not the host."""

    _on_device: ClassVar[bool] = True

    def net_ms(self, part: str, ms: _Values) -> _Values:
        """The host's time: it does not wait."""
        return ms

    def backward_ms(self, columns: Mapping[str, _Values], whole_ms: _Values) -> _Values:
        """The same; while the stream waits, the host may work: what it does then has its own name."""
        work = sum(columns[f"{name}_ms"] for name in ("forward", "compute", *SPANS))
        idle = np.clip(whole_ms - work, 0.0, columns["exposed_ms"])
        return np.asarray(columns["compute_ms"] + idle)


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


NO_GROUPS: Final = GroupedSteps((), (), *np.zeros((2, len(KINDS), 0, 0, 0)))
"""Of a model without parameter groups."""


def grouped_steps(
    by_rank: Sequence[ModelCollectives], layout: Sequence[Mapping[str, Any]], step_ns: float
) -> GroupedSteps:
    """What each parameter group communicated.

    Args:
        by_rank: the same steps on each rank.
        layout: the parameter groups as they are described.
        step_ns: typical time of a step.
    """
    shape = (len(KINDS), len(by_rank), len(by_rank[0].begin) if by_rank else 0, len(layout))
    took, exposed = np.zeros(shape), np.zeros(shape)
    for rank, one in enumerate(by_rank):
        known = (one.group >= 0) & (one.group < len(layout))
        at = (one.kind[known], one.row[known], one.group[known])
        np.add.at(took[:, rank], at, np.maximum(one.ended[known] - one.entered[known], 0).astype(np.float64))
        np.add.at(exposed[:, rank], at, np.where(one.told[known], one.wait_ns[known].astype(np.float64), np.nan))
    lasted = [(one.end - one.begin)[(one.end > 0) & (one.begin > 0)] for one in by_rank]
    on_device = float(np.median(np.concatenate(lasted))) if any(map(len, lasted)) else 0.0
    late = late_groups(by_rank, layout, on_device or step_ns)
    names, sizes = [str(one.get("name", "?")) for one in layout], [int(one.get("unsharded_bytes", 0)) for one in layout]
    missed = missed_prefetches(by_rank[0], layout) if on_device else []
    return GroupedSteps(names, sizes, took, exposed, late, missed, on_device)


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
    free = np.maximum.accumulate(one.free_from()[rows])
    spans = zip(_places(order, layout)[1:], free[:-1].tolist(), one.met[rows[1:]].tolist(), strict=True)
    return [(phase, group, begin, end) for (phase, group), begin, end in spans]


_Order = tuple[tuple[int, int, bool], ...]  # kind, group and whether it was prefetched, of each collective


def _orders(one: ModelCollectives) -> list[_Order]:
    found: list[list[tuple[int, int, bool]]] = [[] for _ in one.begin]
    columns = (one.row, one.kind, one.group, one.prefetched())
    for row, *what in zip(*(values.tolist() for values in columns), strict=True):
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
