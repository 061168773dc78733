"""The overhead of recording and of the dashboard, measured while they run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..analysis.step_metrics import milliseconds, typical
from ..timeline import judged_steps
from ..timeline.tables.span_columns import joined, step_time
from ..timeline.tables.step_table import STEP_FIELDS
from ..timeline.timeline import Timeline

__all__ = ["Overhead"]

_WINDOW_SECONDS = 10.0
_READINGS = 20
_FEW_STEPS = 20
_BEGIN, _END = map(STEP_FIELDS.index, ("backward_begin", "backward_end"))


class Overhead:
    """Counts events and CPU time; `read` returns what the browser shows."""

    def __init__(self, timeline: Timeline, event_cost: Callable[[], float | None] | None) -> None:
        """`event_cost()` measures the cost of one event in ns on a rank, or returns None; it is called once."""
        self._timeline = timeline
        self._event_cost = event_cost
        self._ns: float | None = None
        self._samples: deque[tuple[float, float]] = deque()  # time, CPU time of the dashboard so far
        self._spent = 0.0
        # Events and last step, summed over the ranks, of readings since the newest model's first step.
        self._counts: deque[tuple[int, int]] = deque(maxlen=_READINGS)
        self._before = 0  # events until then

    def spend(self, seconds: float) -> None:
        """Adds CPU time of the dashboard."""
        self._spent += seconds

    def read(self) -> dict[str, Any]:
        """Returns events per step and rank, ns per event, ms per step of the model that trained last, the kernel's
        share of a core, and a sentence about old steps that were down-sampled."""
        now = time.monotonic()
        model = self._timeline.model()
        step_ms = None if model is None else self._step_ms(model.reducer)
        self._samples.append((now, self._spent))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        if step_ms and self._ns is None and self._event_cost is not None:
            self._ns, self._event_cost = self._event_cost(), None
        ranks = self._timeline.ranks()
        events, steps = sum(one.events for one in ranks), sum(one.step for one in ranks)
        if self._counts and steps < self._counts[-1][1]:  # another model trains
            self._before = self._counts[-1][0]
            self._counts.clear()
        if ranks and all(one.step >= 0 for one in ranks):
            self._counts.append((events, steps))
        return {
            "events": self._events_a_step(),
            "ns": self._ns,
            "step": step_ms,
            "kept": "" if model is None else str(self._timeline.kept(model.reducer)),
            "kernel": (self._spent - before) / (now - since) if now - since > 1.0 else None,
        }

    def _events_a_step(self) -> float | None:
        """Events per step and rank, over the last readings, or else since the model's first step."""
        if not self._counts:
            return None
        (first, step), (last, newest) = self._counts[0], self._counts[-1]
        if newest <= step or last <= first:
            ranks = len(self._timeline.ranks())
            few = len(self._counts) == 1 and newest < _FEW_STEPS * ranks
            if few or (not self._before and len(self._timeline.reducers()) > 1):
                return None  # many of these events may be those of the model's construction, or of another model
            first, step = self._before, -ranks
        return (last - first) / (newest - step) if newest > step and last > first else None

    def _step_ms(self, reducer: int) -> float | None:
        """A step of the model, as the overview tells it; its backward if no end of a previous step is known."""
        layout = self._timeline.judged(reducer)
        if layout is None:
            return None
        steps = layout.warm(judged_steps.WARM_UP, judged_steps.ANALYSED_STEPS)
        views = self._timeline.views_of(reducer, steps)
        number = joined([one.step for one in views])
        whole = joined([step_time(one.waits, milliseconds(one.steps[:, _END], one.previous_end)) for one in views])
        backward = joined([milliseconds(one.steps[:, _END], one.steps[:, _BEGIN]) for one in views])
        found = [typical(number, ms) for ms in (whole, backward)]
        return next((ms for ms in found if ms == ms), None)
