"""CellRun: one cell, or one function, on some ranks. The only module that uses ipyparallel's messages.

[Note: one request]
Each rank gets one apply request that calls `ddp_lab.engine.cell.run` there by name. The callbacks for its messages
hang on the request's future before the request is sent (`message_future_hook`), so none is missed. ipyparallel's I/O
thread only appends to a queue; the thread that waits takes from it and shows.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ipyparallel import Reference
from ipyparallel.serialize import pack_apply_message

from ..errors import ClusterError, RankFailure
from . import failures as reports
from .outputs import Board, default_board, label_of
from .results import CellResult, CellStatus, RemoteValue

__all__ = ["CellOptions", "CellResult", "CellRun", "CellStatus", "RemoteValue"]

_RUN = Reference("__import__('ddp_lab.engine.cell', fromlist=['run']).run")
_FIRST_REFRESH_S = 0.05  # a short cell is shown once, complete
_REFRESH_S = 0.08
_REFRESH_SHARE = 5  # at most a fifth of the time goes into showing
_IDLE_S = 0.2  # how often a silent cell looks for lost ranks
_GRACE_S = 5.0  # how long an interrupted rank may take to end
_TRAILING_S = 2.0  # how long to wait for the last outputs of a rank that has replied

_OUTPUTS = {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error"}


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


@dataclass
class _Rank:
    """What is known of the cell on one rank."""

    report: Mapping[str, Any] | None = None
    failure: RankFailure | None = None
    idle: bool = False
    replied_at: float = 0.0
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.report is not None or self.failure is not None


class CellRun:
    """One execution of a cell on a set of ranks.

    `submit` sends it; then either `wait` shows outputs in the calling thread until every rank has ended, or `follow`
    does so in a thread of its own and `wait` is called later, or never.

    Args:
        client: the ipyparallel client.
        engine_of_rank: rank -> engine id.
        code: a cell's text, or a function to call on each rank.
        ranks: where to run.
        cell_id: unique id of this run.
        options: see `CellOptions`.
    """

    def __init__(
        self,
        client: Any,
        engine_of_rank: Mapping[int, int],
        code: str | Callable[..., Any],
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
        self._ranks = {rank: _Rank() for rank in self.ranks}
        self._inbox: deque[tuple[int, str, Any]] = deque()
        self._unshown: list[tuple[int, str, Any]] = []
        self._wake = threading.Event()
        self._begin = 0.0
        self._end: float | None = None
        self._refresh_at = float("inf")
        self._refresh_after = 0.0
        self._timed_out: set[int] | None = None
        self._silent: tuple[int, ...] = ()
        self._abandoned = False
        self._follower: threading.Thread | None = None
        self._follower_error: BaseException | None = None

    # -- sending

    def submit(self) -> CellRun:
        """Sends the cell to every rank and returns at once.

        Raises:
            ClusterError: a rank has no engine any more; nothing was sent.
        """
        idents = {}
        for rank in self.ranks:
            uuid = self._client._engines.get(self._engine_of_rank.get(rank, -1))
            if uuid is None:
                raise ClusterError(f"rank {rank} has no engine: it died or was never started")
            idents[rank] = uuid.encode()
        buffers = self._pack()
        self._begin = time.monotonic()
        for rank, ident in idents.items():
            self._client._send(
                self._client._mux_stream,
                "apply_request",
                buffers=buffers,
                ident=ident,
                metadata={},
                track_outstanding=True,
                message_future_hook=partial(self._attach, rank),
            )
        return self

    def _pack(self) -> Any:
        cell: dict[str, Any] = {"id": self.cell_id, "label": self.options.label}
        if isinstance(self._code, str):
            return pack_apply_message(_RUN, ({**cell, "code": self._code},), {})
        cell["sources"] = _sources_of(self._code)
        args = (cell, self._code, tuple(self.options.args), dict(self.options.kwargs))
        return pack_apply_message(_RUN, args, {})

    def _attach(self, rank: int, future: Any) -> None:
        """Hangs our callbacks on a request that has not been sent yet; they run in ipyparallel's I/O thread."""
        metadata = future.output.metadata

        def on_message(message: Mapping[str, Any]) -> None:
            kind = message["header"]["msg_type"]
            if kind in _OUTPUTS:
                # ipyparallel keeps its own copy of every output, joined anew for each message.
                metadata["stdout"] = metadata["stderr"] = ""
                metadata["outputs"] = []
                self._put(rank, kind, message["content"])

        future.iopub_callbacks.append(on_message)
        future.output.add_done_callback(lambda _: self._put(rank, "idle", None))
        future.add_done_callback(lambda done: self._put(rank, "reply", done.result()))

    def _put(self, rank: int, kind: str, content: Any) -> None:
        self._inbox.append((rank, kind, content))
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
                    self._follower.join(_IDLE_S)
                    if tick is not None:
                        tick()
                if self._follower_error is not None:
                    raise self._follower_error
                self._board.refresh(final=True)
            else:
                self._pump(tick, until=None)
        except KeyboardInterrupt:
            self._abort(tick)
            raise self._interrupted() from None
        return self.result()

    def follow(self) -> CellRun:
        """Keeps outputs coming from a thread of its own until the cell has ended; returns at once."""

        def main() -> None:
            try:
                self._pump(None, until=None)
            except BaseException as error:  # noqa: BLE001  the thread's top: kept for `wait`
                self._follower_error = error

        self._follower = threading.Thread(target=main, name=f"ddp_lab-{self.cell_id}", daemon=True)
        self._follower.start()
        return self

    def interrupt(self) -> None:
        """Interrupts the ranks that have not ended; returns at once."""
        open_ranks = self._open()
        if open_ranks and self.options.interrupt is not None:
            self.options.interrupt(open_ranks)

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
            raise ClusterError(f"cell {self.options.label} still runs on {label_of(self._open())}")
        result = self._collected()
        failed = self._failures()
        if failed:
            limit = self.options.timeout if self._timed_out is not None else None
            if limit is not None:
                failed = {rank: failed[rank] for rank in failed if rank in (self._timed_out or ())} or failed
            error = reports.cell_error(failed, self.options.label, limit)
            error.result = result  # type: ignore[attr-defined]
            raise error
        return result

    def status(self) -> CellStatus:
        """Which ranks still run, ended or failed, and since when."""
        states = {}
        for rank, each in self._ranks.items():
            failed = each.failure is not None or (each.report is not None and not each.report["ok"])
            states[rank] = "failed" if failed else "done" if each.ended else "running"
        seconds = (self._end or time.monotonic()) - self._begin
        return CellStatus(self.cell_id, self.options.label, states, seconds)

    # -- the loop

    def _pump(self, tick: Callable[[], None] | None, until: float | None) -> None:
        """Takes messages and shows them until all ranks have ended, or until the time `until`."""
        look_at = time.monotonic() + _IDLE_S
        while True:
            self._wake.clear()
            self._take()
            now = time.monotonic()
            if self._finished(now) or (until is not None and now >= until):
                break
            if now >= self._refresh_at:
                self._show()
                if tick is not None:
                    tick()
            elif now >= look_at:
                look_at = now + _IDLE_S
                self._look(now)
                if tick is not None:
                    tick()
            deadline = min(self._refresh_at, look_at, float("inf") if until is None else until)
            self._wake.wait(max(0.0, deadline - time.monotonic()))
        self._feed_board()
        self._board.refresh(final=True)
        if until is None or not self._open():
            self._end = self._end or time.monotonic()

    def _take(self) -> None:
        while self._inbox:
            rank, kind, content = self._inbox.popleft()
            state = self._ranks[rank]
            if kind == "reply":
                state.replied_at = time.monotonic()
                self._take_reply(rank, state, content)
            elif kind == "idle":
                state.idle = True
            else:
                state.outputs.append({"output_type": kind, **content})
                if kind != "error":
                    self._unshown.append((rank, kind, content))
        if self._unshown and self._refresh_at == float("inf"):
            self._refresh_at = max(time.monotonic() + _FIRST_REFRESH_S, self._refresh_after)

    def _take_reply(self, rank: int, state: _Rank, content: Any) -> None:
        if isinstance(content, Mapping):
            state.report = content
            return
        name = getattr(content, "ename", type(content).__name__)
        text = getattr(content, "evalue", str(content))
        state.idle = True
        if name == "EngineError":
            why = self._lost().get(rank) or "its process ended while the cell ran"
            state.failure = reports.lost(rank, f"rank {rank} is gone: {why}")
        else:
            trace = "\n".join(getattr(content, "traceback", None) or ())
            state.failure = RankFailure(rank, name, text, trace, time.monotonic_ns(), False)

    def _finished(self, now: float) -> bool:
        for state in self._ranks.values():
            if not state.ended:
                return False
            if not state.idle and now - state.replied_at < _TRAILING_S:
                return False
        return True

    def _show(self) -> None:
        begin = time.monotonic()
        self._refresh_at = float("inf")
        self._feed_board()
        self._board.refresh()
        now = time.monotonic()
        self._refresh_after = now + max(_REFRESH_S, _REFRESH_SHARE * (now - begin))

    def _feed_board(self) -> None:
        """Outputs that came within one refresh are shown by rank, whoever was first by a millisecond."""
        unshown, self._unshown = self._unshown, []
        for rank, kind, content in sorted(unshown, key=lambda each: each[0]):
            self._board.feed(rank, kind, content)

    def _look(self, now: float) -> None:
        """Looks for lost ranks and the time limit."""
        gone = self._lost()
        for rank, state in self._ranks.items():
            if not state.ended and rank in gone:
                state.idle = True
                state.failure = reports.lost(rank, f"rank {rank} is gone: {gone[rank]}")
        limit = self.options.timeout
        if limit is None or now - self._begin < limit:
            return
        if self._timed_out is None:
            self._timed_out = set(self._open())
            self.interrupt()
        elif now - self._begin > limit + _GRACE_S:
            for rank in self._open():
                self._ranks[rank].idle = True
                self._ranks[rank].failure = reports.timed_out(rank, limit, time.monotonic_ns())

    def _abort(self, tick: Callable[[], None] | None) -> None:
        """After the user's interrupt: stops the ranks and collects what they still say, for a bounded time."""
        with contextlib.suppress(KeyboardInterrupt):
            self.interrupt()
            if self._follower is not None:
                self._follower.join(_GRACE_S)
            else:
                self._pump(tick, until=time.monotonic() + _GRACE_S)
        self._silent = self._open()
        self._abandoned = bool(self._silent)
        self._end = self._end or time.monotonic()

    def _interrupted(self) -> KeyboardInterrupt:
        error = KeyboardInterrupt(f"cell {self.options.label} on {label_of(self.ranks)}")
        lines = reports.interrupt_report(self._failures(), self._silent, self.options.label)
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        error.result = self._collected()  # type: ignore[attr-defined]
        return error

    # -- what came

    def _open(self) -> tuple[int, ...]:
        return tuple(rank for rank, state in self._ranks.items() if not state.ended)

    def _lost(self) -> Mapping[int, str]:
        return self.options.lost_ranks() if self.options.lost_ranks is not None else {}

    def _failures(self) -> dict[int, RankFailure]:
        found = [state.failure for state in self._ranks.values() if state.failure is not None]
        for rank, state in self._ranks.items():
            if state.failure is None and state.report is not None and not state.report["ok"]:
                found.append(reports.failure_of(rank, state.report))
        return reports.in_order(found)

    def _collected(self) -> CellResult:
        values = {rank: _value_of(rank, state) for rank, state in self._ranks.items() if state.report is not None}
        seconds = (self._end or time.monotonic()) - self._begin
        outputs = {rank: state.outputs for rank, state in self._ranks.items()}
        return CellResult(self.cell_id, self.options.label, values, outputs, seconds)


def _value_of(rank: int, state: _Rank) -> Any:
    report = state.report or {}
    if report.get("blob") is not None:
        return pickle.loads(report["blob"])
    if not report.get("ok"):
        return None
    shown = [each for each in state.outputs if each["output_type"] == "execute_result"]
    text = str(shown[-1]["data"].get("text/plain", "")) if shown else ""
    return RemoteValue(rank, str(report["kind"]), text, str(report.get("unsent", "")))


def _sources_of(function: Callable[..., Any]) -> dict[str, str]:
    """The text of the file a function was written in, if ranks can't read it themselves."""
    code = getattr(function, "__code__", None)
    if code is None or os.path.exists(code.co_filename):
        return {}
    lines = linecache.getlines(code.co_filename)
    return {code.co_filename: "".join(lines)} if lines else {}
