"""Answers for a rank while its cell runs: interrupts it, unblocks its peers, reports where it is.

See [Note: interrupt]. An interrupt signals the main thread and the processes it has started. Python code and sleeps end
at once. A main thread that waits in a collective does not notice. So when nothing has moved on the rank's connections
for `_SIGNAL_SECONDS` (`_STILL_SECONDS` if it is in torch's code that waits for peers; [Note: what is on its way] in
`groups/registry.py`), or after two seconds all the same, the agent shuts the rank's groups down: the collective fails,
and the user sees KeyboardInterrupt at the waiting line.

The agent signals until the cell's code has been interrupted once, because single signals can have no effect. The
handler raises nothing where an exception would hit IPython's own code instead of the cell. It does not run for a signal
just before a sleep begins. Python drops exceptions while it forks a data loader's worker, and in destructors. And an
exception in `__enter__` or `__exit__` could leave a lock taken on which Python itself would later wait forever (a data
loader's queues), and one while pexpect starts a shell command (`_spawn`) a process that nobody knows: signals during
such a call do nothing until it has lasted `_SPARED_SECONDS` since the first.

An interrupt names its cells: one that has not begun on this rank is interrupted when it does. If all that has not
helped within `_REST_SECONDS`, works that Gloo has forgotten are ended, and a wait in the rendezvous store (for a group
that not all ranks make) is ended by shutting down the rank's connection to it: the groups are lost by then, and a
rejoin makes another store.

See [Note: freeing peers]. A cell that fails leaves peers behind that may wait for this rank. Shutting the groups down
is safe but costs a rejoin, and most failures are a mistake that all ranks make at the same line. A peer that has
entered more collectives than this rank waits for it in vain: the client tells the peers how many this rank has entered
(`PeerFailed`), and such a peer shuts its groups down at once. For all others the agent waits `_GRACE_SECONDS`, in which
the client may report (`Settle`) that every rank's cell has ended anyway.
"""

from __future__ import annotations

import bdb
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch.distributed as dist
from IPython.core import interactiveshell
from torch import autograd

from ..diagnosis.on_rank import examine, own_collectives
from ..diagnosis.stacks import is_users
from ..parallel.live import model as live_model
from ..protocol.messages import (
    Activity,
    Examination,
    Examine,
    GetHealth,
    Health,
    Interrupt,
    PeerFailed,
    Ping,
    Settle,
    Settled,
    Status,
    Unblock,
)
from .cells import await_runner, cell
from .cells.stdin import Asking
from .debugger import tracing
from .debugger.rank_debugger import RankDebugger
from .gpu import Gpu
from .groups import registry, rejoin
from .telemetry import Telemetry

_log = logging.getLogger(__name__)
_SIGNAL_SECONDS = 0.025
_REPEAT_SECONDS = 0.1
_CHILD_SECONDS = 1.0
_FORK_TIMES = 3
_NEWS_SECONDS = 0.1
_GRACE_SECONDS = 0.05
_REST_SECONDS = 0.3
_SPARED_SECONDS = 0.5
_SPARED = ("__enter__", "__exit__", "_spawn")
_STILL_SECONDS = 0.01  # without movement
_RELEASED = "the cell was interrupted or failed"
_DEPTH = 8  # frames: of contextlib and its generator, of ptyprocess
_DOOMED = 256  # ids of interrupted cells that are remembered

# Where a rank waits for its peers: in a collective, or in a backward.
_WAITING = tuple(os.path.join(package.__path__[0], "") for package in (dist, autograd))
# A cell's own code runs below one of these ...
_CELL_ENTRIES = {
    interactiveshell.InteractiveShell.run_code.__code__,
    cell._run_function.__code__,
    await_runner.run_to_end.__code__,
}
# ... and while one of these files is on top, an exception would miss it.
_NOT_THE_CELL = {interactiveshell.__file__, cell.__file__}


class Agent:
    """One rank's answers to the client's control messages; made and installed on the rank's main thread."""

    def __init__(self, channel: Telemetry, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._main = threading.main_thread().ident
        self._left = threading.Event()  # the running cell's own code has ended
        self._left.set()
        self._settled = threading.Event()
        self._told = threading.Event()  # that the cell is interrupted, or another rank has failed
        self._gate = threading.Lock()  # guards the next four: no thread frees groups for a cell that is settled
        self._at_risk: str | None = None  # the cell for which this rank's groups may be shut down
        self._doomed: deque[str] = deque(maxlen=_DOOMED)  # cells that were interrupted, begun or not
        self._to_free: tuple[str, int | None] | None = None  # a cell that has not begun here, and who failed in it
        self._interrupted: str | None = None  # id of the cell that is being interrupted
        self._ended: tuple[str, bool] | None = None  # the last cell whose own code ended here, and whether it failed
        self._reporting = threading.Lock()  # the newest status is sent last: the client may see that one alone
        self._freed_by: int | None = None
        self._freed: str | None = None  # the cell during which this rank's groups were lost ...
        self._shut_down_for: str | None = None  # ... and the last one for which they were shut down
        self.gpu: Gpu | None = None  # the rank's; None for a CPU rank
        self.debugger: RankDebugger | None = None  # the visual one
        # The running cell, since when (host time in ns), and its label.
        self._began: tuple[str, int, str] | None = None
        self._raised = False  # the running cell's own code has been interrupted
        # The call in which signals do nothing, and when the first came; the main thread's.
        self._spared: tuple[FrameType, float] | None = None
        self._asking: Asking | None = None
        self._report_unraisable = sys.unraisablehook

    def install(self, kernel: Any) -> None:
        """Installs itself as handler of SIGINT and of the hooks around cells, and starts answering."""
        kernel.pre_handler_hook = kernel.post_handler_hook = lambda: None  # ipykernel's would undo the handler
        signal.signal(signal.SIGINT, self._on_signal)
        self._asking = Asking(kernel)
        self._asking.install(self._channel.on_control)
        self._report_unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        cell.before_cell.append(self._before_cell)
        cell.on_failure.append(self._on_failure)
        cell.on_done.append(self._on_done)
        self._channel.on_control(Interrupt, self._answer_interrupt)
        self._channel.on_control(Unblock, self._answer_unblock)
        self._channel.on_control(PeerFailed, self._answer_peer_failed)
        self._channel.on_control(Settle, self._answer_settle)
        self._channel.on_control(Ping, self._answer_ping)
        self._channel.on_control(GetHealth, self._answer_health)
        self._channel.on_control(Examine, self._answer_examine)

    def joined(self) -> None:
        """Notes that this rank's groups are intact again."""
        with self._gate:
            self._at_risk = self._freed = self._freed_by = self._interrupted = None
        self._report()

    # The cell's hooks, on the main thread

    def _before_cell(self, cell_id: str, label: str) -> None:
        self._raised, self._spared = False, None
        rejoin.note_backwards()
        self._settled.clear()
        self._told.clear()
        with self._gate:
            self._at_risk = cell_id
            self._began = (cell_id, time.monotonic_ns(), label)
            self._left.clear()
            doomed = cell_id in self._doomed
            to_free, self._to_free = self._to_free, None
        self._channel.send_status(Status("running", cell_id))
        if to_free is not None:
            self._free(*to_free)
        if doomed:
            self._begin_interrupt(cell_id)

    def _on_failure(self, end: cell.CellEnd) -> None:
        self._left.set()
        try:
            self._judge(end)
            self._ended = (end.cell_id, True)
            self._take_over_children()
            self._report()
        finally:  # whatever fails here (e.g. out of memory) must not keep its peers from being unblocked
            _beside(self._free_unless_settled, end.cell_id, "ddp_lab-free")

    def _judge(self, end: cell.CellEnd) -> None:
        """Determines whether the cell was interrupted, or failed because another rank did."""
        error = end.error
        end.broke_backward = bool(rejoin.broken_backwards())
        if isinstance(error, RuntimeError):
            end.waited_in = self._waited_in(error)
            if end.waited_in:  # a closed connection may arrive before the message with the cause
                self._told.wait(_NEWS_SECONDS)
        if self._interrupted == end.cell_id:
            if isinstance(error, RuntimeError | KeyboardInterrupt | bdb.BdbQuit | EOFError):
                end.error = KeyboardInterrupt().with_traceback(_users_steps(error))
        elif self._freed_by is not None and isinstance(error, RuntimeError):
            end.consequence = True
            end.error = error.with_traceback(_users_steps(error))

    def _on_done(self, end: cell.CellEnd) -> None:
        self._left.set()
        self._ended = (end.cell_id, end.error is not None)
        self._take_over_children()
        if end.error is None:
            self._settle(end.cell_id)
        self._report()
        self._channel.flush(end.cell_id)

    def _report(self) -> None:
        failed = self._ended is not None and self._ended[1]
        with self._reporting:
            entered = registry.sequences() if failed else {}
            self._channel.send_status(
                Status(self._state(), cell.running(), self._ended, entered, self._freed, self._is_whole())
            )

    def _is_whole(self) -> bool:
        return self._freed is None and dist.is_initialized() and not registry.broken()

    def _state(self) -> str:
        if cell.running() is not None and not self._left.is_set():
            return "running"
        return "idle" if self._freed is None else "unblocked"

    def _broken_by(self) -> str:
        """Why this rank's groups were destroyed: it ``"failed"``, was ``"interrupted"``, or ``"rank 1"`` failed."""
        if self._freed is None:
            return ""
        if self._freed_by is not None:
            return f"rank {self._freed_by}"
        return "interrupted" if self._interrupted == self._freed else "failed"

    # Signals, on the main thread

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._left.is_set():
            return
        if not _in_the_cell(frame):
            return
        held = tracing.inside(frame)
        if held == "waiting":
            return
        if held == "evaluating":
            raise KeyboardInterrupt  # ends what was typed; the cell is interrupted by a later signal
        spared = _spared(frame)
        if spared is not None:
            if self._spared is None or self._spared[0] is not spared:
                self._spared = spared, time.monotonic()
            if time.monotonic() - self._spared[1] < _SPARED_SECONDS:
                return
        self._spared = None
        self._raised = True
        raise KeyboardInterrupt

    def _take_over_children(self) -> None:
        """Installs `_on_child` before the handler that a library has set in the cell."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and getattr(handler, "func", None) != self._on_child:
            signal.signal(signal.SIGCHLD, functools.partial(self._on_child, handler))

    def _on_child(self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        """torch's handler raises when a DataLoader worker was killed; outside a cell that would end the engine. The
        loader raises too when it is used next."""
        try:
            handler(number, frame)
        except Exception:
            if not self._left.is_set() and _in_the_cell(frame):
                raise
            _log.warning("a process started by rank %d has ended", self._rank, exc_info=True)

    def _on_unraisable(self, found: sys.UnraisableHookArgs) -> None:
        """Python drops exceptions in a destructor or a fork's hooks: then the cell has not been interrupted."""
        if found.exc_type is KeyboardInterrupt:
            self._raised = False
        else:
            self._report_unraisable(found)

    # Control messages, on the channel's thread

    def _answer_interrupt(self, request: Interrupt) -> None:
        with self._gate:
            self._doomed.extend(request.cells)
            cell_id = self._current()
            if cell_id is None and cell.running() in request.cells:
                # Its code has ended already, because an interrupted peer closed a connection: `_on_failure` waits.
                self._interrupted = cell.running()
                self._told.set()
        if cell_id in request.cells:
            self._begin_interrupt(str(cell_id))

    def _answer_unblock(self, request: Unblock) -> None:
        self._unblock(request.cell, request.by)

    def _answer_peer_failed(self, request: PeerFailed) -> None:
        """More collectives than the peer has entered can't end."""
        entered = request.entered
        if any(count > entered.get(name, count) for name, count in registry.sequences().items()):
            self._unblock(request.cell, request.by)

    def _unblock(self, asked: str | None, rank: int) -> None:
        by = None if rank == self._rank else rank
        with self._gate:
            cell_id = self._current()
            ended = self._at_risk if cell_id is None else None
            if ended is not None and asked in (None, ended):
                # It failed first, or a peer closed a connection, and `_judge` waits for this.
                self._mark_freed(ended, by)
            elif asked not in (None, cell_id):
                self._to_free = (asked, by)
            due = cell_id is not None and asked in (None, cell_id) and self._mark_freed(cell_id, by)
        if due:
            _beside(self._free_when_still, str(cell_id), "ddp_lab-free")

    def _answer_settle(self, request: Settle) -> Settled:
        if request.cell is not None or cell.running() is None:
            self._settle(request.cell)
        whole = self._is_whole() and not rejoin.broken_backwards()
        left = own_collectives.left() if whole else 0
        return Settled(whole, cell.running(), registry.sequences(), left)

    def _answer_health(self, request: GetHealth) -> Health:
        now, label, seconds = self._activity(), None, None
        began = self._began  # a cell may begin meanwhile
        if began is not None and now.cell == began[0]:
            _, began_ns, label = began
            seconds = (time.monotonic_ns() - began_ns) / 1e9
        gpu = self.gpu.read() if self.gpu is not None else None
        return Health(**vars(now), label=label, seconds=seconds, in_flight=own_collectives.in_flight(), gpu=gpu)

    def _answer_ping(self, request: Ping) -> Activity:
        frame = sys._current_frames().get(self._main or 0) if request.stack else None
        return self._activity(() if frame is None else traceback.format_stack(frame))

    def _activity(self, stack: Sequence[str] = ()) -> Activity:
        last = self._ended[0] if self._ended is not None else None
        return Activity(self._state(), cell.running(), last, self._broken_by(), stack)

    def _waited_in(self, error: RuntimeError) -> str:
        """What the rank waited in. Errors here must not keep its peers from being unblocked."""
        try:
            return examine.waited_in(error)
        except Exception:  # noqa: BLE001 - logged; the cell's own error matters more
            _log.exception("could not determine what rank %d waited in", self._rank)
            return ""

    def _answer_examine(self, request: Examine) -> Examination:
        stopped = self.debugger is not None and self.debugger.stopped
        began = None if self._began is None else self._began[:2]
        seen = examine.examine(self._main or 0, cell.running(), began, whole=request.whole)
        return Examination(self._state(), seen, stopped)

    def _current(self) -> str | None:
        """The cell whose own code runs."""
        return None if self._left.is_set() or self._began is None else self._began[0]

    # Threads of their own

    def _begin_interrupt(self, cell_id: str) -> None:
        self._interrupted = cell_id
        self._told.set()
        if self._asking is not None:
            self._asking.interrupt(cell_id)
        thread = threading.Thread(target=self._interrupt, args=(cell_id,), name="ddp_lab-interrupt", daemon=True)
        tracing.untraced(thread).start()

    def _interrupt(self, cell_id: str) -> None:
        """See [Note: interrupt]."""
        self._raised = False
        live_model.release(_RELEASED)
        if self.debugger is not None:
            self.debugger.let_go()
        self._signal(cell_id)
        told: dict[int, float] = {}
        _interrupt_children(told)
        moves = registry.Moves()
        frame = sys._current_frames().get(self._main or 0)
        waits = frame is not None and frame.f_code.co_filename.startswith(_WAITING)
        wait = _STILL_SECONDS if waits else _SIGNAL_SECONDS
        while not self._left.wait(wait) and self._current() == cell_id:
            if moves.go_on():
                continue
            self._free(cell_id)
            _interrupt_children(told)
            self._signal(cell_id)
            wait = _REPEAT_SECONDS
        _interrupt_forks()

    def _signal(self, cell_id: str) -> None:
        """Interrupts the main thread, unless this cell's code has been interrupted already, or has ended.

        The gate is held, so that no other cell begins in between and is interrupted in its place.
        """
        with self._gate:
            if self._current() == cell_id and not self._raised:
                signal.pthread_kill(self._main or 0, signal.SIGINT)

    def _free_unless_settled(self, cell_id: str) -> None:
        """See [Note: freeing peers]."""
        if not self._settled.wait(_GRACE_SECONDS):
            self._free_when_still(cell_id)

    def _free_when_still(self, cell_id: str) -> None:
        moves = registry.Moves()
        time.sleep(_STILL_SECONDS)
        while moves.go_on():
            time.sleep(_STILL_SECONDS)
        self._free(cell_id)

    def _settle(self, cell_id: str | None) -> None:
        """From now on no group is shut down for this cell (None: for whichever it was)."""
        with self._gate:
            if cell_id in (None, self._at_risk):
                self._at_risk = None
                self._settled.set()

    def _mark_freed(self, cell_id: str, by: int | None) -> bool:
        """Notes that this rank's groups are lost to this cell (the gate is held); whether they may be shut down."""
        if self._at_risk != cell_id:
            return False
        if self._freed is None:
            self._freed, self._freed_by = cell_id, by
            self._told.set()
        return True

    def _free(self, cell_id: str, by: int | None = None) -> None:
        with self._gate:
            if not self._mark_freed(cell_id, by):
                return
            first, self._shut_down_for = self._shut_down_for != cell_id, cell_id
            registry.free()
            live_model.release(_RELEASED)
        self._report()
        if first:
            _beside(self._free_the_rest, cell_id, "ddp_lab-free-the-rest")

    def _free_the_rest(self, cell_id: str) -> None:
        time.sleep(_REST_SECONDS)
        while not self._left.is_set() and cell.running() == cell_id:
            registry.end_forgotten()
            registry.free_store()
            self._left.wait(_REST_SECONDS)
        registry.quiet()


def _beside(work: Callable[[str], None], cell_id: str, name: str) -> None:
    """Calls this on a thread of its own; at once if there is no memory for one: peers may wait for it."""
    try:
        tracing.untraced(threading.Thread(target=work, args=(cell_id,), name=name, daemon=True)).start()
    except (RuntimeError, MemoryError) as error:
        _log.warning("%s: %s", name, error)
        work(cell_id)


def _interrupt_children(told: dict[int, float]) -> None:
    """Acts like Ctrl-C in a terminal: a data loader's workers and shell commands are interrupted too.

    Args:
        told: process id -> when it was interrupted. A child that was started since then is interrupted too: the rank
            may have been about to fork it. One that continues for `_CHILD_SECONDS` is interrupted again.
    """
    group, now = os.getpgid(0), time.monotonic()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if os.getpgid(child.pid) == group and now - told.get(child.pid, -_CHILD_SECONDS) >= _CHILD_SECONDS:
                told[child.pid] = now
                os.kill(child.pid, signal.SIGINT)


def _interrupt_forks() -> None:
    """Interrupts the workers that are left when the cell has ended: nothing else would end them.

    One that was just being forked drops its interrupt, and the data loader that forked it does not know it yet.
    """
    own = psutil.Process()
    forks = []
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.cmdline() == own.cmdline():
                forks.append(child)
    for _ in range(_FORK_TIMES if forks else 0):
        time.sleep(_CHILD_SECONDS)
        for child in forks:
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.send_signal(signal.SIGINT)


def _users_steps(error: BaseException) -> TracebackType | None:
    """Where the user's own code was, down to the line that was ended.

    Nothing of closed sockets, of the signal's handler and of libraries, which were not at fault: formatting their
    frames would take most of the time until control is back (up to 0.2 s).
    """
    steps = list(_steps(error.__traceback__))  # none where the cell's own code raised nothing: its value has no text
    kept: TracebackType | None = None
    users = [one for one in steps[1:] if is_users(one.tb_frame.f_code.co_filename)]
    for step in reversed(steps[:1] + users):
        kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _steps(step: TracebackType | None) -> Iterator[TracebackType]:
    while step is not None:
        yield step
        step = step.tb_next


def _spared(frame: FrameType | None) -> FrameType | None:
    """The innermost call that is spared and runs on top, if one does."""
    for _ in range(_DEPTH):
        if frame is None or frame.f_code.co_name in _SPARED:
            return frame
        frame = frame.f_back
    return None


def _in_the_cell(frame: FrameType | None) -> bool:
    if frame is None or frame.f_code.co_filename in _NOT_THE_CELL:
        return False
    return any(one.f_code in _CELL_ENTRIES for one, _ in traceback.walk_stack(frame))
