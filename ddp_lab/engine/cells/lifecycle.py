"""A rank's cells and process groups, without I/O, threads and clock: events in, actions out.

    IDLE ─ begin ─ RUNNING ─┬─ fail ─ FAILED ─┬─ end ─ ENDED ─ begin ─ RUNNING …
                            └─────────────────┘

    groups: whole ─ unblock, shut_down ─ lost to the cell that runs or has just ended ─ join ─ whole

`Agent` tells it what happens, and carries out what it answers. So which cell is interrupted, and for which one the
groups are shut down, can be tested in any order of events. What the main thread does has one order: another one
raises, with the story. Messages of the client come in any order, also for cells that are queued or have ended.

The main thread owns `begin`, `fail`, `end`, `join` and `raise_interrupt`. Callers hold a lock, except for `fail`, `end`
and `raise_interrupt`: what these write, only the main thread writes, and it must not wait for a thread that shuts
groups down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

_REMEMBERED = 256  # ids of interrupted cells
_STORY = 40  # events that are remembered


class Phase(Enum):
    """Where the last cell that began is in its life."""

    IDLE = "has run no cell"
    RUNNING = "runs a cell's own code"
    FAILED = "reports how a cell failed"
    ENDED = "has ended its cell"


_POSSIBLE = {
    "begin": (Phase.IDLE, Phase.ENDED),
    "fail": (Phase.RUNNING, Phase.FAILED),  # twice: once the cell's code has failed, what runs it may fail too
    "end": (Phase.RUNNING, Phase.FAILED),
    "join": (Phase.IDLE, Phase.ENDED),
}


class Task(Enum):
    """What the agent can do for a cell."""

    INTERRUPT = "interrupt the cell until its code has ended"
    UNBLOCK = "let the groups be shut down, at once"
    UNBLOCK_WHEN_STILL = "let the groups be shut down, when no more data moves"
    SHUT_DOWN = "shut the groups down"
    ABORT_REST = "abort, a moment later, what still waits"


@dataclass(frozen=True)
class Action:
    """What the agent is to do now, for which cell."""

    task: Task
    cell_id: str


@dataclass
class RankCell:
    """A cell that has begun on this rank.

    Attributes:
        id: of the cell run.
        label: its name in tracebacks.
        began_ns: when, on the host's monotonic clock.
        phase: where it is; the main thread's.
        raised: its own code has been interrupted, since the last request; without a lock.
        interrupted: the client has asked for it; under the lock, as the next two.
        settled: no group may be lost to it any more: it has ended on all ranks, or here without a failure.
        shut_down: the groups have been shut down for it.
    """

    id: str
    label: str
    began_ns: int
    phase: Phase = Phase.RUNNING
    raised: bool = False
    interrupted: bool = False
    settled: bool = False
    shut_down: bool = False


@dataclass(frozen=True)
class Loss:
    """That the groups are lost.

    Attributes:
        cell: during which; also while its failure is reported, and until it has ended on all ranks.
        by: the other rank that failed first; None: this one failed, or was interrupted.
    """

    cell: RankCell
    by: int | None

    @property
    def cause(self) -> str:
        """Why: this rank ``"failed"``, was ``"interrupted"``, or ``"rank 1"`` failed."""
        if self.by is not None:
            return f"rank {self.by}"
        return "interrupted" if self.cell.interrupted else "failed"


class CellLifecycle:
    """The states of a rank's cells and groups. Any thread may read it.

    Attributes:
        cell: the last that began here; its fields say who writes them.
        last_ended: the last cell whose own code ended here, and whether it failed; the main thread's.
        unblocked: how the groups were lost; None: they are whole; under the lock.
    """

    def __init__(self) -> None:
        self.cell: RankCell | None = None
        self.last_ended: tuple[str, bool] | None = None
        self.unblocked: Loss | None = None
        self._cancelled_cells: deque[str] = deque(maxlen=_REMEMBERED)  # begun or not; under the lock
        self._early_unblock: tuple[str, int | None] | None = None  # a cell to begin, who failed in it; under the lock
        self._story: deque[str] = deque(maxlen=_STORY)

    # Events of the main thread

    def begin(self, cell_id: str, label: str, now_ns: int) -> list[Action]:
        """A cell begins."""
        phase, self.cell = self.phase, RankCell(cell_id, label, now_ns)  # also if that is impossible: the next one can
        self._expect("begin", cell_id, phase)
        actions = []
        if self._early_unblock is not None and self._early_unblock[0] == cell_id:
            self._lose(self._early_unblock[1])
            self._early_unblock = None
            actions.append(Action(Task.UNBLOCK, cell_id))
        if cell_id in self._cancelled_cells:
            self.cell.interrupted = True
            actions.append(Action(Task.INTERRUPT, cell_id))
        return actions

    def fail(self, cell_id: str) -> None:
        """The cell's own code has failed; how is found out next."""
        self._leave("fail", cell_id, Phase.FAILED, True)

    def end(self, cell_id: str, failed: bool) -> None:
        """The cell has ended."""
        self._leave("end", cell_id, Phase.ENDED, failed)

    def join(self) -> None:
        """The groups are whole: the rank has joined."""
        self._expect("join", "", self.phase)
        self.unblocked = None
        if self.cell is not None:
            self.cell.settled = True

    def raise_interrupt(self) -> None:
        """The running cell's own code is interrupted."""
        if self.cell is not None:
            self.cell.raised = True

    # Events of any thread

    def drop_interrupt(self) -> None:
        """Python has dropped the exception that interrupted the cell."""
        if self.cell is not None:
            self.cell.raised = False

    def interrupt(self, cells: Collection[str]) -> list[Action]:
        """The client interrupts cells; one that has not begun here as soon as it does."""
        self._story.append(f"interrupt {', '.join(cells)}")
        self._cancelled_cells.extend(cells)
        cell, phase = self.cell, self.phase
        if cell is None or cell.id not in cells or phase is Phase.ENDED:
            return []
        cell.interrupted = True
        if phase is Phase.FAILED:  # an interrupted peer has closed a connection; the failure is being explained
            return []
        cell.raised = False
        return [Action(Task.INTERRUPT, cell.id)]

    def unblock(self, cell_id: str | None, by: int | None) -> list[Action]:
        """A rank has failed in a cell (None: in whichever runs); `by`: which, None for this one."""
        self._story.append(f"unblock {cell_id} by {by}")
        cell = self.cell
        if cell_id is not None and (cell is None or cell.id != cell_id):
            self._early_unblock = cell_id, by
            return []
        if cell is None or cell.settled:
            return []
        self._lose(by)
        # One that has failed is shut down by its own thread.
        return [Action(Task.UNBLOCK_WHEN_STILL, cell.id)] if cell.phase is Phase.RUNNING else []

    def shut_down(self, cell_id: str) -> list[Action]:
        """A thread would shut the groups down for a cell; nothing to do if that is settled, or another one began."""
        cell = self.cell
        if cell is None or cell.id != cell_id or cell.settled:
            return []
        self._lose(None)
        first, cell.shut_down = not cell.shut_down, True
        tasks = (Task.SHUT_DOWN, Task.ABORT_REST) if first else (Task.SHUT_DOWN,)
        return [Action(task, cell_id) for task in tasks]

    def settle(self, cell_id: str | None) -> None:
        """No group may be lost to this cell (None: to the last one, if it has ended) any more."""
        cell = self.cell
        if cell is not None and (cell.id == cell_id or (cell_id is None and self.open is None)):
            cell.settled = True

    # What it says

    @property
    def phase(self) -> Phase:
        """Of the last cell that began."""
        return Phase.IDLE if self.cell is None else self.cell.phase

    @property
    def open(self) -> str | None:
        """The cell that has begun and not ended."""
        cell = self.cell
        return cell.id if cell is not None and cell.phase in (Phase.RUNNING, Phase.FAILED) else None

    @property
    def word(self) -> str:
        """`Status.state`."""
        if self.phase is Phase.RUNNING:
            return "running"
        return "idle" if self.unblocked is None else "unblocked"

    def runs(self, cell_id: str) -> bool:
        """Whether this cell's own code runs."""
        cell = self.cell
        return cell is not None and cell.id == cell_id and cell.phase is Phase.RUNNING

    def may_signal(self, cell_id: str) -> bool:
        """Whether a signal would interrupt this cell, and not another one, and is still needed."""
        return self.runs(cell_id) and self.cell is not None and not self.cell.raised

    def is_settled(self, cell_id: str) -> bool:
        """Whether no group may be lost to this cell any more."""
        cell = self.cell
        return cell is None or cell.id != cell_id or cell.settled

    def explains(self, cell_id: str) -> bool:
        """Whether it is known why this cell's collectives fail: it is interrupted, or the groups are lost to it."""
        cell, loss = self.cell, self.unblocked
        if cell is None or cell.id != cell_id:
            return False
        return cell.interrupted or (loss is not None and loss.cell is cell)

    # Rules

    def _leave(self, event: str, cell_id: str, phase: Phase, failed: bool) -> None:
        self._expect(event, cell_id, self.phase)
        assert self.cell is not None
        self.cell.phase = phase
        self.last_ended = cell_id, failed

    def _lose(self, by: int | None) -> None:
        if self.unblocked is None and self.cell is not None:
            self.unblocked = Loss(self.cell, by)

    def _expect(self, event: str, cell_id: str, phase: Phase) -> None:
        """Notes an event of the main thread in the story.

        Raises:
            RuntimeError: it can't happen now.
        """
        said = f"{event} {cell_id}".rstrip()
        self._story.append(f"{said} ({phase.name})")
        is_last = event in ("begin", "join") or (self.cell is not None and self.cell.id == cell_id)
        if phase not in _POSSIBLE[event] or not is_last:
            raise RuntimeError(f"a rank that {phase.value} can't be told {said!r}. Its story: {'; '.join(self._story)}")
