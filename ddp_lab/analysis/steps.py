"""Steps that all ranks have completed, with aligned times; and a replay of the same steps with changes.

The replay estimates how long they would take if gradients were ready, or collectives ran, at other times.

[Note: the replay]
Buckets are launched in order, and a collective runs when all ranks have launched it and the previous one is complete.
So its own time is the time from the later of both to its end. With these times the replay of unchanged readiness ends
exactly when the recorded collectives ended; a change (a bucket ready earlier, a smaller bucket) moves everything that
depends on it. The times of collectives of other sizes come from a straight line through the recorded ones. `simulate`
answers other questions: it simulates links, world sizes and hooks that were never recorded, with models of them and
one typical step. The replay has no model of the link and uses every recorded step, so that it can estimate the cost of
a rank that is late only in some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from .step_metrics import mean, median

__all__ = ["SLOWEST_COPY", "DeviceSteps", "Line", "Replay", "Steps", "fit_line"]

_Times = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]

SLOWEST_COPY: Final = 1.0  # ns per byte: a rank that is descheduled meanwhile seems to copy more slowly
_ASSUMED_START = 0.2  # assumed share of the fixed overhead in a collective's time if all sizes are equal


@dataclass(frozen=True)
class Steps:
    """Times in ns on the hosts' axis, 0 where it has not happened.

    Attributes:
        ranks: the ranks, in the order of the first axis.
        step: shape ``[steps]``, ascending.
        before: shape ``[ranks, steps]``: the end of the previous step.
        forward_begin, forward_end, begin, finalize, end: shape ``[ranks, steps]``: of the last forward before the
            backward, of the backward, of its own computation, of the whole.
        gradients: shape ``[ranks, steps, parameters]``: when each gradient was accumulated.
        ready, launched, reduced: shape ``[ranks, steps, buckets]``.
    """

    tells_gradients: ClassVar[bool] = True
    """Whether it is known when each single gradient was there, and how long copying it took."""

    ranks: tuple[int, ...]
    step: _Times
    before: _Times
    forward_begin: _Times
    forward_end: _Times
    begin: _Times
    finalize: _Times
    end: _Times
    gradients: _Times
    ready: _Times
    launched: _Times
    reduced: _Times

    def __len__(self) -> int:
        return len(self.step)

    def forward_ns(self) -> npt.NDArray[np.float64]:
        """How long each forward took, shape ``[ranks, steps]``; NaN where unknown."""
        known = (self.forward_begin > 0) & (self.forward_end > 0)
        return np.where(known, (self.forward_end - self.forward_begin).astype(np.float64), np.nan)

    def step_ns(self) -> npt.NDArray[np.float64]:
        """Time since the end of the previous step, shape ``[ranks, steps]``; NaN if that is unknown."""
        return np.where(self.before > 0, (self.end - self.before).astype(np.float64), np.nan)

    def typical_ns(self) -> float:
        """The median over the steps of their means over the ranks (see `step_metrics.typical`); of the backwards if no
        end of a previous step is known."""
        whole = self.step_ns()
        if not np.isfinite(whole).any():
            whole = (self.end - self.begin).astype(np.float64)
        return float(median(mean(whole.T))) if len(self) else 0.0

    def places(self) -> _Times:
        """Where a rank may fall behind: when each gradient was there, shape ``[ranks, steps, places]``."""
        return self.gradients

    def place(self, number: int, buckets: Sequence[Sequence[int]]) -> tuple[int | None, int | None]:
        """The bucket and the parameter of one of `places`."""
        return next((bucket for bucket, members in enumerate(buckets) if number in members), None), number

    def moments(self, zero: _Times, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> _Values:
        """When each gradient was ready, in ns since `zero`, shape ``[ranks, steps, parameters]``; one that never came
        is ready when the backward begins.

        Args:
            zero: shape ``[steps]``.
            buckets: parameters by bucket.
            sizes: bytes by parameter.
        """
        known = self._gradients_of(len(sizes))
        begin = (self.begin - zero)[:, :, None].astype(np.float64)
        return np.asarray(np.where(known > 0, known - zero[None, :, None], begin))

    def readiness(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[_Values, _Values]:
        """When each rank usually has each gradient, and has computed its backward; ns since that begins.

        Args:
            buckets: parameters by bucket.
            sizes: bytes by parameter.

        Returns:
            Medians over the steps: shape ``[ranks, parameters]`` and ``[ranks]``. A gradient that never came (unused)
            is ready when the last of its bucket is.
        """
        since_begin = self._gradients_of(len(sizes)) - self.begin[:, :, None]
        missing = np.asarray((since_begin < 0).all(axis=1))
        known: _Values = np.where(since_begin >= 0, since_begin, np.nan)
        known[np.broadcast_to(missing[:, None, :], known.shape)] = 0.0
        ready: _Values = np.nanmedian(known, axis=1)
        for bucket in buckets:
            latest = ready[:, list(bucket)].max(axis=1)
            for index in bucket:
                ready[:, index] = np.where(missing[:, index], latest, ready[:, index])
        return ready, np.asarray(np.median(self.finalize - self.begin, axis=1))

    def _gradients_of(self, parameters: int) -> _Times:
        """`gradients` of so many parameters: they hold as many as the last one that ever got one."""
        made = np.zeros((*self.begin.shape, parameters), np.int64)
        known = self.gradients[:, :, :parameters]
        made[:, :, : known.shape[2]] = known
        return made

    def collectives(self, one_at_a_time: bool) -> tuple[_Times, npt.NDArray[np.bool_]]:
        """How long the collective of each bucket took, from the last rank's launch to the last rank's end, and whether
        all before it were complete by then; both of shape ``[steps, buckets]``.

        Args:
            one_at_a_time: whether the backend begins a queued one when the one before it ends.
        """
        begun, ended = (times.max(axis=0, keepdims=True) for times in (self.launched, self.reduced))
        return _alone(begun, ended, _ends_before(ended))


def _ends_before(ended: _Times) -> _Times:
    """When all buckets before each were reduced."""
    return np.maximum.accumulate(np.insert(ended, 0, 0, axis=2)[:, :, :-1], axis=2)


def _alone(begun: _Times, ended: _Times, before: _Times) -> tuple[_Times, npt.NDArray[np.bool_]]:
    return (ended - begun).min(axis=0), np.asarray(((begun >= before) & (begun > 0)).all(axis=0))


@dataclass(frozen=True)
class DeviceSteps(Steps):
    """Steps of devices that compute while the host runs ahead of them.

    `ready` and `launched` are when the device reached the launch of a bucket, `reduced` when it was done with it. When
    a single gradient was there is not known.
    """

    tells_gradients: ClassVar[bool] = False

    def places(self) -> _Times:
        """Where a rank may fall behind: at the launch of each bucket."""
        return self.launched

    def place(self, number: int, buckets: Sequence[Sequence[int]]) -> tuple[int | None, int | None]:
        """The bucket of one of `places`."""
        return number, None

    def moments(self, zero: _Times, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> _Values:
        """The same; a bucket's gradients are distributed by their bytes."""
        ready = (self.launched - zero[None, :, None]).astype(np.float64)
        made = np.zeros((*ready.shape[:2], len(sizes)))
        before = np.broadcast_to((self.begin - zero).astype(np.float64), ready.shape[:2])
        for number, members in enumerate(buckets):
            at = ready[:, :, number]
            made[:, :, members] = before[:, :, None] + (at - before)[:, :, None] * _shares(members, sizes)
            before = at
        return made

    def readiness(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[_Values, _Values]:
        """The same; the device's begin of a backward is not recorded: the host's stands for it."""
        launched = np.median(self.launched - self.begin[:, :, None], axis=1)
        ready = np.zeros((len(launched), len(sizes)))
        before = np.zeros(len(launched))
        for number, members in enumerate(buckets):
            at = np.maximum(launched[:, number], before)
            ready[:, list(members)] = before[:, None] + (at - before)[:, None] * _shares(members, sizes)
            before = at
        return ready, before

    def collectives(self, one_at_a_time: bool) -> tuple[_Times, npt.NDArray[np.bool_]]:
        """The same; it takes as long as on the rank that was last."""
        before = _ends_before(self.reduced)
        begun = np.maximum(self.launched, before) if one_at_a_time else self.launched
        return _alone(begun, self.reduced, before)


def _shares(members: Sequence[int], sizes: Sequence[int]) -> _Values:
    """Which part of a bucket's bytes each of its parameters and those before it have."""
    held = [sizes[index] for index in members]
    return np.asarray(np.cumsum(held) / max(1, sum(held)))


@dataclass(frozen=True)
class Line:
    """Time of a collective by its size: ``start_ns + ns_per_byte * bytes``.

    Attributes:
        start_ns: the fixed overhead, ≥ 0.
        ns_per_byte: the time per byte, ≥ 0.
        assumed: whether all recorded sizes were about equal, so that the share of `start_ns` was assumed.
    """

    start_ns: float
    ns_per_byte: float
    assumed: bool

    def time_ns(self, size: float) -> float:
        """Time of a collective of `size` bytes."""
        return self.start_ns + self.ns_per_byte * size


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> Line:
    """The line through (bytes, ns) of each bucket; both of its numbers are at least 0."""
    x, y = np.asarray(sizes, np.float64), np.asarray(times, np.float64)
    if not len(x) or x.max() <= 0:
        return Line(float(np.median(y)) if len(y) else 0.0, 0.0, True)
    if x.max() < 1.5 * max(x.min(), 1.0):
        typical = float(np.median(y))
        return Line(_ASSUMED_START * typical, (1 - _ASSUMED_START) * typical / float(x.mean()), True)
    slope, start = np.polyfit(x, y, 1)
    if slope < 0:
        return Line(float(np.median(y)), 0.0, False)
    if start < 0:
        return Line(0.0, float((x * y).sum() / (x * x).sum()), False)
    return Line(float(start), float(slope), False)


class Replay:
    """Recorded steps of one reducer, to be replayed with changes.

    Args:
        steps: all with the same buckets.
        buckets: parameters by bucket.
        sizes: bytes by parameter.
    """

    def __init__(self, steps: Steps, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self.steps, self.buckets, self.sizes = steps, [list(one) for one in buckets], list(sizes)
        self.zero = steps.begin.min(axis=0)
        launched = steps.launched.max(axis=0)
        reduced = np.maximum.accumulate(np.maximum(steps.reduced.max(axis=0), launched), axis=1)
        before = np.concatenate([np.zeros_like(reduced[:, :1]), reduced[:, :-1]], axis=1)
        self.service = (reduced - np.maximum(launched, before)).astype(np.float64)
        """Own time of each collective in ns, shape ``[steps, buckets]``."""
        self.bytes = [sum(self.sizes[i] for i in one) for one in self.buckets]
        self.line = fit_line(
            self.bytes, list(np.median(self.service, axis=0)) if len(steps) else [0.0] * len(self.bytes)
        )
        last = np.maximum(reduced[:, -1], steps.finalize.max(axis=0)) if self.buckets else steps.finalize.max(axis=0)
        self.tail = np.maximum(steps.end.max(axis=0) - last, 0)
        """The time of each step after its last bucket was reduced (ns): writing gradients back."""
        self.base = self.ended(self.ready(), self.service)

    def ready(self) -> _Values:
        """When each bucket was launched by each rank, in ns since the first rank's backward began."""
        return np.asarray((self.steps.launched - self.zero[None, :, None]).astype(np.float64))

    def computed(self) -> _Values:
        """When each rank's own computation was over, in the same way, shape ``[ranks, steps]``."""
        return np.asarray((self.steps.finalize - self.zero).astype(np.float64))

    def ended(self, ready: _Values, service: _Values, computed: _Values | None = None) -> _Values:
        """When the last collective and all computation are over; ns, shape ``[steps]``.

        Args:
            ready: shape ``[ranks, steps, buckets]``.
            service: shape ``[steps, buckets]``.
            computed: shape ``[ranks, steps]``; None for the recorded one.
        """
        return self._ended(ready.max(axis=0), service, computed)

    def _ended(self, everywhere: _Values, service: _Values, computed: _Values | None = None) -> _Values:
        """The same from when the last rank has launched: shape ``[steps, buckets]``."""
        computed = self.computed() if computed is None else computed
        free = np.zeros(everywhere.shape[0])
        for bucket in range(everywhere.shape[1]):
            free = np.maximum(free, everywhere[:, bucket]) + service[:, bucket]
        return np.asarray(np.maximum(free, computed.max(axis=0)))

    def with_service(self, service: _Values) -> float:
        """The saving with other times of the collectives: median over the steps (ns), negative for a loss."""
        return float(np.median(self.base - self.ended(self.ready(), service)))

    def with_buckets(self, buckets: Sequence[Sequence[int]]) -> float:
        """The saving of another bucket layout (ns), compared with the current one, both with the times of `line`.

        A parameter without a gradient counts as ready when the backward begins.
        """
        return float(np.median(self._present - self._with(buckets)))

    @cached_property
    def _present(self) -> _Values:
        return self._with(self.buckets)

    @cached_property
    def _latest(self) -> _Values:
        """When the last rank had each gradient: shape ``[steps, parameters]``."""
        return np.asarray(self.gradients.max(axis=0))

    def _with(self, buckets: Sequence[Sequence[int]]) -> _Values:
        """When the steps would end with these buckets."""
        order = np.concatenate([np.asarray(one, np.intp) for one in buckets])
        begins = np.cumsum([0, *(len(one) for one in buckets[:-1])], dtype=np.intp)
        everywhere = np.maximum.reduceat(self._latest[:, order], begins, axis=1)
        sizes = np.add.reduceat(np.asarray(self.sizes)[order], begins)
        times = self.line.start_ns + self.line.ns_per_byte * sizes
        return self._ended(everywhere, np.broadcast_to(times, (len(self.steps), len(times))))

    @cached_property
    def gradients(self) -> _Values:
        """When each gradient was ready, in ns since the first rank's backward began: ``[ranks, steps, parameters]``.

        On devices only the buckets' times are known: a bucket's gradients are then distributed by their bytes.
        """
        return self.steps.moments(self.zero, self.buckets, self.sizes)

    def mean_saved_without(self, rank: int, place: int, delay: _Values) -> float:
        """What the steps would save on average (ns) if one rank were not late.

        Args:
            rank: position of the rank.
            place: position of the parameter (on devices: of the bucket) at which it falls behind; negative: before
                its backward.
            delay: by how much, shape ``[steps]``.
        """
        ready, computed = self.ready().copy(), self.computed().copy()
        computed[rank] -= delay
        since = self._times_of(rank, place)
        late = ready[rank] >= since[:, None]
        ready[rank] -= np.where(late, delay[:, None], 0.0)
        return float(np.mean(self.base - self.ended(ready, self.service, computed)))

    @cached_property
    def waited(self) -> _Values:
        """How long all others waited for each rank (ns), shape ``[ranks, steps]``, 0 for a single rank.

        Each step would be this much shorter if that rank were as fast as the slowest of the others.
        """
        ready, computed = self.ready(), self.computed()
        ranks = len(ready)
        if ranks < 2:
            return np.zeros((ranks, len(self.steps)))
        last, before = ready.argmax(axis=0), np.partition(ready, -2, axis=0)[-2]
        slowest, second = computed.argmax(axis=0), np.partition(computed, -2, axis=0)[-2]
        everywhere, ended = ready.max(axis=0), computed.max(axis=0)
        made = np.empty((ranks, len(self.steps)))
        for rank in range(ranks):
            others = np.where(last == rank, before, everywhere)
            made[rank] = self.base - self._ended(others, self.service, np.where(slowest == rank, second, ended)[None])
        return np.maximum(made, 0.0)

    def _times_of(self, rank: int, place: int) -> _Values:
        if place < 0:
            return np.full(len(self.steps), -np.inf)
        moment = self.steps.places()[rank, :, place]
        return np.asarray(np.where(moment > 0, moment - self.zero, np.inf))
