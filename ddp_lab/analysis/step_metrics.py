"""The definitions of all step times that tables, views and reports show, each in one place.

Pure functions on arrays. Times are nanoseconds on one axis, 0 where it has not happened; results that end in ``_ms``
are milliseconds, NaN where one of both ends is missing.

A bucket's collective runs from its launch to its reduction. The part that lies before the end of the rank's own
backward computation (event kind ``finalize_begin``) is *hidden* (overlapped): it costs nothing. The rest is *exposed*:
the rank only waits. Buckets exist to overlap the two; Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (VLDB 2020), section 5.1 and figure 6, measure the same split by running
without communication. Here it follows from the events of one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .step_parts import SPANS

__all__ = [
    "BESIDE",
    "BREAKDOWN",
    "EDGES",
    "PHASES",
    "Breakdown",
    "Communication",
    "GradientSync",
    "Overlap",
    "alone",
    "breakdown",
    "bus_factor",
    "covered",
    "edges",
]
__all__ += [
    "TypicalStep",
    "gradient_sync",
    "mean",
    "means_by_step",
    "median",
    "milliseconds",
    "on_device",
    "overlap_of",
    "split",
    "together",
]
__all__ += ["typical", "typical_parts", "usual_steps", "waits"]

_Times = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_Number = TypeVar("_Number", np.int64, np.float64)

EDGES = ("first_ready", "ready", "launched", "all_launched", "reduced", "exposed_from")
"""Last axis of `edges`: filling, queued, waiting, reducing lie between neighbours, exposed from the last to reduced."""
PHASES = ("other", "data", "optimizer", "accumulation", "forward", "alone", "hidden", "exposed")
"""The parts of a step in the order in which they are stacked: fields of `Breakdown`."""
BREAKDOWN = ("step_ms", "forward_ms", "compute_ms", "hidden_ms", "exposed_ms", *(f"{name}_ms" for name in SPANS))
"""The columns of `Timeline.steps` that `breakdown` needs."""


def milliseconds(end: _Times, begin: _Times) -> _Values:
    """From one time to another, NaN where one of them is missing."""
    return np.where((end > 0) & (begin > 0), (end - begin) / 1e6, np.nan)


def median(values: _Values) -> _Values:
    """Median over the last axis of what is known, NaN where nothing is (a tenth of the time of ``numpy.nanmedian``)."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    ordered, known = np.sort(values, axis=-1), (~np.isnan(values)).sum(axis=-1, keepdims=True)
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, values.shape[-1] - 1)
    pair = np.take_along_axis(ordered, low, -1) + np.take_along_axis(ordered, high, -1)
    return np.asarray(pair[..., 0] / 2)


def typical(step: _Times, values: _Values) -> float:
    """The median over the steps of each step's mean over its ranks; NaN if nothing is known.

    Means over the ranks, because those of the parts add up to that of the step.

    Args:
        step, values: shape ``[rows]``, a row for each rank and step; NaN where a value is unknown.
    """
    return float(median(means_by_step(step, values)[1]))


def means_by_step(step: _Times, values: _Values) -> tuple[_Times, _Values]:
    """Each step's number, ascending, and the mean over its ranks of what is known; NaN where nothing is.

    Args:
        step, values: shape ``[rows]``, a row for each rank and step; NaN where a value is unknown.
    """
    numbers, place = np.unique(step, return_inverse=True)
    known = np.isfinite(values)
    counts = np.bincount(place[known], minlength=len(numbers))
    sums = np.bincount(place[known], values[known], len(numbers))
    return numbers, np.divide(sums, counts, out=np.full(len(numbers), np.nan), where=counts > 0)


def mean(values: _Values) -> _Values:
    """Mean over the last axis of what is known, NaN where nothing is."""
    known = (~np.isnan(values)).sum(axis=-1)
    return np.where(known > 0, np.nansum(values, axis=-1) / np.maximum(known, 1), np.nan)


def split(launched: _Times, reduced: _Times, compute_end: _Times) -> tuple[_Times, _Times]:
    """Splits collectives into their hidden (overlapped) and exposed parts.

    Args:
        launched: begin of each collective.
        reduced: its end, same shape, not before its begin.
        compute_end: end of the rank's backward computation; broadcast to that shape.

    Returns:
        Hidden and exposed nanoseconds, both ≥ 0; their sum is ``reduced - launched``.
    """
    boundary = np.clip(compute_end, launched, reduced)
    return boundary - launched, reduced - boundary


def covered(begin: npt.NDArray[_Number], end: npt.NDArray[_Number], valid: _Flags) -> npt.NDArray[_Number]:
    """Time during which at least one interval of a row is open (overlapping intervals count once).

    Args:
        begin: shape ``[rows, intervals]``.
        end: same shape.
        valid: same shape; the intervals that count.

    Returns:
        Nanoseconds, shape ``[rows]``; 0 for a row without valid intervals.
    """
    if begin.shape[1] == 0:
        return np.zeros(len(begin), begin.dtype)
    latest = np.iinfo(np.int64).max
    start = np.where(valid, begin, latest)
    stop = np.where(valid, np.maximum(end, begin), latest)
    order = np.argsort(start, axis=1, kind="stable")
    start, stop = np.take_along_axis(start, order, 1), np.take_along_axis(stop, order, 1)
    before = np.maximum.accumulate(stop, axis=1)[:, :-1]  # end of everything that began earlier
    start[:, 1:] = np.maximum(start[:, 1:], before)
    # Invalid intervals are at `latest` on both sides: they add nothing.
    return np.asarray(np.maximum(stop - start, 0).sum(axis=1))


def algorithm_bandwidth(size: npt.NDArray[np.int64], duration: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes of a buffer over the time its collective took, in GB/s (10⁹ bytes); NaN where no time passed.

    This is what the caller of an all-reduce gets ("algbw" in nccl-tests), not the traffic of each link, which is
    2 (n − 1) / n times as much for a ring of n ranks.
    """
    speed = np.full(np.broadcast(size, duration).shape, np.nan)
    np.divide(size, duration, out=speed, where=np.asarray(duration) > 0)
    return speed


@dataclass(frozen=True)
class Overlap:
    """Communication during and after a rank's own computation; a row is one step of one rank.

    Attributes:
        hidden_ms, exposed_ms: shape ``[rows, buckets]``, the parts of each collective before and after the end of
            that computation.
        rank_hidden_ms, rank_exposed_ms: shape ``[rows]``, how long at least one collective was in flight before and
            after the end of that computation.
        on_device: shape ``[rows]``, whether these are device times.
    """

    hidden_ms: _Values
    exposed_ms: _Values
    rank_hidden_ms: _Values
    rank_exposed_ms: _Values
    on_device: _Flags

    @property
    def clock(self) -> npt.NDArray[np.str_]:
        """Whose times these are: ``"host"`` or ``"device"``, shape ``[rows]``."""
        return np.where(self.on_device, "device", "host")

    @property
    def hidden_share(self) -> float:
        """The hidden share of the communication, over all rows; NaN without communication."""
        hidden, exposed = float(np.nansum(self.rank_hidden_ms)), float(np.nansum(self.rank_exposed_ms))
        return hidden / (hidden + exposed) if hidden + exposed > 0 else float("nan")


def on_device(launched: _Times, device_end: _Times) -> _Flags:
    """Which rows have device spans for all of their launched buckets; both of shape ``[rows, buckets]``."""
    return np.asarray((launched > 0).any(axis=1) & ((device_end > 0) | (launched == 0)).all(axis=1))


def overlap_of(
    launched: _Times, reduced: _Times, device_begin: _Times, device_end: _Times, finalize: _Times
) -> Overlap:
    """Splits collectives where the rank's own computation ends.

    [Note: the clock of hidden and exposed] On a CPU these are host times. With device spans for all buckets of a
    step they are device times: a span begins when the compute stream has reached the launch, so the last begin is
    where the backward's own computation on the device is over.

    Args:
        launched, reduced, device_begin, device_end: of each bucket's collective, shape ``[rows, buckets]``.
        finalize: end of the rank's own computation on the host, shape ``[rows]``.
    """
    timed = on_device(launched, device_end)
    device = timed[:, None]
    begin, end = np.where(device, device_begin, launched), np.where(device, device_end, reduced)
    computed = np.where(device, begin.max(axis=1, keepdims=True, initial=0), finalize[:, None])
    valid = (begin > 0) & (end > 0) & (computed > 0)
    hidden, exposed = split(begin, np.maximum(begin, end), computed)
    hidden_end, exposed_begin = np.minimum(end, computed), np.maximum(begin, computed)
    # The pieces of a union don't depend on each other: hidden + exposed is the union of the whole.
    under = covered(begin, hidden_end, valid & (hidden_end > begin))
    after = covered(exposed_begin, end, valid & (end > exposed_begin))
    some = valid.any(axis=1)
    by_bucket = [np.where(valid, values / 1e6, np.nan) for values in (hidden, exposed)]
    by_row = [np.where(some, values / 1e6, np.nan) for values in (under, after)]
    return Overlap(by_bucket[0], by_bucket[1], by_row[0], by_row[1], timed)


class Communication:
    """How collectives and computation share the times of some steps: here beside each other, as of the buckets of a
    DistributedDataParallel, which a rank waits for at the end of its backward alone.

    Times are in ms where a name ends in ``ms``, else in ns; rows are steps of a rank, or ranks of a step.
    """

    tells_gradients: ClassVar[bool] = True
    """Whether ranks record when each gradient is there."""

    def of(self, row: int) -> Communication:
        """The same of one row."""
        return self

    def together(self, rows: Sequence[Communication | None], buckets: int) -> Communication:
        """The same of several with one row each, None where a rank has none; `buckets`: the width of the result."""
        return self

    def overlap(
        self, launched: _Times, reduced: _Times, device_begin: _Times, device_end: _Times, finalize: _Times
    ) -> Overlap:
        """Which part of it is overlapped and exposed; arguments as of `overlap_of`."""
        return overlap_of(launched, reduced, device_begin, device_end, finalize)

    def edges(self, first: _Times, ready: _Times, launched: _Times, reduced: _Times, finalize: _Times) -> _Times:
        """The edges between the parts of each bucket's time in a step; arguments and result as of `edges`."""
        return edges(first, ready, launched, reduced, finalize)

    def step_ms(self, ms: _Values) -> _Values:
        """The time of each row's step, from that of the host."""
        return ms

    def net_ms(self, part: str, ms: _Values) -> _Values:
        """The host's time of a part of each step, e.g. of its forward, without waits in it."""
        return ms

    def backward_ms(self, columns: Mapping[str, _Values], whole_ms: _Values) -> _Values:
        """From the begin of the backward to its end, with everything that is exposed.

        Args:
            columns: of `Timeline.steps`.
            whole_ms: the host's time of the step.
        """
        return columns["backward_ms"]

    def unknown(self, exposed_ms: _Values) -> _Flags:
        """Of which rows it is not known how long a rank waited, e.g. because their collectives are no longer kept."""
        return np.zeros(len(exposed_ms), bool)


BESIDE: Final = Communication()
"""That of buckets, of which a rank records all times."""


def together(rows: Sequence[Communication | None], buckets: int) -> Communication:
    """The communication of several rows: `Communication.together`."""
    first = next((one for one in rows if one is not None), BESIDE)
    return first.together(rows, buckets)


@dataclass(frozen=True)
class GradientSync:
    """The gradient synchronisation by collective: shape ``[collectives]``.

    Attributes:
        last: position of the rank that launched last, -1 where a rank's launch is missing.
        wait_ms: shape ``[ranks, collectives]``, how long each rank's launched collective waited for the last rank's.
        late_ms: how long the first rank waited for the last one.
        alone_ms: how long all others waited for the last rank; NaN for a single rank.
        all_reduce_ms: from the last rank's launch until it is reduced on every rank.
        bandwidth_gb_s: its bytes divided by `all_reduce_ms`, in 1e9 bytes per second.
    """

    last: _Times
    wait_ms: _Values
    late_ms: _Values
    alone_ms: _Values
    all_reduce_ms: _Values
    bandwidth_gb_s: _Values


def waits(launched: _Times) -> _Times:
    """How long each rank's launched collective waited for the last rank's launch.

    Args:
        launched: launch times, shape ``[..., ranks]``, none missing.

    Returns:
        Same shape; 0 for the last rank.
    """
    return np.asarray(launched.max(axis=-1, keepdims=True) - launched)


def alone(launched: _Times) -> _Values:
    """How long all other ranks waited for the last one alone: from the last launch but one to the last.

    Args:
        launched: launch times, shape ``[..., ranks]``, none missing.

    Returns:
        ns, shape ``[...]``; NaN for a single rank.
    """
    if launched.shape[-1] < 2:
        return np.full(launched.shape[:-1], np.nan)
    ordered = np.sort(launched, axis=-1)
    return np.asarray((ordered[..., -1] - ordered[..., -2]).astype(np.float64))


def gradient_sync(launched: _Times, reduced: _Times, size: _Times) -> GradientSync:
    """Returns which rank waited for which, and how long the collectives took.

    Args:
        launched, reduced: shape ``[ranks, collectives]``.
        size: bytes of each, shape ``[collectives]``, -1 where unknown.
    """
    whole, done = (launched > 0).all(axis=0), (reduced > 0).all(axis=0)
    if not len(launched):
        whole = done = np.zeros(len(size), bool)
        launched = reduced = np.zeros((1, len(size)), np.int64)
    last = launched.max(axis=0)
    waited = np.where(whole, waits(launched.T).T / 1e6, np.nan)
    duration = np.where(whole & done, reduced.max(axis=0) - last, -1)
    return GradientSync(
        last=np.where(whole, launched.argmax(axis=0), -1),
        wait_ms=waited,
        late_ms=waited.max(axis=0),
        alone_ms=np.where(whole, alone(launched.T) / 1e6, np.nan),
        all_reduce_ms=np.where(duration >= 0, duration / 1e6, np.nan),
        bandwidth_gb_s=algorithm_bandwidth(size, np.where(size >= 0, duration, -1)),
    )


def bus_factor(ranks: int) -> float:
    """How many times its buffer a ring of so many ranks moves over each link: bus over algorithm bandwidth."""
    return 2 * (ranks - 1) / ranks if ranks > 1 else float("nan")


@dataclass(frozen=True)
class Breakdown:
    """The time breakdown of each step: milliseconds, means over the ranks, shape ``[steps]``.

    Attributes:
        step: numbers of the steps.
        other: everything else since the end of the previous step; `step_parts` names its parts.
        data, optimizer: data loading, and the optimizers' steps.
        accumulation: forwards before the last one, with their backwards that only accumulate gradients.
        forward: the last forward before the backward.
        alone, hidden: the backward's computation without and with collectives in flight.
        exposed: communication after the backward's computation.
        measured: since the end of the previous step; NaN where that is not known, and then `other` is not either.
        overlapped: as `hidden`, but where a device times the collectives, by its clock: may be longer than the host
            computes.
    """

    step: _Times
    other: _Values
    data: _Values
    optimizer: _Values
    accumulation: _Values
    forward: _Values
    alone: _Values
    hidden: _Values
    exposed: _Values
    measured: _Values
    overlapped: _Values

    @property
    def total(self) -> _Values:
        """Milliseconds of the step."""
        return self.floor + self.exposed

    @property
    def floor(self) -> _Values:
        """The no-communication baseline: the step without exposed communication."""
        spans = self.data + self.optimizer + self.accumulation
        return self.other + spans + self.forward + self.alone + self.hidden

    @property
    def efficiency(self) -> _Values:
        """The baseline's share of the step, 0 to 1; NaN for a step that takes no time."""
        share = np.full(len(self.total), np.nan)
        np.divide(self.floor, self.total, out=share, where=self.total > 0)
        return share


def breakdown(number: _Times, by_rank: Mapping[str, _Values]) -> Breakdown:
    """Returns the time breakdown of steps.

    Args:
        number: of each step.
        by_rank: the columns `BREAKDOWN` of `Timeline.steps`, shape ``[steps, ranks]``, NaN where unknown.
    """
    # Each rank's own: a device times collectives on another clock than the host its computation.
    own = np.minimum(by_rank["hidden_ms"], by_rank["compute_ms"])
    measured, *told = mean(np.stack([by_rank[name] for name in BREAKDOWN]))
    forward, compute, overlapped, exposed, data, optimizer, accumulation = np.nan_to_num(told)
    hidden = np.nan_to_num(mean(own))
    spans = data + optimizer + accumulation
    other = np.maximum(np.nan_to_num(measured) - (forward + compute + exposed + spans), 0.0)
    alone = np.maximum(compute - hidden, 0.0)
    return Breakdown(
        number, other, data, optimizer, accumulation, forward, alone, hidden, exposed, measured, overlapped
    )


@dataclass(frozen=True)
class TypicalStep:
    """A typical one of some steps: as long as their median, divided as the half of them that are nearest to it.

    Medians of the parts would not add up to the step.

    Attributes:
        steps: their numbers, ascending.
        usual: the numbers of that half.
        factor: the median step over the mean of that half.
        parts_ms: the parts that `PHASES` names, shape ``[phases]``.
        ranks: the ranks of the rows of `by_rank_ms`; none if exposed communication is not known.
        by_rank_ms: the parts on each rank, shape ``[ranks, phases]``.
        overlapped_ms: collectives in flight during the backward's computation, by the clock that times them.
        is_whole: whether the end of a previous step is known; if not, these are a forward and a backward alone.
    """

    steps: _Times
    usual: _Times
    factor: float
    parts_ms: _Values
    ranks: tuple[int, ...]
    by_rank_ms: _Values
    overlapped_ms: float
    is_whole: bool

    @property
    def total_ms(self) -> float:
        """The step."""
        return float(self.parts_ms.sum())

    def ms(self, *parts: str) -> float:
        """These of the parts that `PHASES` names, together."""
        return float(sum(self.parts_ms[PHASES.index(part)] for part in parts))

    def of(self, step: _Times, values: _Values) -> float:
        """What adds up to a part of this step, for example each bucket's exposed communication.

        Args:
            step, values: shape ``[rows]``, a row for each rank and step; NaN where a value is unknown.
        """
        chosen = np.isin(step, self.usual)
        return self.factor * float(mean(means_by_step(step[chosen], values[chosen])[1]))

    def named(self) -> list[tuple[str, float]]:
        """The names of the parts that add up to the step, and their milliseconds; those of the backward together."""
        computed = self.ms("alone", "hidden")
        told = {"data loading": "data", "gradient accumulation": "accumulation", "forward": "forward"}
        after = {"exposed communication": "exposed", "optimizer": "optimizer", "everything else": "other"}
        parts = [{name: self.ms(part) for name, part in some.items()} for some in (told, after)]
        return [*parts[0].items(), ("backward computation", computed), *parts[1].items()]

    @property
    def overlapped_share(self) -> float:
        """The share of the communication that is overlapped, 0 to 1; NaN without communication."""
        return self.overlapped_ms / self.in_flight_ms if self.in_flight_ms > 0 else float("nan")

    @property
    def in_flight_ms(self) -> float:
        """During which at least one collective is in flight."""
        return self.overlapped_ms + self.ms("exposed")


def usual_steps(found: Breakdown) -> tuple[_Flags, float]:
    """Which of these steps are as long as most: the half that is nearest to the median; and the median over their mean.

    Returns:
        Shape ``[steps]``, only whole steps if there are some; the factor is 1 without steps.
    """
    known = np.isfinite(found.measured)
    totals = np.where(known, found.measured, found.total)
    chosen = known if known.any() else np.ones(len(known), bool)
    if not chosen.any():
        return chosen, 1.0
    middle = float(np.median(totals[chosen]))
    away = np.abs(totals - middle)
    usual = chosen & (away <= np.median(away[chosen]))
    mean_ms = float(found.total[usual].mean())
    return usual, middle / mean_ms if mean_ms > 0 else 1.0


def typical_parts(found: Breakdown) -> _Values:
    """The parts of a typical one of these steps: ms, shape ``[phases]`` in the order of `PHASES`; NaN without steps."""
    usual, factor = usual_steps(found)
    parts = [getattr(found, name)[usual] for name in PHASES]
    return np.array([factor * part.mean() if part.size else np.nan for part in parts])


def edges(first: _Times, ready: _Times, launched: _Times, reduced: _Times, finalize: _Times) -> _Times:
    """Returns the edges between the parts of each bucket's time in one step.

    Args:
        first, ready, launched, reduced: when its first gradient was ready, it was ready, and so on: shape
            ``[ranks, buckets]``.
        finalize: end of the rank's own computation, shape ``[ranks]``.

    Returns:
        Shape ``[ranks, buckets, len(EDGES)]``, 0 where it has not happened.
    """
    last = np.where((launched > 0).all(axis=0), launched.max(axis=0, initial=0), 0)
    turn = np.where(reduced > 0, np.minimum(np.where(last > 0, last, reduced), reduced), last)
    exposed = np.where(finalize[:, None] > 0, np.maximum(launched, finalize[:, None]), 0)
    known = launched > 0
    parts = (np.where(first > 0, first, ready), ready, launched, turn * known, reduced, exposed * known)
    return np.stack(parts, axis=-1)
