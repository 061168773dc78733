"""From the timeline's cursor to messages for the browser: steps and marks, each sent once, the newest first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..analysis.step_metrics import bus_factor
from ..faults import mark_kind
from ..protocol.events import Kind
from ..simulation.workload import carried
from ..timeline.timeline import Timeline
from ..views.step_frames import StepFrame, StepFrames
from .step_messages import encode_steps

__all__ = ["StepFeed"]

_MESSAGE_BYTES = 128 << 10
_KEPT_BYTES = 256 << 10  # in a saved notebook, of all models together
_KEPT_MODELS = 4
_KEPT_MARKS = 20_000
_MOST_GROWING = 1_000
# A step that takes longer than the first is sent before its end, again and again: this far apart, or a twentieth of the
# time that it has taken. `store.js` shows it then.
_GROWING_SECONDS, _APART_SECONDS, _APART_SHARE = 0.1, 0.03, 0.05


class StepFeed:
    """Reads a timeline and sends what is new; the dashboard holds its lock around every call.

    Attributes:
        frames: the steps that the timeline holds.
        sent_steps, sent_bytes: in all messages; a step that grew between two messages counts twice.
    """

    def __init__(self, timeline: Timeline, send: Callable[..., None]) -> None:
        """`send(content, buffers=None)` takes a message to the browser."""
        self._timeline = timeline
        self._send = send
        self.sent_steps = self.sent_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._cursor, self._cleared = 0, self._timeline.cleared
        self.frames = StepFrames(self._timeline)
        self.unsent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._growing: dict[tuple[int, int], tuple[float, float]] = {}  # of steps that have not ended: first seen, due
        self._marks: list[tuple[int, float, str, str | None]] = []  # rank, seconds, name, what it says of faults
        self._marks_sent = 0

    def take(self) -> bool:
        """Reads the timeline from the cursor on; returns whether it was cleared since the last time."""
        anew = self._cleared != self._timeline.cleared
        if anew:
            self._begin()
            self._send({"type": "reset"})
        chunks, self._cursor, _ = self._timeline.since(self._cursor)
        for key in self.frames.changed():
            self._mark_unsent(key)
        names = self._timeline.mark_names()
        for rank, events in chunks:
            for event in events[(events["kind"] == Kind.MARK) & (events["parameter"] >= 0)]:
                if event["parameter"] < len(names):
                    name = names[event["parameter"]]
                    self._marks.append((rank, int(event["host_ns"]) / 1e9, name, mark_kind(name)))
        return anew

    def send(self, force: bool = False) -> bool:
        """Sends the newest steps that fit into one message (the others follow with the next ones), and all marks.

        Args:
            force: also steps that have just begun.

        Returns:
            Whether there were steps to send.
        """
        if self._marks_sent < len(self._marks):
            self._send({"type": "marks", "marks": self._marks[self._marks_sent :]})
            del self._marks[:-_KEPT_MARKS]
            self._marks_sent = len(self._marks)
        chosen: list[StepFrame] = []
        size = 0
        for key in reversed(list(self.unsent)):
            if size >= _MESSAGE_BYTES:
                break
            frame = self.frames.frame(*key)
            if frame is not None and not force and not self._due(key, frame):
                continue
            del self.unsent[key]
            if frame is not None:
                chosen.append(frame)
                size += frame.times_ns.nbytes
        if chosen:
            header, body = encode_steps(reversed(chosen))
            self._send(header, [body])
            self.sent_steps += len(chosen)
            self.sent_bytes += len(body)
        return bool(chosen)

    def resend(self) -> None:
        """Sends everything that is held again: a page was opened."""
        for reducer in self.frames.reducers():
            for step in self.frames.steps(reducer):
                self._mark_unsent((reducer, step))
        self._marks_sent = 0
        self._send({"type": "forget marks"})

    def newest(self) -> dict[str, Any]:
        """Returns the last steps of the models that trained last, for a page that has no kernel to ask: one message."""
        chosen: list[StepFrame] = []
        known = set(self.frames.reducers())
        models = [one.reducer for one in reversed(self._timeline.reducers()) if one.reducer in known][:_KEPT_MODELS]
        for reducer in models:
            size = 0
            for step in reversed(self.frames.steps(reducer)):
                frame = self.frames.frame(reducer, step)
                if frame is None:
                    continue
                size += frame.times_ns.nbytes
                if size > _KEPT_BYTES / len(models) and size > frame.times_ns.nbytes:
                    break
                chosen.append(frame)
        if not chosen:
            return {}
        header, body = encode_steps(reversed(chosen))
        return {"header": header, "body": body}

    def recent(self, number: int) -> list[StepFrame]:
        """Returns the newest complete steps of the model whose backward began last."""
        latest = self.frames.latest()
        if latest is None:
            return []
        return [one for one in self.frames.frames(latest.reducer, number) if one.complete and not one.abandoned]

    def assignment(self, reducer: int, generation: int) -> dict[str, Any] | None:
        """Returns which parameters the buckets hold, None as long as no rank said so."""
        try:
            return self._timeline.assignment(reducer, generation)
        except ValueError:
            return None

    def expected(self, reducer: int, generation: int, link: Any) -> dict[str, Any]:
        """Returns the ns that a link needs for each bucket alone (None: unknown), and its limit on the bus in GB/s."""
        assignment = self.assignment(reducer, generation) or {"buckets": (), "group_ranks": ()}
        ranks = len(assignment["group_ranks"])
        if ranks < 2 or not assignment["buckets"]:
            return {}
        large, sizes = 1e9, carried(assignment)
        return {
            "ns": [None] * len(assignment["buckets"]) if sizes is None else link.time_ns(sizes, ranks).tolist(),
            "limit": bus_factor(ranks) * large / float(link.time_ns(large, ranks)),
            "from": f"{link.algorithm} of {ranks} ranks, fitted to {link.fit.points} sizes"
            if link.fit
            else link.algorithm,
        }

    def _due(self, key: tuple[int, int], frame: StepFrame) -> bool:
        """Whether the step is to be sent as it is: one that has not ended changes faster than anybody reads."""
        if frame.complete or frame.abandoned:
            self._growing.pop(key, None)
            return True
        now = time.monotonic()
        if len(self._growing) > _MOST_GROWING:
            self._growing.clear()
        begun, due = self._growing.setdefault(key, (now, now + _GROWING_SECONDS))
        if now < due:
            return False
        self._growing[key] = (begun, now + max(_APART_SECONDS, _APART_SHARE * (now - begun)))
        return True

    def _mark_unsent(self, key: tuple[int, int]) -> None:
        """Notes that the browser lacks the present state of a step of a reducer."""
        self.unsent[key] = None
        self.unsent.move_to_end(key)
