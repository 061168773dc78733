"""From the timeline's cursor to messages for the browser: steps and marks, each sent once, the newest first.

A message has one JSON header and one binary buffer for any number of steps. The buffer is float32 and holds, step after
step, the blocks of `BLOCKS`, which `bundle` hands to `store.js`. It holds all numbers of a step: the browser only draws
them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analysis.step_metrics import EDGES, PHASES, bus_factor, mean
from ..faults import mark_kind
from ..protocol.events import Kind
from ..simulation.workload import carried
from ..timeline.timeline import Timeline
from .views import StepFrame, StepFrames

__all__ = ["BLOCKS", "StepFeed", "encode_steps"]

_MESSAGE_BYTES = 128 << 10
_KEPT_BYTES = 256 << 10  # in a saved notebook, of all models together
_KEPT_MODELS = 4
_KEPT_MARKS = 20_000
_MOST_GROWING = 1_000
_CHOSEN_STEPS, _CHOSEN_BYTES = 200, 4 << 20  # that are sent for a part of the run
# A step that takes longer than the first of these, while none has ended for so long, is sent repeatedly before its end:
# at this interval, or after a twentieth of the time that it has taken so far. `store.js` shows it then.
_GROWING_SECONDS, _APART_SECONDS, _APART_SHARE = 0.1, 0.03, 0.05

# Name and shape of each block, in order: R ranks, B buckets, D 1 if the device timed collectives, else 0. Times are in
# ms since the step's origin, NaN if the event has not happened.
BLOCKS = (
    ("bounds", "R3"),  # backward begin, finalize begin, backward end
    ("outside", "R3"),  # forward begin, forward end, end of the previous step
    ("extent", "R2"),  # first event of a bucket, last event of all
    ("busy", "R2"),  # ms of overlapped and of exposed communication
    ("phases", f"{len(PHASES)}"),  # ms of each, means over the ranks; NaN: the step is not complete on every rank
    ("edges", f"RB{len(EDGES)}"),  # where filling, queued, waiting, reducing and exposed begin and end
    ("hidden", "RB"),
    ("exposed", "RB"),
    ("lastRank", "B"),  # -1: unknown
    ("late", "B"),  # ms that the first rank waited for the last
    ("alone", "B"),  # ms that all others waited for the last rank
    ("allReduce", "B"),
    ("bandwidth", "B"),  # GB/s
    ("bus", "B"),
    ("bytes", "B"),
    ("meanHidden", "B"),  # over the ranks
    ("meanExposed", "B"),
    ("device", "DRB2"),
)


def encode_steps(frames: Iterable[StepFrame]) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the buffer of a message of type ``steps``."""
    headers: list[dict[str, Any]] = []
    blocks: list[npt.NDArray[np.float32]] = []
    for frame in frames:
        header, arrays = _encoded(frame)
        headers.append(header)
        blocks += [arrays[name].astype(np.float32).ravel() for name, _ in BLOCKS if name in arrays]
    buffer = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    return {"type": "steps", "steps": headers}, buffer.tobytes()


def _encoded(frame: StepFrame) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Returns the header of one step, and its blocks by name."""
    sync, overlap, ended = frame.sync(), frame.overlap(), frame.complete and not frame.abandoned
    phases = frame.breakdown(overlap)
    arrays: dict[str, npt.NDArray[Any]] = {
        "bounds": frame.milliseconds(frame.bounds_ns),
        "outside": frame.milliseconds(frame.outside_ns),
        "extent": frame.extent_ms(),
        "busy": np.stack([overlap.rank_hidden_ms, overlap.rank_exposed_ms], axis=-1),
        "phases": np.stack([getattr(phases, name) if ended else [np.nan] for name in PHASES]),
        "edges": frame.milliseconds(frame.edges_ns()),
        "hidden": overlap.hidden_ms,
        "exposed": overlap.exposed_ms,
        "lastRank": frame.last_rank(sync),
        "late": sync.late_ms,
        "alone": sync.alone_ms,
        "allReduce": sync.all_reduce_ms,
        "bandwidth": sync.bandwidth_gb_s,
        "bus": sync.bandwidth_gb_s * bus_factor(len(frame.ranks)),
        "bytes": frame.bucket_bytes,
        "meanHidden": mean(overlap.hidden_ms.T),
        "meanExposed": mean(overlap.exposed_ms.T),
    }
    if frame.device_ns.any():
        arrays["device"] = frame.milliseconds(frame.device_ns)
    header = {
        "reducer": frame.reducer,
        "step": frame.step,
        "generation": frame.generation,
        "ranks": frame.ranks,
        "buckets": frame.shape[1],
        "began": frame.origin_ns / 1e9,
        "complete": frame.complete,
        "abandoned": frame.abandoned,
        "device": "device" in arrays,
        "whole": bool(np.isfinite(phases.measured[0])),
        "hiddenShare": None if np.isnan(overlap.hidden_share) else overlap.hidden_share,
    }
    return header, arrays


class StepFeed:
    """Reads a timeline and sends new steps; the dashboard holds its lock around every call.

    Attributes:
        frames: the steps that the timeline holds.
        sent_steps, sent_bytes: in all messages; a step that grew between two messages counts twice.
    """

    def __init__(self, timeline: Timeline, send: Callable[..., None]) -> None:
        """`send(content, buffers=None)` sends a message to the browser."""
        self._timeline = timeline
        self._send = send
        self.sent_steps = self.sent_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._cursor, self._cleared = 0, self._timeline.cleared
        self.frames = StepFrames(self._timeline)
        self.unsent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._growing: dict[tuple[int, int], tuple[float, float]] = {}  # incomplete steps: when first seen, when due
        self._settled_at: dict[int, float] = {}  # by model: when a step was over that had not been sent
        self._marks: list[tuple[int, float, str, str | None]] = []  # rank, seconds, name, kind of fault mark
        self._marks_sent = 0

    def take(self) -> bool:
        """Reads the timeline from the cursor; returns whether it was cleared since the last call."""
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
        """Sends the newest steps that fit into one message (the others follow with the next), and all marks.

        Args:
            force: send also steps that have just begun.

        Returns:
            Whether there were steps to send.
        """
        if self._marks_sent < len(self._marks):
            self._send({"type": "marks", "marks": self._marks[self._marks_sent :]})
            del self._marks[:-_KEPT_MARKS]
            self._marks_sent = len(self._marks)
        chosen: list[StepFrame] = []
        size, settled = 0, self._settled()
        for key in reversed(list(self.unsent)):
            if size >= _MESSAGE_BYTES:
                break
            if key not in settled and not force and not self._due(key):
                continue
            del self.unsent[key]
            frame = self.frames.frame(*key)
            if frame is not None:
                chosen.append(frame)
                size += frame.times_ns.nbytes
            if frame is None or key in settled:
                self._growing.pop(key, None)
        if chosen:
            header, body = encode_steps(reversed(chosen))
            self._send(header, [body])
            self.sent_steps += len(chosen)
            self.sent_bytes += len(body)
        return bool(chosen)

    def resend(self) -> None:
        """Sends all steps again, for a page that was just opened."""
        for reducer in self.frames.reducers():
            for step in self.frames.steps(reducer):
                self._mark_unsent((reducer, step))
        self._marks_sent = 0
        self._send({"type": "forget marks"})

    def send_between(self, reducer: int, first: int, last: int) -> None:
        """Sends steps that a reader chose, which the page may no longer have: evenly spaced ones if there are many."""
        held = self._timeline.held_steps(reducer)
        held = held[(held >= first) & (held <= last)]
        size = max((one.nbytes for one in self.frames.read(reducer, held[-1:])), default=1)
        most = max(1, min(_CHOSEN_STEPS, _CHOSEN_BYTES // size))
        chosen = held[:: -(-len(held) // most)] if len(held) > most else held
        for part in np.array_split(chosen, -(-len(chosen) * size // _MESSAGE_BYTES) or 1):
            header, body = encode_steps(self.frames.read(reducer, part))
            self._send({**header, "between": [first, last]}, [body])

    def newest(self) -> dict[str, Any]:
        """Returns the last steps of the last models as one message, for a page without a kernel."""
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

    def assignment(self, reducer: int, generation: int) -> dict[str, Any] | None:
        """Returns the bucket layout, None until a rank has described it."""
        try:
            return self._timeline.assignment(reducer, generation)
        except ValueError:
            return None

    def expected(self, reducer: int, generation: int, link: Any) -> dict[str, Any]:
        """Returns the ns of each bucket's all-reduce alone (None: unknown), and the limit of the bus in GB/s."""
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

    def _settled(self) -> set[tuple[int, int]]:
        """Those of the unsent steps that are over."""
        found: set[tuple[int, int]] = set()
        for reducer in {reducer for reducer, _ in self.unsent}:
            steps = np.array([step for of, step in self.unsent if of == reducer])
            over = steps[self._timeline.finished_steps(reducer, steps)].tolist()
            if over:
                self._settled_at[reducer] = time.monotonic()
            found.update((reducer, step) for step in over)
        return found

    def _due(self, key: tuple[int, int]) -> bool:
        """Whether to send a step that is not over: it changes faster than anybody can read."""
        now = time.monotonic()
        if len(self._growing) > _MOST_GROWING:
            self._growing.clear()
        begun, due = self._growing.setdefault(key, (now, now + _GROWING_SECONDS))
        if now < max(due, self._settled_at.get(key[0], 0.0) + _GROWING_SECONDS):
            return False
        self._growing[key] = (begun, now + max(_APART_SECONDS, _APART_SHARE * (now - begun)))
        return True

    def _mark_unsent(self, key: tuple[int, int]) -> None:
        """Notes that the browser does not have the current state of a step."""
        self.unsent[key] = None
        self.unsent.move_to_end(key)
