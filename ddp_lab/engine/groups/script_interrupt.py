"""Ends the collective in which a script's rank waits when it is interrupted, so that it gets its KeyboardInterrupt.

Python runs a signal's handler once the main thread is back in Python code, which one that waits in a collective is not.
But it writes the signal's number to a descriptor at once (`signal.set_wakeup_fd`). A thread of ours reads it and sends
the main thread a signal of ours, `_PROBE`: if that one's handler does not run either, and nothing moves on the rank's
connections, the thread shuts the rank's groups down, as `agent.py` does for a cell. The collective fails, and the
program's own handler runs at the line that waited.

A SIGTERM counts only if the program has a handler for it: without one it ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

__all__ = ["ended_wait", "install"]

_PROBE = signal.SIGURG  # ignored unless there is a handler, and used by no library; Go's runtime takes it for the same
# Seconds without movement. A program with a handler of its own may want to finish its step.
_STILL_SECONDS = {signal.SIGINT: 0.5, signal.SIGTERM: 1.5}
_LOOK_SECONDS = 0.1
_SOON_SECONDS = 0.005  # less than a peer that is interrupted, too, needs to end and to close its connections
_REST_SECONDS = 0.3
_reached = threading.Event()  # the main thread has run the handlers of its signals
_waits = threading.Event()  # it had not when a signal had come


def install(store_port: int) -> None:
    """Starts the thread; call it before the program makes a group. It is not started by another thread than the main
    one, nor if the program itself uses what it needs.

    Args:
        store_port: of the rendezvous store, whose connections belong to no group.
    """
    from . import registry  # torch, which the worker imports without Python's collector

    registry.install(seals=False)
    registry.exclude_port(store_port)
    if threading.current_thread() is not threading.main_thread() or _is_used():
        return
    noted, note = os.pipe()
    os.set_blocking(note, False)
    signal.signal(_PROBE, _reach)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    main = threading.get_ident()
    threading.Thread(target=_watch, args=(noted, main), name="ddp_lab-interrupt", daemon=True).start()


def ended_wait(interrupt: BaseException) -> BaseException | None:
    """The error of a collective that failed so that its rank could be interrupted; None if the rank was in none."""
    error = interrupt.__context__
    while _waits.is_set() and error is not None:
        if isinstance(error, RuntimeError):
            return error
        error = error.__context__
    return None


def _is_used() -> bool:
    """Whether the program has a handler for our signal, or is written its signals' numbers itself."""
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor)
    return descriptor != -1 or signal.getsignal(_PROBE) not in (signal.SIG_DFL, signal.SIG_IGN, _reach)


def _reach(*_: object) -> None:
    _reached.set()


def _forget() -> None:
    """A forked process's signals are its own."""
    with contextlib.suppress(ValueError):  # forked by another thread than the main one, which has no handlers to run
        signal.set_wakeup_fd(-1)


def _watch(noted: int, main: int) -> None:
    while True:
        for number in set(os.read(noted, 256)) & _STILL_SECONDS.keys():
            _end_wait(signal.Signals(number), main)


def _end_wait(received: signal.Signals, main: int) -> None:
    if signal.getsignal(_PROBE) is not _reach:  # the program uses that signal, so nobody knows what it waits for
        return
    from . import registry

    _reached.clear()
    signal.pthread_kill(main, _PROBE)
    if not _reached.wait(_SOON_SECONDS):
        _waits.set()
    moves, still = registry.Moves(), time.monotonic() + _STILL_SECONDS[received]
    while time.monotonic() < still:
        if _reached.wait(_LOOK_SECONDS):
            return
        if moves.go_on():
            still = time.monotonic() + _STILL_SECONDS[received]
    for end in (registry.shut_down_groups, registry.abort_orphaned_works, registry.shut_down_store):
        end()
        if _reached.wait(_REST_SECONDS):
            return
