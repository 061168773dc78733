"""What one rank's main thread did between models: spans of data loading, optimizers and forwards; sampled places.

Batches are only kept at first, and digested when somebody asks or there are many: a live view of many ranks costs the
receiver thread next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...analysis.step_parts import SPANS, Place
from ...protocol.events import Kind

__all__ = ["ActivityTable"]

_Times = npt.NDArray[np.int64]

_UNDIGESTED = 50_000  # events
_MOST = 16_384  # spans of each part, and samples
_ACTIVITY, _SAMPLE, _BEGIN, _END, _GRADIENT, _BACKWARD_END = map(
    int,
    (Kind.ACTIVITY, Kind.SAMPLE, Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.GRAD_READY, Kind.BACKWARD_END),
)
_OPTIMIZER, _ACCUMULATION = SPANS.index("optimizer"), SPANS.index("accumulation")


class _Rows:
    """The newest rows of some integers each, in the order of arrival; `width` of them.

    They stand in a buffer for twice as many, so that old ones are moved once in many calls.
    """

    def __init__(self, width: int) -> None:
        self._buffer = np.zeros((0, width), np.int64)
        self._begin = self._end = 0

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Shape ``[rows, width]``; may be written to."""
        return self._buffer[self._begin : self._end]

    def add(self, *columns: npt.NDArray[np.int64]) -> None:
        added = min(len(columns[0]), _MOST)
        if not added:
            return
        end = self._end + added
        if end > len(self._buffer):
            kept = self.rows[max(len(self.rows) + added - _MOST, 0) :]
            self._begin, end = 0, len(kept) + added
            larger = np.empty((min(2 * end, 2 * _MOST), kept.shape[1]), np.int64)
            larger[: len(kept)] = kept
            self._buffer = larger
        for number, column in enumerate(columns):
            self._buffer[end - added : end, number] = column[-added:]
        self._begin, self._end = max(self._begin, end - _MOST), end


class ActivityTable:
    """The activities of one rank, bounded."""

    def __init__(self) -> None:
        self._waiting: list[npt.NDArray[np.void]] = []
        self._count = 0
        self._spans = [_Rows(3) for _ in SPANS]  # begin, end, place
        self._samples = _Rows(3)  # time, place, weight in ns
        self._backward_ends = _Rows(1)

    def extend(self, events: npt.NDArray[np.void], places: Sequence[Place]) -> None:
        """Takes events of this rank, of all models, in the order of their sequence numbers.

        Args:
            events: with the numbers of places of this timeline.
            places: all that are known.
        """
        self._waiting.append(events)
        self._count += len(events)
        if self._count > _UNDIGESTED:
            self.digest(places)

    def digest(self, places: Sequence[Place]) -> None:
        """Makes everything that was taken visible."""
        if not self._waiting:
            return
        events = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        self._waiting, self._count = [], 0
        kind, at = events["kind"], events["host_ns"]
        there = np.bincount(kind, minlength=256).tolist()  # how many of each kind
        if there[_BACKWARD_END]:
            self._backward_ends.add(at[kind == _BACKWARD_END])
        if there[_BEGIN] or there[_END] or there[_GRADIENT]:
            self._take_forwards(events, kind, at)
        if there[_ACTIVITY]:
            parts = np.array([SPANS.index(one.part) if one.part in SPANS else -1 for one in places] + [-1])
            self._take_activities(events[kind == _ACTIVITY], parts)
        if there[_SAMPLE]:
            seen = kind == _SAMPLE
            self._samples.add(at[seen], _known(events["parameter"][seen], len(places)), events["bytes"][seen])

    def _take_activities(self, events: npt.NDArray[np.void], parts: npt.NDArray[np.int64]) -> None:
        """Adds spans; `parts`: each place's number in `SPANS`, -1 if it is none; last -1 for unknown places."""
        place = _known(events["parameter"], len(parts) - 1)
        begin, end, part = events["device_begin_ns"], events["host_ns"], parts[place]
        for number in np.unique(part[part >= 0]).tolist():
            chosen = part == number
            first = begin[chosen]
            if number == _OPTIMIZER:
                first = self._after_backward(first, end[chosen])
            self._spans[number].add(first, end[chosen], place[chosen])

    def _after_backward(self, begin: _Times, end: _Times) -> _Times:
        """The begins of optimizer steps without the forward and backward of a closure that they called."""
        ends = np.concatenate([[0], self._backward_ends.rows[:, 0]])
        return np.asarray(np.maximum(begin, ends[np.searchsorted(ends, end) - 1]))

    def _take_forwards(self, events: npt.NDArray[np.void], kind: npt.NDArray[np.uint8], at: _Times) -> None:
        """Adds forwards; one without synchronisation lasts until its last gradient has been accumulated."""
        chosen = (kind == _BEGIN) | (kind == _END) | ((kind == _GRADIENT) & (events["bucket"] < 0))
        begins, times = (kind == _BEGIN)[chosen], at[chosen]
        if not len(times):
            return
        spans = self._spans[_ACCUMULATION]
        first = np.flatnonzero(begins)
        continued = times[: first[0]] if len(first) else times
        if len(continued) and len(spans.rows):
            spans.rows[-1, 1] = continued.max()
        if len(first):
            spans.add(times[first], np.maximum.reduceat(times, first), np.full(len(first), -1))

    def within(self, times: _Times) -> _Times:
        """The time spent in each of `SPANS` before each step's backward, outside of its last forward.

        Args:
            times: shape ``[steps, 4]``: end of the previous step, begin and end of the last forward, begin of the
                backward; 0 where unknown.

        Returns:
            ns, shape ``[steps, len(SPANS)]``; 0 where the end of the previous step is unknown.
        """
        made = np.zeros((len(times), len(SPANS)), np.int64)
        known = np.flatnonzero((times > 0).all(axis=1))
        if not len(known):
            return made
        moments = times[known].T
        begin, end = moments[0].min(), moments[3].max()
        for number, spans in enumerate(self._spans):
            rows = spans.rows
            if not len(rows):
                continue
            rows = rows[(rows[:, 1] > begin) & (rows[:, 0] < end)]
            if len(rows):
                before, first, last, backward = _time_in(rows, moments)
                made[known, number] = first - before
                if number != _ACCUMULATION:  # what follows the last forward is no earlier one
                    made[known, number] += backward - last
        return np.maximum(made, 0)

    def places(self, times: _Times) -> list[tuple[int, int]]:
        """Each place of the spans in these steps, and the ns spent there; `times` as for `within`."""
        known = times[(times > 0).all(axis=1)]
        made = []
        for number, spans in enumerate(self._spans):
            for place in np.unique(spans.rows[:, 2]).tolist() if number != _ACCUMULATION else ():
                total = _Covered(spans.rows[spans.rows[:, 2] == place])
                before, first, last, backward = map(total.until, known.T)
                made.append((place, int((first - before + backward - last).sum())))
        return made

    def samples(self, times: _Times) -> tuple[_Times, _Times]:
        """Places and weights (ns) of the samples in the blanks of steps: where no span and no forward is.

        Args:
            times: as for `within`.
        """
        at, place, weight = self._samples.rows.T
        known = times[(times > 0).all(axis=1)]
        blank = _inside(at, known[:, :2]) | _inside(at, known[:, 2:])
        for spans in self._spans:
            blank &= ~_inside(at, spans.rows)
        return place[blank], weight[blank]


def _known(places: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int64]:
    """The numbers of places, -1 for those that were not described: a damaged recording may name any."""
    return np.where((places >= 0) & (places < count), places, -1).astype(np.int64)


def _inside(at: _Times, spans: _Times) -> npt.NDArray[np.bool_]:
    """Whether each time lies in one of the spans (rows of begin and end)."""
    if not len(spans):
        return np.zeros(len(at), bool)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    row = np.searchsorted(spans[:, 0], at, side="right") - 1
    return (row >= 0) & (at < np.maximum.accumulate(spans[:, 1])[row])


def _time_in(spans: _Times, moments: _Times) -> _Times:
    """How much of the time before each moment lies in spans."""
    if len(spans) > 1:
        return _Covered(spans).until(moments)
    begin, end, _ = spans[0].tolist()  # most parts of a step are one span
    lasted: _Times = np.maximum(np.minimum(moments, end) - begin, 0)
    return lasted


class _Covered:
    """How much of the time before a moment lies in spans; overlapping ones count once."""

    def __init__(self, spans: _Times) -> None:
        ordered = spans[np.argsort(spans[:, 0], kind="stable")]
        end = np.maximum.accumulate(ordered[:, 1])
        begin = np.maximum(ordered[:, 0], np.concatenate([[0], end[:-1]]))
        begin = np.minimum(begin, end)
        self._begin, self._length = begin, end - begin
        self._sum = np.cumsum(self._length)

    def until(self, moment: _Times) -> _Times:
        row = np.searchsorted(self._begin, moment, side="right") - 1
        found = self._sum[row] - self._length[row] + np.clip(moment - self._begin[row], 0, self._length[row])
        return np.where(row >= 0, found, 0)
