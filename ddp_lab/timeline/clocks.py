"""One time axis for ranks of several hosts: that of this machine's monotonic clock.

Hosts are queried for their time over the wire, and their ranks' events are moved to this axis when they arrive; see
[Note: questions and answers] in `ddp_lab.analysis.clocks` for the estimate.

[Note: no jumps]
Every new answer changes the estimate a little, and applying it directly would distort spans that are longer than a
batch. So the applied offset is a line without jumps, which follows the estimate by at most a millisecond per second;
events are never moved twice. The distance between the line and the estimate counts as uncertainty.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ..analysis.clocks import ClockOffset, Questions
from ..formatting import label_of
from ..protocol.events import Batch

__all__ = ["TIMES", "ClockLine", "HostClock", "HostClocks", "clocks_of"]

TIMES = ("host_ns", "device_begin_ns", "device_end_ns")
"""Fields of an event that are times of its host."""

_FIRST_QUESTIONS = 16
_QUESTIONS = 4
_INTERVAL_S = 2.0
_ANSWER_S = 1.0
_STEEPEST = 1e-3
_KNOTS = 2_048  # more than an hour


@dataclass(frozen=True)
class HostClock:
    """The clock alignment of a host.

    Attributes:
        host: its name.
        ranks: its ranks.
        offset_ns: the offset that was last added to its times.
        uncertain_ns: the uncertainty of the offset (±).
        drift: how fast its clock falls behind, in seconds per second.
    """

    host: str
    ranks: tuple[int, ...]
    offset_ns: int
    uncertain_ns: int
    drift: float

    def __str__(self) -> str:
        by = f"{self.offset_ns / 1e6:+.3f} ms" if abs(self.offset_ns) < 1e9 else f"{self.offset_ns / 1e9:+,.6f} s"
        return (
            f"Timestamps of {label_of(self.ranks)} on {self.host} were clock-aligned with the other hosts by {by} ± "
            f"{self.uncertain_ns / 1e6:.3f} ms"
        )


def clocks_of(statuses: Mapping[int, Mapping[str, Any]]) -> tuple[HostClock, ...]:
    """The clocks in the ranks' statuses; invalid ones (a file may contain anything) are ignored.

    Args:
        statuses: rank -> its status.
    """
    found: dict[str, HostClock] = {}
    for rank, status in sorted(statuses.items()):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            told = status["clock"]
            known = found.get(str(told["host"]))
            ranks = (*known.ranks, rank) if known is not None else (rank,)
            numbers = int(told["offset_ns"]), int(told["uncertain_ns"]), float(told["drift"])
            found[str(told["host"])] = HostClock(str(told["host"]), ranks, *numbers)
    return tuple(found.values())


class ClockLine:
    """Offset by time of another clock: straight pieces without jumps. See [Note: no jumps].

    Args:
        at_ns: the first time, on the other clock; the same offset applies before it.
        offset_ns: the offset at that time.
        slope: how fast the offset grows after it.
    """

    def __init__(self, at_ns: int, offset_ns: int, slope: float) -> None:
        self._at = [at_ns]
        self._offset = [offset_ns]
        self._slope = slope

    def offset(self, at_ns: int) -> int:
        """The offset to add to a time of the other clock."""
        return int(self.offsets(at_ns))

    def offsets(self, at_ns: Any) -> Any:
        """The same for an array of int64."""
        origin, first = self._at[-1], self._offset[-1]  # floats of small numbers are exact
        knots = np.array([one - origin for one in self._at], np.float64)
        values = np.array([one - first for one in self._offset], np.float64)
        passed = np.asarray(at_ns - origin, np.float64)
        found = np.where(passed >= 0, passed * self._slope, np.interp(passed, knots, values))
        return first + np.rint(found).astype(np.int64)

    def follow(self, now_ns: int, offset_ns: int, drift: float, seconds: float) -> None:
        """Moves towards an estimate, to reach it in this many seconds if that is not too steep."""
        if now_ns <= self._at[-1]:
            return
        here = self.offset(now_ns)
        self._at.append(now_ns)
        self._offset.append(here)
        towards = (offset_ns - here) / (seconds * 1e9)
        self._slope = drift + min(_STEEPEST, max(-_STEEPEST, towards))
        if len(self._at) > _KNOTS:
            del self._at[: _KNOTS // 2], self._offset[: _KNOTS // 2]


@dataclass
class _Asked:
    """One clock that is queried: of a host, or of several that share one."""

    clock: str
    questions: Questions = field(default_factory=Questions)
    line: ClockLine | None = None


class Channel(Protocol):
    """The part of a `Wire` that is used here."""

    def times(self, ranks: Sequence[int], timeout: float) -> dict[int, tuple[int, int, int]]:
        """rank -> when it was queried, its answer, when that arrived."""


class HostClocks:
    """Queries the hosts of a cluster for their time regularly, and moves their ranks' events to one time axis.

    Args:
        wire: the channel to the ranks.
        hosts: returns host's name -> name of its clock, and its ranks.
        own: name of this machine's clock: events of hosts with this clock are not moved.
        tell: called with a rank and ``{"clock": {...}}`` when more is known about its clock.
    """

    def __init__(
        self,
        wire: Channel,
        hosts: Callable[[], Mapping[str, tuple[str, tuple[int, ...]]]],
        own: str,
        tell: Callable[[int, dict[str, Any]], object],
    ) -> None:
        self._wire = wire
        self._hosts = hosts
        self._own = own
        self._tell = tell
        self._asked: dict[str, _Asked] = {}  # by host
        self._host_of: dict[int, str] = {}
        self._known: dict[str, HostClock] = {}  # what was told last
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ask_for_ever, name="ddp_lab-clocks", daemon=True)

    def begin(self) -> None:
        """Queries all hosts now: ranks have joined, perhaps on a host that was restarted."""
        self._known.clear()
        self._ask(_FIRST_QUESTIONS)
        if not self._thread.is_alive() and not self._stopping.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Stops the queries."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def placed(self, batch: Batch) -> Batch:
        """A batch with its times on this machine's clock."""
        line = self._line_of(batch.rank)
        if line is None or not len(batch.events):
            return batch
        events = batch.events.copy()
        for name in TIMES:
            given = events[name] != 0
            events[name][given] += line.offsets(events[name][given])
        return replace(batch, events=events)

    def on_axis(self, rank: int, time_ns: int) -> int:
        """A time of a rank's host on this machine's clock."""
        line = self._line_of(rank)
        return time_ns if line is None else time_ns + line.offset(time_ns)

    def clocks(self) -> tuple[HostClock, ...]:
        """The clock alignment of each other host."""
        now_ns = time.monotonic_ns()
        with self._lock:
            found = [(host, asked.line, asked.questions.offset(now_ns)) for host, asked in self._asked.items()]
            ranks = {host: tuple(rank for rank, name in self._host_of.items() if name == host) for host, *_ in found}
        return tuple(
            _told(host, ranks[host], line, estimate, now_ns)
            for host, line, estimate in found
            if line is not None and estimate is not None
        )

    def _line_of(self, rank: int) -> ClockLine | None:
        with self._lock:
            asked = self._asked.get(self._host_of.get(rank, ""))
            return None if asked is None else asked.line

    def _ask_for_ever(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._ask(_QUESTIONS)

    def _ask(self, questions: int) -> None:
        hosts = {name: each for name, each in self._hosts().items() if each[0] != self._own}
        with self._lock:
            self._host_of = {rank: name for name, (_, ranks) in hosts.items() for rank in ranks}
            for name, (clock, _) in hosts.items():
                if name not in self._asked or self._asked[name].clock != clock:
                    self._asked[name] = _Asked(clock)
        for name, (_, ranks) in hosts.items():
            for number in range(questions):
                if self._stopping.is_set() or not self._ask_once(name, ranks[number % len(ranks)]):
                    break
        self._follow()

    def _ask_once(self, host: str, rank: int) -> bool:
        """Whether the rank answered."""
        answers = self._wire.times([rank], _ANSWER_S)
        for sent_ns, answer_ns, received_ns in answers.values():
            with self._lock:
                self._asked[host].questions.add(sent_ns, answer_ns, received_ns)
        return bool(answers)

    def _follow(self) -> None:
        """Moves the lines towards the newest estimates, and reports them."""
        now_ns = time.monotonic_ns()
        with self._lock:
            for asked in self._asked.values():
                estimate = asked.questions.offset(now_ns)
                if estimate is None:
                    continue
                if asked.line is None:
                    asked.line = ClockLine(now_ns - estimate.ns, estimate.ns, estimate.drift)
                else:
                    asked.line.follow(now_ns - estimate.ns, estimate.ns, estimate.drift, _INTERVAL_S)
        for known in self.clocks():
            if not _worth_telling(known, self._known.get(known.host)):
                continue
            self._known[known.host] = known
            told = {name: value for name, value in asdict(known).items() if name != "ranks"}
            for rank in known.ranks:
                self._tell(rank, {"clock": told})


def _worth_telling(known: HostClock, told: HostClock | None) -> bool:
    """Whether it is new, or its uncertainty changed by a tenth: views must then redraw it."""
    if told is None or told.ranks != known.ranks:
        return True
    change = abs(known.uncertain_ns - told.uncertain_ns), abs(known.offset_ns - told.offset_ns)
    return max(change) > told.uncertain_ns / 10


def _told(host: str, ranks: tuple[int, ...], line: ClockLine, estimate: ClockOffset, now_ns: int) -> HostClock:
    applied = line.offset(now_ns - estimate.ns)
    uncertain = estimate.uncertain_ns + abs(applied - estimate.ns)
    return HostClock(host, ranks, applied, uncertain, estimate.drift)
