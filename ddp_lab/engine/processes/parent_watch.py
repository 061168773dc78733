"""Ends this process when its parent ends, in whatever way (standard library only).

Two independent means, because each has a gap:

- a thread that waits on a file descriptor of the parent's process: it needs the GIL of *this* process;
- the kernel's parent-death signal: it follows the parent's *thread*, so it is only right below a parent whose
  starting thread lives as long as the parent does.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.25
_client: int | None = None  # descriptor of the process that removes its clusters' folders itself


def kill_with_parent_thread(parent: int) -> None:
    """Lets the kernel SIGKILL this process when the parent's thread that started it ends.

    Args:
        parent: process id of the expected parent; if it has already ended, this process ends here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def on_parent_exit(parent: int, then: Callable[[], None]) -> threading.Thread:
    """Calls `then` on a thread once the process `parent`, which must be this process's parent, has ended.

    A parent that ended before this call counts as ended: its process id is compared after it was opened.
    """
    thread = threading.Thread(target=_wait, args=(parent, then), name="ddp_lab-parent-watch", daemon=True)
    thread.start()
    return thread


def on_exit(pid: int, then: Callable[[], None]) -> threading.Thread:
    """Calls `then` on a thread once another process than the parent has ended; one that is not there has ended."""
    thread = threading.Thread(target=_wait_for, args=(pid, then), name="ddp_lab-watch", daemon=True)
    thread.start()
    return thread


def has_client(pid: int) -> None:
    """Leaves folders to the process `pid`, and those that are forked from this one do: it removes them as it ends."""
    global _client
    _client = _open(pid)


def end_and_remove(folder: str) -> NoReturn:
    """Ends this process, and then removes a folder in which its other threads may have made files until now; a client
    that is there removes it itself.
    """
    if _client is not None:
        poll = select.poll()
        poll.register(_client, select.POLLIN)
        if not poll.poll(0):
            os._exit(0)
    try:
        os.execlp("rm", "rm", "-rf", "--", folder)
    except OSError as error:
        print(f"could not remove {folder}: `rm` could not be started: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _wait_for(pid: int, then: Callable[[], None]) -> None:
    descriptor = _open(pid)
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll():
            pass
    then()


def _wait(parent: int, then: Callable[[], None]) -> None:
    if os.getppid() == parent:
        _wait_for(parent, lambda: None)
    while os.getppid() == parent:  # if the kernel has no pidfd
        threading.Event().wait(_POLL_SECONDS)
    then()


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
