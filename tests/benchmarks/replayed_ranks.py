"""More ranks than this machine could train with: what real ranks sent is sent again, by as many senders as asked for.

[Note: replayed ranks]
What the real ranks of a cluster sent is recorded. Then a process of its own holds one connection for each sender to a
`Wire` of its own, says hello, describes the model as one of that many ranks, and sends the events again and again at
the pace at which they came: each with the sender's rank, with numbers of steps and sequence that go on, and with times
that are now. Like a rank it sends, as often as one of so many does (`interval_of`), all that has happened until then.
What is behind the wire (decoding, the timeline, the dashboard, the page) can't tell them from ranks.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from ddp_lab.control.wire import Wire
from ddp_lab.engine.telemetry import connect, interval_of
from ddp_lab.errors import DdpLabError
from ddp_lab.protocol import archive, events
from ddp_lab.timeline.timeline import Timeline

__all__ = ["ReplayedRanks", "main"]


class ReplayedRanks:
    """A timeline that receives what so many senders replay, until `close`.

    Args:
        recorded: of real ranks that have trained one model.
        senders: how many ranks the timeline shall see.
    """

    def __init__(self, recorded: Timeline, senders: int) -> None:
        self.timeline = Timeline()
        self._folder = tempfile.TemporaryDirectory()
        file = recorded.save(Path(self._folder.name) / "recorded.npz")
        self._wire = Wire()
        self._wire.on_batch(self.timeline.extend)
        self._wire.on_description(self.timeline.describe)
        command = [sys.executable, "-m", __name__, str(file), str(senders)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._wire.endpoint()) + "\n")
        self._process.stdin.flush()
        missing = self._wire.wait_connected(range(senders), timeout=60)
        if missing:
            self.close()
            raise DdpLabError(f"{len(missing)} of {senders} senders have not said hello in 60 s")

    def close(self) -> None:
        """Ends the senders."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # they end when it does
        self._process.wait(timeout=30)
        self._wire.close()
        self._folder.cleanup()


@dataclass(frozen=True)
class _Sent:
    """One batch as it is sent: when, in ns from the begin of the recording, and its events."""

    at_ns: int
    events: npt.NDArray[np.void]


@dataclass(frozen=True)
class _Recording:
    """What one real rank sent of its last steps.

    Attributes:
        events: in the order in which they were sent; times are in ns from the begin of the recording.
        steps: how many there are; numbered from 0.
        descriptions: of the model.
    """

    events: npt.NDArray[np.void]
    steps: int
    descriptions: list[dict[str, Any]]

    def drained(self, interval_ns: float, first_ns: float) -> list[_Sent]:
        """The batches of a rank that drains at `first_ns`, and then after each interval, all that has happened."""
        known_at = np.maximum.accumulate(self.events["host_ns"])  # an event is sent after those before it
        number = np.maximum(np.ceil((known_at - first_ns) / interval_ns), 0).astype(np.int64)
        begins = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
        return [
            _Sent(round(first_ns + number[begin] * interval_ns), self.events[begin:end])
            for begin, end in itertools.pairwise(begins)
        ]


def _recordings(file: Path, most: int = 60) -> tuple[list[_Recording], int]:
    """The recordings of all real ranks, and for how long they go, in ns."""
    saved = archive.read(file)
    ranks = sorted({rank for rank, _ in saved.chunks})
    everything = np.concatenate([chunk for _, chunk in saved.chunks])
    whole = everything[everything["kind"] == events.Kind.BACKWARD_END]
    newest = whole[whole["host_ns"].argmax()]
    of_model = (whole["reducer"] == newest["reducer"]) & (whole["generation"] == newest["generation"])
    numbers = np.unique(whole["step"][of_model])[1:][-most:]  # the first one's forward was of the buckets before
    if len(numbers) < 2:
        raise DdpLabError("there are fewer than two whole steps to replay")
    first, last = int(numbers[0]), int(numbers[-1])
    chosen = _within(everything, newest, first, last)
    begin, end = int(chosen["host_ns"].min()), int(chosen["host_ns"].max())
    made = []
    for rank in ranks:
        parts = [_within(chunk, newest, first, last) for of, chunk in saved.chunks if of == rank]
        sent = np.concatenate(parts)
        sent["host_ns"] -= begin
        sent["step"] -= first
        described = [about for of, about in saved.described if of == rank and about.get("type") == "assignment"]
        made.append(_Recording(sent, len(numbers), described))
    return made, end - begin


def _within(chunk: npt.NDArray[np.void], newest: np.void, first: int, last: int) -> npt.NDArray[np.void]:
    """The events of one model's steps."""
    inside = (chunk["step"] >= first) & (chunk["step"] <= last) & (chunk["reducer"] == newest["reducer"])
    chosen: npt.NDArray[np.void] = chunk[inside & (chunk["generation"] == newest["generation"])]
    return chosen


class _Sender:
    """One connection that sends what a rank of this number had sent."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: dict[str, str], rank: int, ranks: int, recording: _Recording
    ) -> None:
        self.rank, self.recording = rank, recording
        self.session = time.time_ns()
        self._sequence = 0
        self._data = connect(context, zmq.PUSH, endpoint, "data", f"{rank}-replayed")
        self._control = connect(context, zmq.DEALER, endpoint, "control", f"{rank}-replayed")
        told = [about | {"group_ranks": list(range(ranks)), "first_step": 0} for about in recording.descriptions]
        message = {"type": "describe", "rank": rank, "session": self.session, "descriptions": told}
        self._data.send_multipart([b"j", json.dumps(message).encode()])
        self._control.send(json.dumps({"rank": rank, "session": self.session, "type": "hello"}).encode())

    def send(self, batch: _Sent, round_: int, shift_ns: int) -> None:
        """Sends a batch of the recording as one of its `round_`-th repetition, that much later."""
        made = batch.events.copy()
        made["step"] += round_ * self.recording.steps
        made["host_ns"] += shift_ns
        made["sequence"] = np.arange(self._sequence, self._sequence + len(made))
        frames = events.encode(events.Batch(self.rank, self.session, self._sequence, 0, made))
        self._sequence += len(made)
        self._data.send_multipart(frames)


def main(argv: Sequence[str]) -> None:
    """The senders' process: ``FILE SENDERS``; reads the endpoint from stdin, and ends with it."""
    file, ranks = Path(argv[0]), int(argv[1])
    endpoint = json.loads(sys.stdin.readline())
    recordings, lasts_ns = _recordings(file)
    context: zmq.Context[Any] = zmq.Context(io_threads=1)
    senders = [_Sender(context, endpoint, rank, ranks, recordings[rank % len(recordings)]) for rank in range(ranks)]
    interval_ns = interval_of(ranks) * 1e9
    due = sorted(
        (
            (batch.at_ns, i, batch)
            for i, one in enumerate(senders)
            for batch in one.recording.drained(interval_ns, i / ranks * interval_ns)  # not all at the same moment
        ),
        key=lambda one: one[:2],
    )
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    begin, round_ = time.monotonic_ns(), 0
    while True:
        shift = begin + round_ * lasts_ns
        for at, number, batch in due:
            wait_ms = max(0, (shift + at - time.monotonic_ns()) // 1_000_000)
            if poller.poll(wait_ms):
                context.destroy(linger=0)
                return
            senders[number].send(batch, round_, shift)
        round_ += 1


if __name__ == "__main__":
    main(sys.argv[1:])
