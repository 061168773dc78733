"""The clock offset between two hosts: from collectives with ranks on both hosts, or from time queries.

In both cases the order of events bounds the offset from below and above, and the tightest bounds leave an interval. Its
middle is the estimate, its half width the uncertainty.

[Note: buckets as barriers]
No rank has a bucket reduced before every rank has launched it. So with d added to the second host's times, for every
bucket of every step: ``reduced there + d >= launched here`` and ``launched there + d <= reduced here``. The interval
for d is about as wide as the fastest all-reduce is long. It needs no communication, and works for any recording. If the
clocks drift, the bounds contradict each other: the width is then negative, and shows the largest drift.

[Note: questions and answers]
While a cluster runs, hosts are queried for their time: a query that was sent at a, answered with that host's time s,
and returned at b means ``a <= s + d <= b``. Of several queries the quickest bound best (the minimum-delay filter of
NTP, RFC 5905). A query is never wrong, only wide, because both directions may take different times.

Clocks drift with the temperature of their crystals, and with the corrections of time synchronisation. The rate is
assumed to be constant over `SPAN_S`, and at most `MOST_DRIFT`. Any two queries bound it: later minus earlier interval,
divided by the time between them. With these bounds every query bounds the offset at every moment; older queries give
wider bounds. If bounds contradict each other, the rate has changed, and only the newest queries count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_DRIFT", "SPAN_S", "ClockOffset", "Moments", "Questions", "clock_offset"]

MOST_DRIFT = 200e-6
"""The largest drift between two clocks, in seconds per second: twice that of a bad crystal."""
SPAN_S = 300.0
"""Queries older than this are ignored."""
_WINDOW_NS = 2_000_000_000  # of the queries in this time only the quickest is kept


@dataclass(frozen=True)
class Moments:
    """When the ranks of one clock launched and had reduced each bucket of each step.

    Attributes:
        keys: ``[n]`` int64, ascending: which bucket of which step.
        launched_ns: ``[n]`` int64: the last of the ranks' launches.
        reduced_ns: ``[n]`` int64: the first of the ranks to have it reduced.
    """

    keys: npt.NDArray[np.int64]
    launched_ns: npt.NDArray[np.int64]
    reduced_ns: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClockOffset:
    """The offset to add to another clock's times.

    Attributes:
        ns: the offset.
        uncertain_ns: its uncertainty (±).
        buckets: the number of collectives (or queries) that it is based on.
        drift: how fast it grows, in seconds per second.
    """

    ns: int
    uncertain_ns: int
    buckets: int
    drift: float = 0.0


def clock_offset(reference: Moments, other: Moments) -> ClockOffset | None:
    """How far `other`'s clock is behind that of `reference`; None if no bucket was reduced on both."""
    _, here, there = np.intersect1d(reference.keys, other.keys, assume_unique=True, return_indices=True)
    if not len(here):
        return None
    at_least = int((reference.launched_ns[here] - other.reduced_ns[there]).max())
    at_most = int((reference.reduced_ns[here] - other.launched_ns[there]).min())
    return ClockOffset((at_least + at_most) // 2, abs(at_most - at_least) // 2, len(here))


class Questions:
    """The answers of another clock, and its offset to this one. See [Note: questions and answers]."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int, int]] = deque(maxlen=int(SPAN_S * 1e9) // _WINDOW_NS)  # middle, low, high

    def add(self, sent_ns: int, answer_ns: int, received_ns: int) -> None:
        """Adds a query: when it was sent, the other clock's time, when the answer arrived."""
        made = ((sent_ns + received_ns) // 2, sent_ns - answer_ns, received_ns - answer_ns)
        last = self._kept[-1] if self._kept else None
        if last is None or made[0] // _WINDOW_NS != last[0] // _WINDOW_NS:
            self._kept.append(made)
        elif made[2] - made[1] < last[2] - last[1]:
            self._kept[-1] = made

    def offset(self, at_ns: int) -> ClockOffset | None:
        """The offset of the other clock at a time of this one; None before the first answer."""
        if not self._kept:
            return None
        since = [one for one in self._kept if one[0] >= self._kept[-1][0] - int(SPAN_S * 1e9)]
        found = self._offset(since, at_ns)
        while found is None:  # the rate has changed
            since = since[(len(since) + 1) // 2 :]
            found = self._offset(since, at_ns)
        return found

    @staticmethod
    def _offset(kept: list[tuple[int, int, int]], at_ns: int) -> ClockOffset | None:
        """The offset from these queries; None if they contradict each other."""
        origin = kept[-1][1]  # small numbers: a float has 53 bits
        middle = np.array([one[0] - at_ns for one in kept], np.float64)
        low = np.array([one[1] - origin for one in kept], np.float64)
        high = np.array([one[2] - origin for one in kept], np.float64)
        slowest, fastest = _rates(middle, low, high)
        if slowest > fastest:
            return None
        # From a query's time to `at_ns`: forwards for a past one, backwards for a future one.
        passed = -middle
        at_least = float((low + np.minimum(passed * slowest, passed * fastest)).max())
        at_most = float((high + np.maximum(passed * slowest, passed * fastest)).min())
        if at_least > at_most:
            return None
        half = (at_most - at_least) / 2
        return ClockOffset(origin + round((at_least + at_most) / 2), round(half), len(kept), (slowest + fastest) / 2)


def _rates(
    middle: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Bounds of the drift, from each pair of queries."""
    earlier, later = np.triu_indices(len(middle), 1)
    apart = middle[later] - middle[earlier]
    earlier, later, apart = earlier[apart > 0], later[apart > 0], apart[apart > 0]
    slowest = ((low[later] - high[earlier]) / apart).max(initial=-MOST_DRIFT)
    fastest = ((high[later] - low[earlier]) / apart).min(initial=MOST_DRIFT)
    return float(slowest), float(fastest)
