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
such a call do nothing until it has lasted `_DEFERRED_SECONDS` since the first.

An interrupt names its cells: one that has not begun on this rank is interrupted when it does. If all that has not
helped within `_REST_SECONDS`, works that Gloo has forgotten are ended, and a wait in the rendezvous store (for a group
that not all ranks make) is ended by shutting down the rank's connection to it: the groups are lost by then, and a
rejoin makes another store.

See [Note: unblocking peers]. A cell that fails leaves peers behind that may wait for this rank. Shutting groups down
is safe but costs a rejoin, and most failures are a mistake that all ranks make at the same line. A peer that has
entered more collectives than this rank waits for it in vain: the client tells the peers how many this rank has entered
(`PeerFailed`), and such a peer shuts its groups down at once. For all others the agent waits `_GRACE_SECONDS`, in which
the client may report (`Settle`) that every rank's cell has ended anyway.

Which cell may be interrupted, and for which one groups may be shut down, `cells/lifecycle.py` decides. The agent is the
signals, threads and sockets around it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .cells import await_runner, cell, lifecycle
from .cells.lifecycle import Action, CellLifecycle, Phase, Task
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
_NEWS_SECONDS = 0.5
_GRACE_SECONDS = 0.05
_REST_SECONDS = 0.3
_DEFERRED_SECONDS = 0.5
_DEFERRING = ("__enter__", "__exit__", "_spawn")
_STILL_SECONDS = 0.01  # without movement
_RELEASED = "the cell was interrupted or failed"
_DEPTH = 8  # frames: of contextlib and its generator, of ptyprocess

# Where a rank waits for its peers: in a collective, or in a backward.
_WAITING = tuple(os.path.join(package.__path__[0], "") for package in (dist, autograd))
# A cell's own code runs below one of these ...
_CELL_ENTRIES = {
    interactiveshell.InteractiveShell.run_code.__code__,
    cell._run_function.__code__,
    await_runner.run_to_end.__code__,
}
# ... and while one of these files is on top, an exception would miss it.
_NOT_THE_CELL = {interactiveshell.__file__, cell.__file__, __file__, lifecycle.__file__}


class Agent:
    """One rank's answers to the client's control messages; made and installed on the rank's main thread."""

    def __init__(self, channel: Telemetry, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._main = threading.main_thread().ident
        self._cells = CellLifecycle()
        self._lock = threading.Lock()  # the lifecycle's; held while groups are shut down, which may take long
        self._changed = threading.Condition()  # the lifecycle has changed; never held for long
        self._reporting = threading.Lock()  # the newest status is sent last: the client may see that one alone
        self.gpu: Gpu | None = None  # the rank's; None for a CPU rank
        self.debugger: RankDebugger | None = None  # the visual one
        # The call in which signals do nothing, and when the first came; the main thread's.
        self._deferred_frame: tuple[FrameType, float] | None = None
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
        with self._lock:
            self._cells.join()
        self._report()

    # The cell's hooks, on the main thread

    def _before_cell(self, cell_id: str, label: str) -> None:
        self._deferred_frame = None
        rejoin.note_backwards()
        with self._lock:
            actions = self._cells.begin(cell_id, label, time.monotonic_ns())
        self._channel.send_status(Status("running", cell_id))
        self._carry_out(actions)

    def _on_failure(self, end: cell.CellEnd) -> None:
        try:
            self._cells.fail(end.cell_id)
            self._notify()
            self._judge(end)
            self._take_over_children()
            self._report()
        finally:  # whatever fails here (e.g. out of memory) must not keep its peers from being unblocked
            start_thread(self._shut_down_unless_settled, end.cell_id, cell.UNBLOCKING)

    def _judge(self, end: cell.CellEnd) -> None:
        """Determines whether the cell was interrupted, or failed because another rank did."""
        error = end.error
        end.broke_backward = bool(rejoin.broken_backwards())
        if isinstance(error, RuntimeError):
            end.waited_in = self._waited_in(error)
            if end.waited_in:  # a closed connection may arrive before the message with the cause
                self._wait(lambda: self._cells.explains(end.cell_id), _NEWS_SECONDS)
        own, loss = self._cells.cell, self._cells.unblocked
        if own is not None and own.interrupted:
            if isinstance(error, RuntimeError | KeyboardInterrupt | bdb.BdbQuit | EOFError):
                end.error = KeyboardInterrupt().with_traceback(_users_steps(error))
        elif loss is not None and loss.by is not None and isinstance(error, RuntimeError):
            end.consequence = True
            end.error = error.with_traceback(_users_steps(error))

    def _on_done(self, end: cell.CellEnd) -> None:
        self._cells.end(end.cell_id, end.error is not None)
        self._notify()
        self._take_over_children()
        if end.error is None:
            self._settle(end.cell_id)
        self._report()
        self._channel.flush(end.cell_id)

    def _report(self) -> None:
        ended = self._cells.last_ended
        with self._reporting:
            entered = registry.sequences() if ended is not None and ended[1] else {}
            loss = self._cells.unblocked
            lost_to = None if loss is None else loss.cell.id
            self._channel.send_status(
                Status(self._cells.word, self._cells.open, ended, entered, lost_to, self._is_whole())
            )

    def _is_whole(self) -> bool:
        return self._cells.unblocked is None and dist.is_initialized() and not registry.broken()

    # Signals, on the main thread

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._cells.phase is not Phase.RUNNING or not _in_the_cell(frame):
            return
        held = tracing.inside(frame)
        if held == "waiting":
            return
        if held == "evaluating":
            raise KeyboardInterrupt  # ends what was typed; the cell is interrupted by a later signal
        deferring = _deferring(frame)
        if deferring is not None:
            if self._deferred_frame is None or self._deferred_frame[0] is not deferring:
                self._deferred_frame = deferring, time.monotonic()
            if time.monotonic() - self._deferred_frame[1] < _DEFERRED_SECONDS:
                return
        self._deferred_frame = None
        self._cells.raise_interrupt()
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
            if self._cells.phase is Phase.RUNNING and _in_the_cell(frame):
                raise
            _log.warning("a process started by rank %d has ended", self._rank, exc_info=True)

    def _on_unraisable(self, found: sys.UnraisableHookArgs) -> None:
        """Python drops exceptions in a destructor or a fork's hooks: then the cell has not been interrupted."""
        if found.exc_type is KeyboardInterrupt:
            self._cells.drop_interrupt()
        else:
            self._report_unraisable(found)

    # Control messages, on the channel's thread

    def _answer_interrupt(self, request: Interrupt) -> None:
        with self._lock:
            actions = self._cells.interrupt(request.cells)
        self._notify()
        self._carry_out(actions)

    def _answer_unblock(self, request: Unblock) -> None:
        self._unblock(request.cell, request.by)

    def _answer_peer_failed(self, request: PeerFailed) -> None:
        """More collectives than the peer has entered can't end."""
        entered = request.entered
        if any(count > entered.get(name, count) for name, count in registry.sequences().items()):
            self._unblock(request.cell, request.by)

    def _unblock(self, cell_id: str | None, rank: int) -> None:
        with self._lock:
            actions = self._cells.unblock(cell_id, None if rank == self._rank else rank)
        self._notify()
        self._carry_out(actions)

    def _answer_settle(self, request: Settle) -> Settled:
        self._settle(request.cell)
        whole = self._is_whole() and not rejoin.broken_backwards()
        left = own_collectives.left() if whole else 0
        return Settled(whole, self._cells.open, registry.sequences(), left)

    def _answer_health(self, request: GetHealth) -> Health:
        now, label, seconds = self._activity(), None, None
        last = self._cells.cell  # a cell may begin meanwhile
        if last is not None and now.cell == last.id:
            label, seconds = last.label, (time.monotonic_ns() - last.began_ns) / 1e9
        gpu = self.gpu.read() if self.gpu is not None else None
        return Health(**vars(now), label=label, seconds=seconds, in_flight=own_collectives.in_flight(), gpu=gpu)

    def _answer_ping(self, request: Ping) -> Activity:
        frame = sys._current_frames().get(self._main or 0) if request.stack else None
        return self._activity(() if frame is None else traceback.format_stack(frame))

    def _activity(self, stack: Sequence[str] = ()) -> Activity:
        ended, loss = self._cells.last_ended, self._cells.unblocked
        last, cause = None if ended is None else ended[0], "" if loss is None else loss.cause
        return Activity(self._cells.word, self._cells.open, last, cause, stack)

    def _waited_in(self, error: RuntimeError) -> str:
        """What the rank waited in. Errors here must not keep its peers from being unblocked."""
        try:
            return examine.waited_in(error)
        except Exception:  # noqa: BLE001 - logged; the cell's own error matters more
            _log.exception("could not determine what rank %d waited in", self._rank)
            return ""

    def _answer_examine(self, request: Examine) -> Examination:
        stopped = self.debugger is not None and self.debugger.stopped
        last = self._cells.cell
        began = None if last is None else (last.id, last.began_ns)
        seen = examine.examine(self._main or 0, self._cells.open, began, whole=request.whole)
        return Examination(self._cells.word, seen, stopped)

    # What the lifecycle asks for

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if action.task is Task.INTERRUPT:
                self._begin_interrupt(action.cell_id)
            elif action.task is Task.UNBLOCK:
                self._shut_down(action.cell_id)
            elif action.task is Task.UNBLOCK_WHEN_STILL:
                start_thread(self._shut_down_when_still, action.cell_id, cell.UNBLOCKING)
            elif action.task is Task.ABORT_REST:
                start_thread(self._abort_rest, action.cell_id, "ddp_lab-abort-rest")

    def _notify(self) -> None:
        """Wakes the threads that wait for a change of the lifecycle."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(done, seconds)

    def _settle(self, cell_id: str | None) -> None:
        """From now on no group is shut down for this cell (None: for whichever has ended)."""
        with self._lock:
            self._cells.settle(cell_id)
        self._notify()

    def _shut_down(self, cell_id: str) -> None:
        with self._lock:
            actions = self._cells.shut_down(cell_id)
            if actions:  # the first is to shut down; another thread must not settle the cell before that is done
                registry.shut_down_groups()
                live_model.release(_RELEASED)
        if actions:
            self._notify()
            self._report()
            self._carry_out(actions)

    # Threads of their own

    def _begin_interrupt(self, cell_id: str) -> None:
        if self._asking is not None:
            self._asking.interrupt(cell_id)
        thread = threading.Thread(target=self._interrupt, args=(cell_id,), name="ddp_lab-interrupt", daemon=True)
        tracing.untraced(thread).start()

    def _interrupt(self, cell_id: str) -> None:
        """See [Note: interrupt]."""
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
        while not self._wait(lambda: not self._cells.runs(cell_id), wait):
            if moves.go_on():
                continue
            self._shut_down(cell_id)
            _interrupt_children(told)
            self._signal(cell_id)
            wait = _REPEAT_SECONDS
        _interrupt_forks()

    def _signal(self, cell_id: str) -> None:
        """Interrupts the main thread, unless this cell's code has been interrupted already, or has ended.

        The lock is held, so that no other cell begins in between and is interrupted in its place.
        """
        with self._lock:
            if self._cells.may_signal(cell_id):
                signal.pthread_kill(self._main or 0, signal.SIGINT)

    def _shut_down_unless_settled(self, cell_id: str) -> None:
        """See [Note: unblocking peers]."""
        if not self._wait(lambda: self._cells.is_settled(cell_id), _GRACE_SECONDS):
            self._shut_down_when_still(cell_id)

    def _shut_down_when_still(self, cell_id: str) -> None:
        moves = registry.Moves()
        time.sleep(_STILL_SECONDS)
        while moves.go_on():
            time.sleep(_STILL_SECONDS)
        self._shut_down(cell_id)

    def _abort_rest(self, cell_id: str) -> None:
        time.sleep(_REST_SECONDS)
        while self._cells.runs(cell_id):
            registry.abort_orphaned_works()
            registry.shut_down_store()
            self._wait(lambda: not self._cells.runs(cell_id), _REST_SECONDS)
        registry.stop_polling()


def start_thread(work: Callable[[str], None], cell_id: str, name: str) -> None:
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


def _deferring(frame: FrameType | None) -> FrameType | None:
    """The innermost call that defers interrupts and runs on top, if one does."""
    for _ in range(_DEPTH):
        if frame is None or frame.f_code.co_name in _DEFERRING:
            return frame
        frame = frame.f_back
    return None


def _in_the_cell(frame: FrameType | None) -> bool:
    if frame is None or frame.f_code.co_filename in _NOT_THE_CELL:
        return False
    return any(one.f_code in _CELL_ENTRIES for one, _ in traceback.walk_stack(frame))
