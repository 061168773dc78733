"""pydevd, debugpy's tracer, in this process: begun for a client's debugger, ended without a trace.

[Note: a debugger without a port]
`debugpy.listen` would start another process and open a TCP port without a key, at which every user of the machine could
run code in the rank. So pydevd gets one end of a pair of sockets within this process, where it otherwise connects to
a debugger. Requests and events travel over the client's wire, as cells do. While nobody debugs, nothing is traced.

[Note: a cell's two names]
The code of a cell is named `<cell LABEL>`, in tracebacks and for `inspect`. JupyterLab names the same cell by a hash of
its text. pydevd's source mapping translates both ways; the line numbers are the same. A cell that was run again is
found under its newest name.

The process has one tracer. The thread of `Session` begins and ends it; the main thread adds names of cells.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

__all__ = [
    "answering",
    "available",
    "begin",
    "begun",
    "clear_main_thread",
    "end",
    "inside",
    "leave_out",
    "name_cell",
    "renew",
    "untraced",
]

_MISSING = "debugpy is not installed for the ranks' Python: `pip install debugpy` there, then `%cluster restart`"
_LINES = 1_000_000  # more than a cell has
_WAITS = (threading.__file__,)  # in which pydevd's own frames wait
_SERVICES = ("ddp_lab-", "IOPub", "Heartbeat", "Control", "IPythonHistorySavingThread", "Tornado")


class _State:
    """What this process has of pydevd."""

    def __init__(self) -> None:
        self.folder = ""  # of its files; "" before it was first begun
        self.hidden: list[threading.Thread] = []  # that the present tracer leaves alone


_state = _State()


def available() -> str:
    """Why this process can't be debugged, and what to do; "" if it can."""
    return "" if find_spec("debugpy") is not None else _MISSING


def answering(kernel: Any, publish: Callable[[dict[str, Any]], None], connection: Any) -> Any:
    """ipykernel's debugger for a rank, which answers what concerns its namespace; see `Session`.

    Args:
        kernel: the rank's.
        publish: takes its events.
        connection: to pydevd.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules, which no cell is in
    import debugpy.server.api  # noqa: F401  it makes pydevd importable
    from ipykernel import debugger

    if not debugger._is_debugpy_available:  # ranks are forked from a process that has spared its imports
        importlib.reload(debugger)
    made: Any = debugger.Debugger(kernel.log, None, publish, None, kernel.session, [])  # type: ignore[no-untyped-call]
    made.debugpy_client = connection
    return made


def begun() -> bool:
    """Whether a tracer is active."""
    return _tracer() is not None


def begin() -> socket.socket:
    """Begins to trace all threads of the user's; returns the socket at which pydevd speaks the debug adapter protocol.

    Not on the main thread.
    """
    import debugpy
    import pydevd

    if not _state.folder:
        os.register_at_fork(after_in_child=_in_forked_process)
    _state.folder = os.path.dirname(debugpy.__file__)
    _hide_services()
    ours, its = socket.socketpair()
    connect = pydevd.start_client
    pydevd.start_client = lambda host, port: its  # see [Note: a debugger without a port]
    try:
        pydevd.settrace(
            host="ddp_lab",
            port=0,
            suspend=False,
            protocol="dap",
            patch_multiprocessing=False,
            wait_for_ready_to_run=False,
            notify_stdin=False,
            dont_trace_start_patterns=(_state.folder,),
        )
    finally:
        pydevd.start_client = connect
    return ours


def end() -> None:
    """Ends the tracer; a thread that it holds continues. Call `clear_main_thread` on the main thread afterwards."""
    import pydevd

    pydevd.stoptrace()
    for thread in _state.hidden:
        thread.is_pydev_daemon_thread = False  # type: ignore[attr-defined]


def clear_main_thread() -> None:
    """Frees the calling thread of a tracer that has ended, which would still cost it some time at each call."""
    if not begun():
        sys.settrace(None)


def renew() -> None:
    """Traces the main thread again, on which an interrupt within the tracer has ended it; cheap if it is traced."""
    tracer = _tracer()
    if tracer is not None and sys.gettrace() is None and sys.version_info < (3, 12):
        tracer.enable_tracing()


def name_cell(name: str, source: str) -> None:
    """Gives the code called `name` the breakpoints of the file `source`; see [Note: a cell's two names].

    Args:
        name: e.g. ``"<cell %%distributed [3]>"``.
        source: the debugger's path of the cell.
    """
    tracer = _tracer()
    if tracer is None:
        return
    from _pydevd_bundle.pydevd_api import PyDevdAPI
    from _pydevd_bundle.pydevd_source_mapping import SourceMappingEntry

    with tracer._main_lock:
        problem = PyDevdAPI().set_source_mapping(tracer, source, [SourceMappingEntry(1, _LINES, 1, name)])
    if problem:
        raise RuntimeError(f"the debugger could not name {name}: {problem}")


def inside(frame: FrameType | None) -> str:
    """Where an interrupt finds a thread.

    Returns:
        ``"waiting"`` at a breakpoint or in the tracer's code, where an exception would end the tracing;
        ``"evaluating"`` what the user typed while it is stopped; "" in other code.
    """
    if not _state.folder or frame is None:
        return ""
    above = frame
    while above.f_code.co_filename in _WAITS and above.f_back is not None:
        above = above.f_back
    if above.f_code.co_filename.startswith(_state.folder):
        return "waiting"
    walked: FrameType | None = above
    while walked is not None:
        if walked.f_code.co_filename.startswith(_state.folder):
            return "evaluating"
        if walked.f_code.co_filename.startswith("<cell "):
            return ""
        walked = walked.f_back
    return ""


def untraced(thread: threading.Thread) -> threading.Thread:
    """The thread, not started yet, which the debugger will neither trace nor stop."""
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    return thread


def leave_out(thread: threading.Thread) -> threading.Thread:
    """The thread, which the debugger will neither trace nor stop nor list."""
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return untraced(thread)


def _hide_services() -> None:
    """Leaves out the threads that answer for this rank: stopped, they could not continue it."""
    _state.hidden = [one for one in threading.enumerate() if one.name.startswith(_SERVICES) or _of_library(one)]
    for thread in _state.hidden:
        leave_out(thread)


def _of_library(thread: threading.Thread) -> bool:
    """Whether the thread is one that ipykernel, ipyparallel or zmq has started."""
    module = type(thread).__module__.partition(".")[0]
    return module in ("ipykernel", "ipyparallel", "zmq", "IPython", "tornado", "jupyter_client")


def _tracer() -> Any:
    """pydevd's object, None if there is none."""
    constants = sys.modules.get("_pydevd_bundle.pydevd_constants")
    found = constants.get_global_debugger() if constants is not None and _state.folder else None
    return None if found is None or found.pydb_disposed else found


def _in_forked_process() -> None:
    """A forked process has no debugger: its breakpoints would stop it with nobody to continue it."""
    tracer = _tracer()
    if tracer is None:
        return
    import pydevd

    tracer.pydb_disposed = True
    pydevd.settrace_forked(setup_tracing=False)
    pydevd.stoptrace()
