"""The state of one cell run, without I/O and without a clock: events in, actions out.

    NEW ─ sent ─┬─ QUEUED ─ begun ─┬─ RUNNING ─ all ranks have ended ─┬─ ENDED
                └──────────────────┘                                  │
                  QUEUED, RUNNING ─ abandoned ─ ABANDONED ─ ended ────┘

`CellRun` tells it what it hears and what time it is, and carries out what it answers. So which rank is given up, and
when peers are interrupted, can be tested in any order of events. What can't happen raises, with the run's story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ...errors import RankFailure
from ...protocol.messages import CellReport
from . import failures as reports

ANNOUNCE_S = 0.5  # how long a failure waits for the other ranks before it is announced
GRACE_S = 5.0  # how long an interrupted rank may take to end
UNBLOCKED_S = 0.15  # how long the peers of a lost rank may take to end by themselves: their collectives fail
_STORY = 40  # events that are remembered


class Phase(Enum):
    """Where a run is in its life."""

    NEW = "not sent"
    QUEUED = "its ranks run earlier cells"
    RUNNING = "running"
    ABANDONED = "interrupted by the user, who waits a bounded time for the ranks"
    ENDED = "ended"


_LIVES = (Phase.QUEUED, Phase.RUNNING, Phase.ABANDONED)
_HEARS = (*_LIVES, Phase.ENDED)  # ranks of an abandoned run may end after it


class _Peers(Enum):
    """What has been done for the ranks that may wait for one that was lost."""

    WHOLE = "no rank was lost"
    ENDING = "they may end by themselves"
    INTERRUPTED = "they were interrupted"


@dataclass(frozen=True)
class Begin:
    """The first of its ranks has begun a cell that was queued."""


@dataclass(frozen=True)
class Interrupt:
    """Interrupt these ranks."""

    ranks: Sequence[int]


@dataclass(frozen=True)
class Lose:
    """Give this rank up: its process has ended, or is being ended."""

    rank: int
    why: str


@dataclass(frozen=True)
class TimeOut:
    """Give this rank up: it does not heed the interrupt at the time limit."""

    rank: int


@dataclass(frozen=True)
class Announce:
    """Show that a rank has failed while others run on."""

    failure: RankFailure
    others: Sequence[int]


Action = Begin | Interrupt | Lose | TimeOut | Announce


@dataclass
class RankState:
    """The cell on one rank.

    Attributes:
        report: how the rank says that it ended.
        failure: why there will be no report.
        begun_s: when it began, in seconds on the monotonic clock; None if it has not.
        ended_s: when it ended, in seconds on the monotonic clock.
    """

    report: CellReport | None = None
    failure: RankFailure | None = None
    begun_s: float | None = None
    ended_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the rank has reported how the cell ended, or no longer can."""
        return self.report is not None or self.failure is not None

    @property
    def word(self) -> str:
        """One of "queued", "running", "done", "failed", "interrupted"."""
        if not self.ended:
            return "queued" if self.begun_s is None else "running"
        if self.report is None:
            return "failed"
        if self.report.ok:
            return "done"
        return "interrupted" if self.report.name == reports.INTERRUPTED else "failed"


class CellState:
    """The states of a run and of its ranks; used by the thread that waits, or follows. Others may read it.

    Args:
        ranks: its ranks.
        timeout: seconds after which they are interrupted; None for no limit.
        on_axis: converts a rank's host time to one common clock; None: all share one.

    Attributes:
        phase: where the run is.
        sent_s: when it was sent, in seconds on the monotonic clock.
        ended_s: when it ended; None before.
        timed_out: the ranks that had not ended at the time limit; empty before.
        silent: the ranks that had not ended when an abandoned run ended.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        timeout: float | None = None,
        on_axis: Callable[[int, int], int] | None = None,
    ) -> None:
        self.phase = Phase.NEW
        self.sent_s = 0.0
        self.ended_s: float | None = None
        self.timed_out: tuple[int, ...] = ()
        self.silent: tuple[int, ...] = ()
        self._timeout, self._on_axis = timeout, on_axis
        self._ranks = {rank: RankState() for rank in ranks}
        self._lost: dict[int, str] = {}  # rank -> how its process ended, or why it is ended on purpose
        self._peers = _Peers.WHOLE
        self._first_lost_s = 0.0
        self._may_announce = True  # no failure was announced, and no interrupt makes ranks end
        self._story: deque[str] = deque(maxlen=_STORY)

    def __getitem__(self, rank: int) -> RankState:
        return self._ranks[rank]

    # Events

    def send(self, now: float, queued: bool) -> None:
        """The cell is on its way; `queued`: its ranks may run earlier ones."""
        self._expect("sent", now, Phase.NEW)
        self.sent_s, self.phase = now, Phase.QUEUED if queued else Phase.RUNNING
        if not queued:
            for state in self._ranks.values():
                state.begun_s = now

    def begin(self, rank: int, now: float) -> list[Action]:
        """A rank has begun."""
        self._expect(f"begun on rank {rank}", now, *_HEARS, rank=rank)
        state = self._ranks[rank]
        state.begun_s = state.begun_s or now
        first, self.phase = self.phase is Phase.QUEUED, Phase.RUNNING if self.phase is Phase.QUEUED else self.phase
        return [Begin()] if first else []

    def report(self, rank: int, report: CellReport, now: float) -> None:
        """A rank says how the cell ended."""
        self._expect(f"report of rank {rank}", now, *_HEARS, rank=rank)
        self._ranks[rank].report, self._ranks[rank].ended_s = report, now

    def give_up(self, failure: RankFailure, now: float) -> None:
        """A rank will not report."""
        self._expect(f"rank {failure.rank} given up: {failure.name}", now, *_HEARS, rank=failure.rank)
        state = self._ranks[failure.rank]
        state.failure, state.ended_s = failure, now
        if failure.name == reports.LOST and self._peers is _Peers.WHOLE:
            self._peers, self._first_lost_s = _Peers.ENDING, now

    def interrupt(self) -> list[Action]:
        """The ranks are to end it; those that have not begun it, as soon as they do. From any thread."""
        self._may_announce = False  # ranks that end because of it need no announcement
        ranks = self.open()
        return [Interrupt(ranks)] if ranks else []

    def look_for_lost(self, now: float, lost: Mapping[int, str]) -> list[Action]:
        """Time has passed, and these ranks have no process any more: rank -> how it ended."""
        self._expect("look", now, *_HEARS)
        actions: list[Action] = [Lose(rank, lost[rank]) for rank in self.open() if rank in lost]
        if not actions and self._peers is _Peers.ENDING and now - self._first_lost_s >= UNBLOCKED_S:
            self._peers = _Peers.INTERRUPTED
            return self.interrupt()
        return actions

    def look_for_failures(self, now: float, running: Collection[int]) -> list[Action]:
        """Time has passed, and the cell's own code has not ended on these ranks, as far as known."""
        self._expect("look", now, *_HEARS)
        return self._announcement(now, running)

    def look_at_limit(self, now: float) -> list[Action]:
        """Time has passed: the time limit may have."""
        self._expect("look", now, *_HEARS)
        limit, begun = self._timeout, self.begun()
        if limit is None or begun is None or now - begun < limit:
            return []
        if not self.timed_out:
            self.timed_out = self.open()
            return self.interrupt()
        return [TimeOut(rank) for rank in self.open()] if now - begun > limit + GRACE_S else []

    def abandon(self, now: float) -> list[Action]:
        """The user interrupts, and will wait for a bounded time only."""
        if self.phase is Phase.ENDED:
            return []
        self._expect("abandoned", now, *_LIVES)
        self.phase = Phase.ABANDONED
        return self.interrupt()

    def end(self, now: float) -> bool:
        """The run ends; whether it had not before.

        Raises:
            RuntimeError: ranks are open, and the user has not abandoned it.
        """
        if self.phase is Phase.ENDED:
            return False
        self._expect("ended", now, *([Phase.ABANDONED] if self.open() else _LIVES))
        self.silent, self.ended_s, self.phase = self.open(), now, Phase.ENDED
        return True

    def fail(self, now: float) -> None:
        """Whoever follows it can't any longer: it counts as ended."""
        self.ended_s, self.phase = now, Phase.ENDED

    # What it says

    @property
    def next_s(self) -> float:
        """When it wants to `look` at the latest, because of a lost rank."""
        return self._first_lost_s + UNBLOCKED_S if self._peers is _Peers.ENDING else float("inf")

    def open(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._ranks.items() if not state.ended)

    def begun(self) -> float | None:
        """When the first rank began, in seconds on the monotonic clock; None if none has."""
        return min((state.begun_s for state in self._ranks.values() if state.begun_s is not None), default=None)

    def failures(self) -> dict[int, RankFailure]:
        """Failures by rank, causes first (see `failures.in_order`)."""
        found = []
        for rank, state in self._ranks.items():
            if state.failure is not None:
                found.append(state.failure)
            elif state.report is not None and not state.report.ok:
                made = reports.failure_of(rank, state.report)
                on_axis = self._on_axis
                found.append(made if on_axis is None else replace(made, time_ns=on_axis(rank, made.time_ns)))
        return reports.in_order(found)

    def words(self) -> dict[int, str]:
        """rank -> "queued", "running", "done", "failed" or "interrupted"."""
        return {rank: state.word for rank, state in self._ranks.items()}

    def ends(self) -> dict[int, str]:
        """As `words`, with "unblocked" for ranks that failed because another one did."""
        secondary = {rank for rank, failure in self.failures().items() if failure.secondary}
        return {rank: "unblocked" if rank in secondary else word for rank, word in self.words().items()}

    # Rules

    def _announcement(self, now: float, running: Collection[int]) -> list[Action]:
        """A failure is announced at once while others continue, so that the user does not wait for them unaware."""
        failed = ("failed", "interrupted")
        if not self._may_announce or not any(
            state.word in failed and state.ended_s <= now - ANNOUNCE_S for state in self._ranks.values()
        ):
            return []
        # One that has raised is open until its traceback is rendered, which takes seconds on a busy machine.
        others = sorted(set(running).intersection(self.open()))
        if not others:
            return []
        self._may_announce = False
        return [Announce(next(iter(self.failures().values())), others)]

    def _expect(self, event: str, now: float, *phases: Phase, rank: int | None = None) -> None:
        """Notes an event of the run's story.

        Raises:
            RuntimeError: it can't happen now.
        """
        possible = self.phase in phases and (rank is None or rank in self._ranks)
        if self.phase is Phase.ENDED:
            possible = possible and bool(self.silent)
        if event != "look":
            self._story.append(f"{now - self.sent_s if self.sent_s else 0.0:.3f} s {event} ({self.phase.name})")
        if not possible:
            story = "; ".join(self._story)
            raise RuntimeError(f"a cell run that is {self.phase.value} can't be told {event!r}. Its story: {story}")
