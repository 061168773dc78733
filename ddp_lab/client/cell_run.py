"""CellRun: one cell, or one function, on some ranks: sent, shown while it runs, and collected.

ipyparallel's I/O thread only appends to a queue (`CellRun._put`); the thread that waits takes from it and shows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ClusterError
from . import engine_messages
from . import failures as reports
from .engine_messages import RankFunction, check_sendable
from .outputs import Board, OutputBoard, default_board
from .rank_sets import label_of
from .rank_states import RankStates
from .results import CellResult, CellStatus, RemoteValue

__all__ = ["CellOptions", "CellResult", "CellRun", "CellStatus", "RankFunction", "RemoteValue", "check_sendable"]

_NEVER = float("inf")
_FIRST_REFRESH_S = 0.04  # a short cell is shown once, complete
_REFRESH_S = 0.08
_REFRESH_SHARE = 5  # at most a sixth of the time goes into showing
_LOOK_S = 0.2  # how often a silent cell looks for lost ranks
_ANNOUNCE_S = 0.5  # how long a failure waits for the other ranks before it is announced
_BEGIN_S = 0.05  # from a rank's word that it begins until an interrupt reaches the cell's own code
_GRACE_S = 5.0  # how long an interrupted rank may take to end


@dataclass(frozen=True)
class CellOptions:
    """How a cell is run and watched.

    Attributes:
        label: the cell's name in tracebacks and errors.
        args: arguments of the function, where a function is run.
        kwargs: its keyword arguments.
        board: shows the outputs; None for the one that fits this process.
        interrupt: makes these ranks stop what they do; returns at once.
        lost_ranks: rank -> why, for ranks whose process is gone; cheap.
        timeout: seconds after which the ranks are interrupted; None for no limit.
    """

    label: str = "cell"
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    board: Board | None = None
    interrupt: Callable[[Sequence[int]], None] | None = None
    lost_ranks: Callable[[], Mapping[int, str]] | None = None
    timeout: float | None = None


class CellRun:
    """One execution of a cell on a set of ranks.

    `submit` sends it; then either `wait` shows outputs in the calling thread until every rank has ended, or `follow`
    does so in a thread of its own and `wait` is called later, or never.

    Args:
        client: the ipyparallel client.
        engine_of_rank: rank -> engine id.
        code: a cell's text, or a function to call on each rank; one of the client's own file or notebook travels by
            value and sees the rank's namespace.
        ranks: where to run.
        cell_id: unique id of this run.
        options: see `CellOptions`.
    """

    def __init__(
        self,
        client: Any,
        engine_of_rank: Mapping[int, int],
        code: str | Callable[..., Any] | RankFunction,
        ranks: Sequence[int],
        *,
        cell_id: str,
        options: CellOptions | None = None,
    ) -> None:
        self.cell_id = cell_id
        self.options = options or CellOptions()
        self.ranks = tuple(sorted(ranks))
        self._client = client
        self._engine_of_rank = dict(engine_of_rank)
        self._code = code
        self._board = self.options.board or default_board(self.ranks)
        self._states = RankStates(self.ranks)
        self._inbox: deque[tuple[int, str, Any]] = deque()
        self._unshown: list[tuple[int, str, Any]] = []
        self._wake = threading.Event()
        self._begin = 0.0
        self._end: float | None = None
        self._refresh_at = _NEVER
        self._refresh_after = 0.0
        self._timed_out: tuple[int, ...] | None = None
        self._late: list[int] = []
        self._silent: tuple[int, ...] = ()
        self._announced = False
        self._follower: threading.Thread | None = None
        self._follower_error: BaseException | None = None

    # -- sending

    def submit(self) -> CellRun:
        """Sends the cell to every rank and returns at once.

        Raises:
            ClusterError: a rank has no engine any more; nothing was sent.
        """
        self._begin = time.monotonic()
        engine_messages.send(self._client, self._engines(), self._cell(), self._code, self._put)
        return self

    def _engines(self) -> dict[int, int]:
        missing = [rank for rank in self.ranks if rank not in self._engine_of_rank]
        if missing:
            raise ClusterError(f"{label_of(missing)} has no engine: it died or was never started")
        return {rank: self._engine_of_rank[rank] for rank in self.ranks}

    def _cell(self) -> dict[str, Any]:
        options = self.options
        cell = {"id": self.cell_id, "label": options.label}
        return {**cell, "args": tuple(options.args), "kwargs": dict(options.kwargs)}

    def _put(self, rank: int, kind: str, content: Any) -> None:
        """On ipyparallel's I/O thread."""
        self._inbox.append((rank, kind, content))
        if kind != "begun":
            self._wake.set()

    # -- waiting

    def wait(self, tick: Callable[[], None] | None = None) -> CellResult:
        """Shows outputs as they come and returns when every rank has ended.

        Args:
            tick: called in this thread after something was shown, and at least every 0.2 s.

        Raises:
            CellError: the cell failed on a rank, a rank died, or the time limit passed.
            KeyboardInterrupt: the user interrupted; the ranks were interrupted too, and have ended unless the
                error names them. A second interrupt returns at once.
        """
        try:
            if self._follower is not None:
                while self._follower.is_alive():
                    self._follower.join(_LOOK_S)
                    if tick is not None:
                        tick()
                if self._follower_error is not None:
                    raise self._follower_error
                if isinstance(self._board, OutputBoard):
                    self._board.show_again()
            else:
                self._pump(tick)
        except KeyboardInterrupt:
            self._abort(tick)
            raise self._interrupted() from None
        return self.result()

    def follow(self) -> CellRun:
        """Keeps outputs coming from a thread of its own until the cell has ended; returns at once."""

        def main() -> None:
            try:
                self._pump(None)
            except BaseException as error:  # noqa: BLE001  the thread's top: kept for `wait`
                self._follower_error = error

        self._follower = threading.Thread(target=main, name=f"ddp_lab-{self.cell_id}", daemon=True)
        self._follower.start()
        return self

    def interrupt(self) -> None:
        """Interrupts the ranks that have not ended; returns at once."""
        self._late = [rank for rank in self._states.open() if not self._states[rank].begun_s]
        self._interrupt(self._states.open())

    def _interrupt(self, ranks: Sequence[int]) -> None:
        if ranks and self.options.interrupt is not None:
            self.options.interrupt(ranks)

    def __repr__(self) -> str:
        words = self._states.words()
        ranks = {word: [rank for rank in words if words[rank] == word] for word in dict.fromkeys(words.values())}
        states = ", ".join(f"{label_of(members)} {word}" for word, members in ranks.items())
        return f"<CellRun {self.options.label}: {states}, {self.status().seconds:.1f} s; .wait(), .interrupt()>"

    @property
    def done(self) -> bool:
        """Whether every rank has ended."""
        return self._end is not None

    def result(self) -> CellResult:
        """The values and outputs by rank.

        Raises:
            CellError: as `wait`.
            ClusterError: the cell still runs.
        """
        if self._end is None:
            raise ClusterError(f"cell {self.options.label} still runs on {label_of(self._states.open())}")
        result = self._collected()
        failed = self._states.failures()
        if not failed:
            return result
        if self._timed_out:
            error = reports.timeout_error(failed, self._timed_out, self.options.label, self.options.timeout or 0.0)
        else:
            error = reports.cell_error(failed, self.options.label)
        error.result = result  # type: ignore[attr-defined]
        raise error

    def status(self) -> CellStatus:
        """Which ranks still run, ended or failed, and since when."""
        seconds = (self._end or time.monotonic()) - self._begin
        return CellStatus(self.cell_id, self.options.label, self._states.words(), seconds)

    # -- the loop

    def _pump(self, tick: Callable[[], None] | None, until: float = _NEVER) -> None:
        """Takes messages and shows them until all ranks have ended, or until the time `until`."""
        look_at = time.monotonic() + _LOOK_S
        while True:
            self._wake.clear()
            self._take()
            now = time.monotonic()
            if self._states.finished() or now >= until:
                break
            if now >= self._refresh_at:
                self._show()
            if now >= look_at:
                look_at = now + _LOOK_S
                self._look(now)
            if tick is not None:
                tick()
            self._wake.wait(max(0.0, min(self._refresh_at, look_at, until) - time.monotonic()))
        self._feed_board()
        self._board.refresh(final=True)
        if not self._states.open():
            self._end = self._end or time.monotonic()

    def _take(self) -> None:
        while self._inbox:
            rank, kind, content = self._inbox.popleft()
            state = self._states[rank]
            if kind == "idle":
                state.idle = True
            elif kind == "begun":
                state.begun_s = time.monotonic()
            elif kind == "reply":
                state.ended_s = time.monotonic()
                if isinstance(content, Mapping):
                    state.report = content
                elif not state.ended:
                    self._states.take_error(rank, content, self._lost())
            else:
                state.outputs.append({"output_type": kind, **content})
                if kind != "error":
                    self._unshown.append((rank, kind, content))
        if self._unshown and self._refresh_at == _NEVER:
            self._refresh_at = max(time.monotonic() + _FIRST_REFRESH_S, self._refresh_after)

    def _show(self) -> None:
        begin = time.monotonic()
        self._refresh_at = _NEVER
        self._feed_board()
        self._board.refresh()
        now = time.monotonic()
        self._refresh_after = now + max(_REFRESH_S, _REFRESH_SHARE * (now - begin))

    def _feed_board(self) -> None:
        """Of outputs within one refresh, every rank's first is shown, then every rank's second, ...: who was first by a
        millisecond says nothing, and equal outputs meet."""
        unshown, self._unshown = self._unshown, []
        counts = dict.fromkeys(self.ranks, 0)
        turns = []
        for rank, kind, content in unshown:
            counts[rank] += 1
            turns.append((counts[rank], rank, kind, content))
        for _, rank, kind, content in sorted(turns, key=lambda turn: turn[:2]):
            self._board.feed(rank, kind, content)

    def _look(self, now: float) -> None:
        """Looks for lost ranks, for ranks that go on after another one failed, and at the time limit."""
        gone = self._lost()
        for rank in self._states.open():
            if rank in gone:
                self._states.give_up(reports.lost(rank, gone[rank]))
        self._interrupt_late(now)
        self._announce_failure(now)
        limit = self.options.timeout
        if limit is None or now - self._begin < limit:
            return
        if self._timed_out is None:
            self._timed_out = self._states.open()
            self.interrupt()
        elif now - self._begin > limit + _GRACE_S:
            for rank in self._states.open():
                self._states.give_up(reports.timed_out(rank, limit, time.monotonic_ns()))

    def _interrupt_late(self, now: float) -> None:
        """Interrupts ranks that began the cell only after the interrupt, and so have not seen it."""
        due = [rank for rank in self._late if 0 < self._states[rank].begun_s < now - _BEGIN_S]
        if due:
            self._late = [rank for rank in self._late if rank not in due]
            self._interrupt([rank for rank in due if rank in self._states.open()])

    def _announce_failure(self, now: float) -> None:
        """Says at once that a rank failed when others go on, so that nobody waits for them unaware."""
        failed = self._states.failed_before(now - _ANNOUNCE_S) if not self._announced else None
        if failed is not None and self._states.open():
            self._announced = True
            self._feed_board()
            self._board.announce([failed.rank], reports.announcement(failed, self._states.open()))

    def _abort(self, tick: Callable[[], None] | None) -> None:
        """After the user's interrupt: stops the ranks and collects what they still say, for a bounded time."""
        with contextlib.suppress(KeyboardInterrupt):
            self.interrupt()
            if self._follower is not None:
                self._follower.join(_GRACE_S)
            else:
                self._pump(tick, until=time.monotonic() + _GRACE_S)
        self._silent = self._states.open()
        self._end = self._end or time.monotonic()

    def _interrupted(self) -> KeyboardInterrupt:
        error = KeyboardInterrupt(f"cell {self.options.label} on {label_of(self.ranks)}")
        lines = reports.interrupt_report(self._states.failures(), self._silent, self.options.label)
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        error.result = self._collected()  # type: ignore[attr-defined]
        return error

    def _lost(self) -> Mapping[int, str]:
        return self.options.lost_ranks() if self.options.lost_ranks is not None else {}

    def _collected(self) -> CellResult:
        seconds = (self._end or time.monotonic()) - self._begin
        return CellResult(self.cell_id, self.options.label, self._states.values(), self._states.outputs(), seconds)
