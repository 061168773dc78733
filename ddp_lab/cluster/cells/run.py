"""CellRun: one cell, or one function, on some ranks: sent, shown while it runs, and collected.

The wire's thread only appends to a queue (`CellRun._put`); the thread that waits takes from it and shows. It allows
interrupts only while it sleeps; see [Note: interrupts of the client].
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...control.interrupts import interrupts_allowed, interrupts_deferred
from ...diagnosis.rules import Diagnosis
from ...diagnosis.sources.cells import Watch
from ...errors import CellError, ClusterError, RankFailure
from ...formatting import duration, enumeration, label_of
from ...output.board import Board, default_board
from ...output.display import RunView, write_line
from ...output.logs import CellOutputs
from ...output.throttle import in_turns
from ...protocol.entry_points import CALL, RankFunction
from ...protocol.messages import Cell, CellText, RequestFailure, arguments, report_of
from ..processes.process_watch import ProcessWatch
from ..session import Session
from . import failures as reports
from .front_end import QUESTION, Answers
from .packing import FunctionCall, parameters_of
from .results import CellResult, CellStatus, RemoteValue, value_of
from .state import ANNOUNCE_S, GRACE_S, Action, Announce, Begin, CellState, Interrupt, Lose, Phase, TimeOut

__all__ = ["CellOptions", "CellResult", "CellRun", "CellStatus", "CellText", "RankFunction", "RemoteValue"]

_NEVER = float("inf")
_OF_TEXTS = ("label", "board", "view", "tick")  # options that `Cluster.run` takes by keyword
_FIRST_REFRESH_S = 0.04  # a short cell is shown once, complete
_REFRESH_S = 0.08
_REFRESH_SHARE = 5  # at most a sixth of the time is spent on showing
_LOOK_S = 0.2  # how often a silent cell looks for lost ranks
_LAST_WORDS_S = 0.02  # what a process sent before it ended may still arrive
_ENDED_S = 1.0  # until a rank whose process was terminated is known to be lost
_VIEW_S = 1.0  # between two updates of the progress line
_RESULT_LOST = "finished the cell, but its result was lost with a connection"
_LATE_S = 3.0  # from this duration on, pages opened while the cell runs get its view


@dataclass(frozen=True)
class CellOptions:
    """How a cell is run and watched.

    Attributes:
        label: the cell's name in tracebacks and errors; None: it gets a number.
        name: under which `Cluster.results` has it; "" for none.
        args: arguments of the function, where a function is run.
        kwargs: its keyword arguments.
        board: shows the outputs; None for the one that fits this process.
        view: shows its progress if it is not waited for; None: a widget in a notebook, nothing elsewhere.
        tick: called from time to time while it is waited for.
        timeout: seconds after which the ranks are interrupted; None for no limit.
        hang_seconds: time without progress after which the cell reports the cause; None: it never does.
        after: cells sent before to some of the same ranks that may not have ended: this one waits for them.
    """

    label: str | None = None
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    board: Board | None = None
    view: RunView | None = None
    tick: Callable[[], None] | None = None
    timeout: float | None = None
    hang_seconds: float | None = None
    after: Sequence[CellRun] = ()

    @classmethod
    def of(cls, code: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[str]) -> CellOptions:
        """From the arguments of `Cluster.run`: of a function they are the function's, of a text ours.

        Args:
            code: what is run.
            args: without names.
            kwargs: with names that are not `Cluster.run`'s own.
            given: which of its own were given.

        Raises:
            TypeError: a text has no such option, or the function has a parameter of such a name.
        """
        if isinstance(code, RankFunction):  # one of ours: it has no argument of these names
            own = {name: kwargs[name] for name in _OF_TEXTS if name in kwargs}
            return cls(args=args, kwargs={name: one for name, one in kwargs.items() if name not in own}, **own)
        if isinstance(code, str | CellText):
            unknown = [name for name in kwargs if name not in _OF_TEXTS]
            if unknown:
                raise TypeError(f"a cell's text has no argument {unknown[0]!r}: choose from {', '.join(_OF_TEXTS)}")
            return cls(args=args, **kwargs)
        taken = [name for name in given if name in parameters_of(code)]
        if taken:
            raise TypeError(
                f"{taken[0]}= is both an argument of lab.run and a parameter of the function: fix the function's with "
                f"functools.partial or a lambda, e.g. `lab.run(lambda: f({taken[0]}=...))`"
            )
        return cls(args=args, kwargs=kwargs)


class CellRun:
    """One execution of a cell on a set of ranks, from its start until after its end.

    `submit` sends it; then either `wait` shows outputs in the calling thread until every rank has ended, or `follow`
    does so in a thread of its own and `wait` is called later, or never.

    Args:
        session: whose ranks run it.
        code: a cell's text, or a function to call on each rank. One of the notebook or a closure travels by value with
            the names it uses; names that the notebook lacks are looked up on the rank.
        ranks: where to run.
        cell_id: unique id of this run.
        options: see `CellOptions`.

    Raises:
        TypeError: the function can't be sent; the message says why.
    """

    def __init__(
        self,
        session: Session,
        code: str | CellText | Callable[..., Any] | RankFunction,
        ranks: Sequence[int],
        *,
        cell_id: str,
        options: CellOptions,
    ) -> None:
        self.cell_id = cell_id
        self.options = options
        self.ranks = tuple(sorted(ranks))
        self._session = session
        self._processes = ProcessWatch(session.processes, session.wire, session.members.ask)
        self._watch = None
        if self.options.hang_seconds is not None:
            partial = len(self.ranks) < session.processes.placement.world_size
            self._watch = Watch(session.members.source, self._cause_of_wait, self.options.hang_seconds, partial=partial)
        self._call: FunctionCall | None = None
        self._code: str | CellText | RankFunction = CALL
        if isinstance(code, str | CellText | RankFunction):
            self._code = code
        else:
            far = session.processes.far_ranks.intersection(self.ranks)
            self._call = FunctionCall(code, self.options.args, self.options.kwargs, self.ranks, far)
        self._outputs = CellOutputs(self.ranks, session.processes.logs, cell_id)
        on_axis = None if session.clocks is None else session.clocks.on_axis
        self._state = CellState(self.ranks, self.options.timeout, on_axis)
        self._screen = _Screen(self.options.board or default_board(self.ranks))
        self._shown: dict[int, str] = {}  # rank -> the text that it displayed for its value
        self._inbox: deque[tuple[int, str, Sequence[bytes]]] = deque()
        self._answers = Answers(lambda rank, message: session.wire.send([rank], message))
        self._wake = threading.Event()
        self._cause: Diagnosis | None = None  # of a failure that the ranks do not explain
        self._given_up: dict[int, str] = {}  # rank -> how its process ended, or why it is terminated on purpose
        self._next_look = _NEVER
        self._view: _View | None = None
        self._late_view: _View | None = None
        self._follower: threading.Thread | None = None
        self._follower_error: BaseException | None = None

    # -- sending

    def submit(self, view: RunView | None = None) -> CellRun:
        """Sends the cell to every rank and returns at once.

        Args:
            view: shows its progress; `follow` keeps it up to date.

        Raises:
            ClusterError: a rank has no engine any more; nothing was sent.
        """
        ahead = self.waits_for
        self._state.send(time.monotonic(), queued=bool(ahead))
        if view is not None:
            self._view = _View(view, self)
        self._check_ranks()
        self._session.wire.listen(self.cell_id, self._put)
        self._session.wire.send(self.ranks, self._cell())
        if ahead and view is None:
            self._screen.board.announce(self.ranks, reports.waiting(self.label, ahead))
        return self

    def _check_ranks(self) -> None:
        missing = [rank for rank in self.ranks if rank not in self._session.processes.engine_of_rank]
        if missing:
            have = "has no process: it" if len(missing) == 1 else "have no processes: they"
            raise ClusterError(
                f"{label_of(missing)} {have} failed or never started (`%cluster rejoin` starts new ones)"
            )

    def _cell(self) -> Cell:
        options, code, call = self.options, self._code, self._call
        after = {run.cell_id: run.label for run in options.after if not run.done}
        if not isinstance(code, RankFunction):
            text = code if isinstance(code, CellText) else CellText(code)
            return Cell(self.cell_id, self.label, text=text, after=after)
        if call is None:  # push and pull also run after a failed cell
            return Cell(self.cell_id, self.label, function=code, frames=arguments(options.args, options.kwargs))
        frames = arguments(call.args, {})
        return Cell(self.cell_id, self.label, function=code, after=after, sources=call.sources, frames=frames)

    def _put(self, rank: int, kind: str, frames: Sequence[bytes]) -> None:
        """On the wire's thread."""
        self._inbox.append((rank, kind, frames))
        # A short cell's loop wakes three times, not six: once for its outputs, and for each reply.
        queued = self._state.phase is Phase.QUEUED
        wakes = queued if kind == "begun" else self._screen.due_s == _NEVER or kind in ("reply", QUESTION)
        if wakes:
            self._wake.set()

    # -- waiting

    def wait(
        self, tick: Callable[[], None] | None = None, late: Callable[[], RunView | None] | None = None
    ) -> CellResult:
        """Shows outputs as they arrive and returns when every rank has ended.

        Args:
            tick: called in this thread after something was shown, and at least every 0.2 s.
            late: makes a view of its progress for pages that are opened while it runs; called once it has run for some
                seconds.

        Raises:
            CellError: the cell failed on a rank, a rank's process exited, or the time limit passed.
            KeyboardInterrupt: the user interrupted; the ranks were interrupted too, and have ended unless the
                error names them. A second interrupt returns at once.
        """
        with interrupts_deferred():
            try:
                if self._follower is not None:
                    self._wait_for_follower(tick)
                else:
                    self._pump(tick if late is None else lambda: self._tick_for_late_pages(tick, late))
            except KeyboardInterrupt:
                self._abort(tick)
                raise self._interrupted() from None
            finally:
                if self._late_view is not None:
                    self._late_view.show()
            return self.result()

    def _tick_for_late_pages(self, tick: Callable[[], None] | None, late: Callable[[], RunView | None]) -> None:
        if tick is not None:
            tick()
        if self._late_view is None and self.seconds > _LATE_S and (view := late()) is not None:
            self._late_view = _View(view, self)
        if self._late_view is not None:
            self._late_view.update()

    def _wait_for_follower(self, tick: Callable[[], None] | None) -> None:
        assert self._follower is not None
        while self._follower.is_alive():
            with interrupts_allowed():
                self._follower.join(_LOOK_S)
            if tick is not None:
                tick()
        if self._follower_error is not None:
            raise self._follower_error
        self._screen.board.show_again()
        if self._view is not None:
            self._view.view.show_again()

    def follow(self) -> CellRun:
        """Shows outputs from a thread of its own until the cell has ended; returns at once."""

        def main() -> None:
            view = self._view
            try:
                self._pump(None if view is None else view.update)
            except BaseException as error:  # noqa: BLE001  the thread's top: kept for `wait`, and shown
                self._follower_error = error
                self._state.fail(time.monotonic())
            if view is not None:
                view.show()

        self._follower = threading.Thread(target=main, name=f"ddp_lab-{self.cell_id}", daemon=True)
        self._follower.start()
        return self

    def interrupt(self) -> None:
        """Interrupts the ranks that have not ended, those that have not begun as soon as they do; returns at once."""
        self._do(self._state.interrupt())

    def give_up(self, why: Mapping[int, str]) -> None:
        """Ends the run on ranks whose processes have ended or are being ended; from any thread.

        Args:
            why: rank -> what happened to its process; ranks that do not run the cell are ignored.
        """
        self._given_up = {**self._given_up, **why}
        self._next_look = time.monotonic() + _LAST_WORDS_S
        self._wake.set()

    def __repr__(self) -> str:
        if self.done:
            values = ", ".join(f"{rank}: {value!r}" for rank, value in self.values.items() if rank not in self.failures)
            return f"<CellRun {self.label}: {self.headline}; values {{{values}}}>"
        words = self._state.words()
        ranks = {word: [rank for rank in words if words[rank] == word] for word in dict.fromkeys(words.values())}
        states = ", ".join(f"{label_of(members)} {word}" for word, members in ranks.items())
        if ahead := self.waits_for:
            states = f"waits for {enumeration(ahead)}"
        when = time.strftime("%H:%M:%S")
        return f"<CellRun {self.label} at {when}: {states}, for {duration(self.seconds)}>"

    def _ipython_display_(self) -> None:
        """Shows itself in a notebook, unless its view does already: that stays up to date, a text would not."""
        if self._view is None:
            write_line("stdout", repr(self))

    @property
    def done(self) -> bool:
        """Whether every rank has ended."""
        return self._state.ended_s is not None

    @property
    def label(self) -> str:
        """The cell's name in tracebacks and errors."""
        return self.options.label or "cell"

    @property
    def seconds(self) -> float:
        """Since it was sent, until its end."""
        return (self._state.ended_s or time.monotonic()) - self._state.sent_s

    @property
    def state(self) -> str:
        """As `CellStatus.state`."""
        if not self.done:
            return "queued" if self.waits_for else "running"
        if self._state.timed_out or self._follower_error is not None:
            return "failed"
        return "interrupted" if self._state.silent and not self.failures else reports.end_of(self.failures)

    @property
    def headline(self) -> str:
        """Its progress, or how it ended, in one line."""
        if not self.done:
            ahead = self.waits_for
            return f"waits for {enumeration(ahead)}" if ahead else f"running for {duration(self.seconds)}"
        if self._follower_error is not None:
            return f"✗ can no longer be followed: {type(self._follower_error).__name__}: {self._follower_error}"
        return reports.ending(self.state, self.failures, self.seconds)

    @property
    def report(self) -> str:
        """The first failed rank's traceback and a line for each other one, ANSI-coloured; "" if none failed."""
        error = self._error() if self.state == "failed" else None
        return "" if error is None else error.report

    @property
    def values(self) -> Mapping[int, Any]:
        """rank -> value, of the ranks that have ended; as `CellResult.values`."""
        return self._values()

    @property
    def failures(self) -> Mapping[int, RankFailure]:
        """rank -> failure, the first cause first, of the ranks that have failed."""
        return self._state.failures()

    @property
    def logs(self) -> Mapping[int, Path]:
        """rank -> the file with everything it printed; empty if it printed little."""
        return self._outputs.logs()

    def last_lines(self) -> str:
        """The end of the shown text, for a page that has missed it."""
        return self._screen.board.last_lines()

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The cells that its ranks run before it, until one has begun it."""
        if self._state.begun() is not None:
            return ()
        return tuple(run.label for run in self.options.after if not run.done)

    def outputs(self) -> Mapping[int, Sequence[dict[str, Any]]]:
        """rank -> every output so far, also while it runs; as `CellResult.outputs`."""
        return self._outputs.by_rank()

    def text(self, rank: int) -> str:
        """What rank `rank` has printed or displayed so far, as `CellResult.text`."""
        return self.collected().text(rank)

    def result(self) -> CellResult:
        """The values and outputs by rank.

        Raises:
            CellError: as `wait`.
            ClusterError: the cell is still running.
        """
        if not self.done:
            raise ClusterError(f"cell {self.label} is still running on {label_of(self._state.open())}")
        result, error = self.collected(), self._error()
        if error is None:
            return result
        error.result = result  # type: ignore[attr-defined]
        raise error

    def _error(self) -> CellError | None:
        failed, label = self.failures, self.label
        if not failed:
            return None
        if self._state.timed_out:
            return reports.timeout_error(failed, self._state.timed_out, label, self.options.timeout or 0.0)
        run = "" if self._view is None else f"lab.results[{self.options.name!r}]"
        return reports.cell_error(failed, label, run, self._cause)

    def collected(self) -> CellResult:
        """What has arrived so far, whether or not the cell has ended."""
        return CellResult(
            self.cell_id,
            self.label,
            self.values,
            self.outputs(),
            self.seconds,
            failures=self.failures,
            logs=self.logs,
        )

    def status(self) -> CellStatus:
        """Which ranks still run, ended or failed, and since when."""
        return CellStatus(self.cell_id, self.label, self.state, self._state.words(), self.seconds)

    # -- the loop

    def _pump(self, tick: Callable[[], None] | None, until: float = _NEVER) -> None:
        """Takes messages and shows them until all ranks have ended, or until the time `until`."""
        self._next_look = min(self._next_look, time.monotonic() + _LOOK_S)
        while True:
            self._wake.clear()
            self._take()
            now = time.monotonic()
            if not self._state.open() or now >= until:
                break
            if now >= self._screen.due_s:
                self._show()
            if now >= self._next_look:
                self._next_look = now + _LOOK_S
                self._look(now)
            self._screen.plan(now)
            if tick is not None:
                tick()
            if self._answers:
                self._ask()
                continue
            with interrupts_allowed():
                self._wake.wait(max(0.0, min(self._screen.due_s, self._next_look, until) - time.monotonic()))
        self._screen.feed(self._outputs.where())
        self._screen.board.end(self._state.ends())
        self._screen.board.refresh(final=True)
        if not self._state.open():
            self._finish()

    def _finish(self) -> None:
        if self._state.end(time.monotonic()):
            boxes = self._session.members.black_boxes
            self._cause = boxes.cause(self.failures, self.ranks, self._sent_ns)
        self._session.wire.unlisten(self.cell_id)
        self._values()

    def _take(self) -> None:
        while self._inbox:
            rank, kind, frames = self._inbox.popleft()
            now = time.monotonic()
            if kind == "begun":
                self._do(self._state.begin(rank, now))
            elif kind == "reply":
                report = report_of(frames)
                if not isinstance(report, RequestFailure):
                    self._state.report(rank, report, now)
                elif not self._state[rank].ended:
                    self._give_up(reports.outside(rank, report))
                self._session.members.note_end(rank, self.cell_id, self._state[rank].word != "done")
            elif kind == QUESTION:
                self._answers.take(rank, frames)
            else:
                content = json.loads(frames[0])
                if kind == "execute_result":
                    self._shown[rank] = str(content["data"].get("text/plain", ""))
                self._outputs.add(rank, {"output_type": kind, **content})
                self._screen.add(rank, kind, content)

    def _do(self, actions: Sequence[Action]) -> None:
        """Carries out what the state answers to an event."""
        members = self._session.members
        for action in actions:
            if isinstance(action, Begin):
                if self._view is None:
                    self._screen.board.announce(self.ranks, f"{self.label} is running …")
            elif isinstance(action, Interrupt):
                members.interrupt(action.ranks, self.cell_id)
            elif isinstance(action, Lose):
                self._give_up(reports.lost(action.rank, action.why, members.last_words(action.rank)))
                self._next_look = min(self._next_look, self._state.next_s)
            elif isinstance(action, TimeOut):
                self._give_up(reports.timed_out(action.rank, self.options.timeout or 0.0, time.monotonic_ns()))
            elif isinstance(action, Announce):
                text = reports.announcement(action.failure, action.others)
                self._announce([action.failure.rank], text)

    def _announce(self, ranks: Sequence[int], text: str, stays: bool = False) -> None:
        """Shows a line, after the outputs that came before it."""
        self._screen.feed(self._outputs.where())
        self._screen.board.announce(ranks, text, stays=stays)

    def _give_up(self, failure: RankFailure) -> None:
        """Ends a rank that will not answer; a page that shows its output by itself shows why."""
        self._state.give_up(failure, time.monotonic())
        lines = [*failure.traceback.splitlines(), f"{failure.name}: {failure.message}"]
        content = {"ename": failure.name, "evalue": failure.message, "traceback": lines}
        self._screen.show_error(failure.rank, content)

    def _show(self) -> None:
        begin = time.monotonic()
        self._screen.due_s = _NEVER
        self._take()  # what came before that without waking
        self._screen.refresh(begin, self._outputs.where())

    def _look(self, now: float) -> None:
        """Checks for failed ranks, for ranks that continue after another one failed, and the time limit."""
        members, state = self._session.members, self._state
        self._do(state.look_for_lost(now, {**members.lost(), **self._given_up}))
        self._look_after_processes()
        self._do(state.look_for_failures(now, members.running(self.cell_id)))
        told = self._watch.look(self._screen.outputs) if self._watch is not None else None
        if told is not None:
            self._announce(state.open(), told, stays=True)
        self._do(state.look_at_limit(now))

    @property
    def _sent_ns(self) -> int:
        return int(self._state.sent_s * 1e9)

    def _cause_of_wait(self, waiting: Collection[int]) -> Diagnosis | None:
        return self._session.members.black_boxes.cause_of_wait(waiting, self.ranks, self._sent_ns)

    def _look_after_processes(self) -> None:
        news = self._processes.look(self.cell_id, () if self.waits_for else self._state.open())
        for line in news.lines:
            self._announce(self.ranks, line, stays=True)
        if news.again:
            self._session.wire.send(news.again, self._cell())
        for rank in news.lost:
            self._give_up(reports.unknown(rank, _RESULT_LOST))
            self._session.members.note_end(rank, self.cell_id, True)

    def _ask(self) -> None:
        """Shows the outputs before the first question, then asks the user."""
        if self._follower is not None:
            self._answers.refuse()
            return
        self._show()
        self._answers.ask()

    def _abort(self, tick: Callable[[], None] | None) -> None:
        """After the user's interrupt: stops the ranks and collects what they still report, for a bounded time."""
        with contextlib.suppress(KeyboardInterrupt):
            self._do(self._state.abandon(time.monotonic()))
            self._collect(tick, GRACE_S if self._state.begun() is not None else ANNOUNCE_S)
            if self._state.begun() is not None and self._state.open():
                self._session.members.end_silent(self._state.open())
                self._collect(tick, _ENDED_S)
        self._finish()

    def _collect(self, tick: Callable[[], None] | None, seconds: float) -> None:
        if self._follower is not None:
            with interrupts_allowed():
                self._follower.join(seconds)
        else:
            self._pump(tick, until=time.monotonic() + seconds)

    def _interrupted(self) -> KeyboardInterrupt:
        error = KeyboardInterrupt(f"cell {self.label} on {label_of(self.ranks)}")
        lines = reports.interrupt_report(self.failures, self._state.silent, self.label, self.waits_for)
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        error.result = self.collected()  # type: ignore[attr-defined]
        return error

    def _values(self) -> dict[int, Any]:
        """rank -> value, so far; once the run has ended, the memory of a call is released."""
        said = {rank: self._state[rank].report for rank in self.ranks}
        values = {
            rank: value_of(rank, report, self._shown.get(rank, ""))
            for rank, report in said.items()
            if report is not None
        }
        if self._call is None:
            return values
        values = self._call.values(values)
        if self.done:
            self._call.close()
        return values


class _Screen:
    """Shows a run's outputs on its board, after short pauses; owned by the thread that shows them.

    Attributes:
        board: where.
        due_s: when they are to be shown next, in seconds on the monotonic clock.
        outputs: how many have come.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.due_s = _NEVER
        self.outputs = 0
        self._unshown: list[tuple[int, str, Any]] = []
        self._earliest_s = 0.0

    def add(self, rank: int, kind: str, content: Any) -> None:
        """Takes an output of a rank."""
        self.outputs += 1
        self._unshown.append((rank, kind, content))

    def show_error(self, rank: int, content: Any) -> None:
        """Takes an error that the rank has not reported itself."""
        self._unshown.append((rank, "error", content))

    def plan(self, now: float) -> None:
        """Chooses when to show what has come."""
        if self._unshown and self.due_s == _NEVER:
            self.due_s = max(now + _FIRST_REFRESH_S, self._earliest_s)

    def feed(self, where: str) -> None:
        """Gives the board what has come, and says where all of it is."""
        for rank, kind, content in in_turns(self._unshown):
            self.board.feed(rank, kind, content)
        self._unshown.clear()
        self.board.know(where)

    def refresh(self, begin: float, where: str) -> None:
        """Shows it; the next time after a pause, by how long this took since `begin`."""
        self.feed(where)
        pause = self.board.refresh()
        now = time.monotonic()
        self._earliest_s = now + max(_REFRESH_S, _REFRESH_SHARE * (now - begin), pause)


class _View:
    """A view of a run's progress: shown at once, then every second and whenever the run's state changes."""

    def __init__(self, view: RunView, run: CellRun) -> None:
        self.view, self._run = view, run
        self.show()

    def show(self) -> None:
        """Shows the run as it is."""
        self._state, self._at = self._run.state, time.monotonic()
        self.view.show(self._run)

    def update(self) -> None:
        """Shows it if that is due."""
        if self._run.state != self._state or time.monotonic() - self._at >= _VIEW_S:
            self.show()
