"""Comparing gradients between ranks on demand: the request, and the result in the dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...formatting import counted
from ...timeline.timeline import Inspection, Timeline
from ..views import StepFrames

__all__ = ["Comparison"]

_ASK_AGAIN_SECONDS = 2.0
_GIVE_UP_SECONDS = 12.0
_AHEAD_SECONDS = 0.3


@dataclass
class _Asked:
    """A request that has not been answered yet."""

    reducer: int
    step: int
    since: float
    last: float


class Comparison:
    """Requests norms and checksums of the ranks' gradients, and describes the result in words.

    All ranks must inspect the same step. While they train, it is a step that none of them has reached.
    """

    def __init__(self, timeline: Timeline, request: Callable[[int, int], None] | None) -> None:
        """`request(reducer, step)` sends the request and returns at once; None: gradients can't be compared."""
        self._timeline = timeline
        self._request = request
        self._asked: _Asked | None = None
        self.shown: dict[str, Any] = {}
        """What the browser shows: reducer, step, state, text, buckets."""

    @property
    def pending(self) -> bool:
        """Whether an answer is expected."""
        return self._asked is not None

    def ask(self, reducer: int, frames: StepFrames) -> None:
        """Requests a comparison of the reducer's gradients."""
        if self._request is None:
            self._show(reducer, -1, "failed", "this timeline has no running ranks")
            return
        now = time.monotonic()
        since = now if self._asked is None else self._asked.since
        step = _step_to_ask(frames, reducer)
        self._asked = _Asked(reducer, step, since, now)
        self._show(reducer, step, "asked", "requested, waiting for the ranks …")
        self._request(reducer, step)

    def update(self, frames: StepFrames) -> None:
        """Takes the answers that have arrived."""
        asked = self._asked
        if asked is None:
            return
        answers = [one for one in self._timeline.inspections(asked.reducer) if one.step >= asked.step]
        whole = [one for one in answers if not one.missing]
        now = time.monotonic()
        if whole:
            self._asked = None
            self._answer(whole[-1])
        elif now - asked.since > _GIVE_UP_SECONDS:
            self._asked = None
            missing = ", ".join(str(rank) for rank in answers[-1].missing) if answers else "all"
            whom = "any rank" if missing == "all" else f"rank(s) {missing}"
            self._show(asked.reducer, asked.step, "failed", f"no response from {whom} for step {asked.step}")
        elif now - asked.last > _ASK_AGAIN_SECONDS:
            # The requested step was never reached: the cell ended before it.
            self.ask(asked.reducer, frames)

    def _answer(self, found: Inspection) -> None:
        """Shows a complete result."""
        equal = found.equal
        buckets = {
            str(bucket): {"equal": equal[bucket], "norms": {str(rank): norm for rank, norm in norms.items()}}
            for bucket, norms in found.norms.items()
        }
        ranks = len(next(iter(found.norms.values()), {}))
        different = [bucket for bucket, same in equal.items() if not same]
        if not different:
            text, state = (
                f"equal on all {ranks} ranks after step {found.step} ({counted(len(equal), 'bucket')})",
                "equal",
            )
        else:
            text, state = f"differ after step {found.step} in bucket {', '.join(map(str, different))}", "differ"
        self._show(found.reducer, found.step, state, text, buckets)

    def _show(self, reducer: int, step: int, state: str, text: str, buckets: dict[str, Any] | None = None) -> None:
        """Sets what the browser shows."""
        self.shown = {"reducer": reducer, "step": step, "state": state, "text": text, "buckets": buckets or {}}


def _step_to_ask(steps: StepFrames, reducer: int) -> int:
    """Returns the newest step if the ranks are idle, else one that they reach in about `_AHEAD_SECONDS`."""
    frames = [frame for frame in steps.frames(reducer, 20) if frame.origin_ns]
    if not frames:
        return 0
    newest = frames[-1]
    seconds = (newest.origin_ns - frames[0].origin_ns) / 1e9 / max(len(frames) - 1, 1)
    resting = time.monotonic_ns() - int(newest.times_ns.max()) > 1e9 + 3e9 * seconds
    if resting or seconds <= 0:
        return newest.step
    return newest.step + 2 + int(_AHEAD_SECONDS / seconds)
