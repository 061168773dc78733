"""Rank side: runs one cell as IPython would and reports how it ended.

The client sends each rank a `Cell`, with which `run` is called. The cell goes through `shell.run_cell`: magics, `!cmd`,
top-level `await`, displays and the shell's events behave as in a plain notebook. Other actions around a
cell are in three lists of hooks: `before_cell`, `on_failure`, `on_done`.

[Note: a short traceback]
A backward has four frames of torch, and a forward six for each module, including ours; the user's frames and the last
one matter. Only IPython's rendering with context is folded: other modes (``%xmode Verbose``) are an explicit choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...diagnosis.stacks import is_users
from ...protocol.messages import Cell, CellReport, CellText
from . import await_runner, sources, variables

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"Cell |File (.+?):\d+(?:, in |\n|$)")
_FEWEST = 2  # omitted frames: a single one is as short as the line on it


@dataclass
class CellEnd:
    """How a cell ended on this rank.

    Attributes:
        cell_id: the client's id of the cell run.
        label: the cell's name in tracebacks, e.g. ``"%%distributed [3]"``.
        error: the cell's exception, None if it succeeded. An `on_failure` hook may replace it by another exception with
            the same traceback (an interrupt instead of the error of an unblocked collective).
        time_ns: when it was raised, or when the cell ended, on the host's monotonic clock.
        consequence: set by a hook when the error only followed another rank's.
        waited_in: set by a hook: what this rank waited in when its collective failed, in words.
        broke_backward: set by a hook: whether a model's backward was in progress.
        raised: the exception that was raised, whatever `error` became.
        pid: of the process that began the cell.
    """

    cell_id: str
    label: str
    error: BaseException | None = None
    time_ns: int = 0
    consequence: bool = False
    waited_in: str = ""
    broke_backward: bool = False
    raised: BaseException | None = None
    pid: int = field(default_factory=os.getpid)


before_cell: list[Callable[[str, str], None]] = []
"""Called with cell id and label before a cell's first line."""
on_failure: list[Callable[[CellEnd], None]] = []
"""Called when an exception reaches the cell's top, before its traceback is formatted; peers are unblocked here."""
on_done: list[Callable[[CellEnd], None]] = []
"""Called after the cell and before its reply is sent: the last flush."""

_running: str | None = None
_NOT_THE_USERS = {__file__, variables.__file__}  # frames above a function's own
_failed: dict[str, str] = {}  # the last cells that failed here: id -> how, in words
_REMEMBERED = 256
_begun: deque[str] = deque(maxlen=_REMEMBERED)  # ids of cells that were run here
UNBLOCKING = "ddp_lab-unblock"  # name of a thread that unblocks the peers of a failed cell


def running() -> str | None:
    """The id of the running cell, None between cells; callable from any thread."""
    return _running


def latest() -> str | None:
    """The id of the cell that began last; callable from any thread."""
    return _begun[-1] if _begun else None


class _Forgetful(dict[int, Any]):
    """Where IPython would keep, for %notebook, all that cells print, display and raise: the client has it."""

    def __missing__(self, number: int) -> list[Any]:
        return []

    def __setitem__(self, number: int, value: Any) -> None:
        """Keeps nothing."""


class NotRun(Exception):
    """A cell waited on this rank for one that failed: it is not run."""


def run(cell: Cell, function: Callable[..., Any] | None = None, args: Any = (), kwargs: Any = None) -> CellReport:
    """Runs one cell, or one function, in the rank's namespace.

    Args:
        cell: the client's.
        function: what to call instead of a cell's text, with `args` and `kwargs`.
    """
    global _running
    from IPython import get_ipython

    shell = get_ipython()
    end = CellEnd(cell.id, cell.label)
    text = cell.text or CellText("")
    if end.cell_id in _begun:  # sent again, because the first request seemed to be lost with a controller
        raise RuntimeError(f"cell {end.label} has already run on this rank")
    _begun.append(end.cell_id)
    _let_peers_be_unblocked()
    prepare(shell)
    sources.name_cells(shell, end.label, _first_line(text), text.above and f"{text.above}{text.text}")
    try:
        for begun in before_cell:
            begun(end.cell_id, end.label)
        _running = end.cell_id
        with _watching(shell, end):
            ahead = next((_failed[each] for each in cell.after if each in _failed), None)
            if ahead is not None:
                _refuse(shell, end, ahead)
                value = None
            elif function is None:
                value = _run_text(shell, text.text, end)
            else:
                _remember_sources(cell.sources)
                value = _run_function(shell, end, function, args, kwargs or {})
    except BaseException as error:  # not the cell's code failed but the code around it: e.g. out of memory
        if end.error is None:
            _note_failure(end, error)
        raise
    finally:
        _end_copy(end)
        _running = None
        end.time_ns = end.time_ns or time.monotonic_ns()
        _remember_failure(end)
        for done in on_done:
            done(end)
    return _report(shell, end, value, always=function is not None)


def _let_peers_be_unblocked() -> None:
    """Waits (0.05 s at most) for the consequences of an earlier cell's failure, which belong to that cell."""
    for thread in threading.enumerate():
        if thread.name == UNBLOCKING:
            thread.join()


def _remember_failure(end: CellEnd) -> None:
    if end.error is None:
        return
    if isinstance(end.error, NotRun):
        _failed[end.cell_id] = str(end.error)
    elif isinstance(end.error, KeyboardInterrupt):
        _failed[end.cell_id] = f"cell {end.label}, queued before it, was interrupted"
    else:
        _failed[end.cell_id] = f"cell {end.label}, queued before it, failed"
    while len(_failed) > _REMEMBERED:
        del _failed[next(iter(_failed))]


def _refuse(shell: Any, end: CellEnd, why: str) -> None:
    _note_failure(end, NotRun(why))
    shell._last_traceback = [f"NotRun: {why}"]


def _run_text(shell: Any, code: str, end: CellEnd) -> Any:
    result = shell.run_cell(code, store_history=True, silent=False)
    error = result.error_in_exec or result.error_before_exec
    if error is None and getattr(shell, "_last_traceback_during_displayhook", False):
        error = RuntimeError("displaying the value failed")
    if error is None:
        # A nested run (%%capture, %run) may have shown a traceback without failing the cell.
        end.error, end.raised, end.time_ns = None, None, 0
    else:
        _note_failure(end, error)
    _show_pages(shell)
    return result.result


def _show_pages(shell: Any) -> None:
    """Displays what `?name` and %page would open in a pager, which ranks don't have."""
    for payload in shell.payload_manager.read_payload():
        if payload.get("source") == "page":
            shell.display_pub.publish(data=payload["data"])
    shell.payload_manager.clear_payload()


def _run_function(shell: Any, end: CellEnd, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  the rank replies whatever was raised, also SystemExit
        _note_failure(end, error)
        shown = end.error or error
        trace = shown.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_USERS:
            trace = trace.tb_next
        shell.showtraceback((type(shown), shown, trace), tb_offset=0)
        return None


def _note_failure(end: CellEnd, error: BaseException) -> None:
    """Records the time of the first failure and runs the hooks once."""
    if end.raised is error:
        return
    _end_copy(end, error)
    first = end.raised is None
    end.error = end.raised = error
    if isinstance(error, asyncio.CancelledError) and await_runner.was_interrupted():
        end.error = KeyboardInterrupt("interrupted in an await").with_traceback(error.__traceback__)
    if first:
        end.time_ns = time.monotonic_ns()
        for failed in on_failure:
            failed(end)


def _end_copy(end: CellEnd, error: BaseException | None = None) -> None:
    """Ends a process that the cell has forked and that leaves the cell's code, by an error or an interrupt.

    It has the rank's sockets: it would otherwise answer the client in the rank's place and shut down its groups.
    """
    if os.getpid() == end.pid:
        return
    if error is not None and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


@contextlib.contextmanager
def _watching(shell: Any, end: CellEnd) -> Iterator[None]:
    """Sees an exception when the shell does: before 20-100 ms of formatting its traceback."""
    show = shell.showtraceback

    def watched(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if kwargs.get("running_compiled_code") and error is not None:
            _note_failure(end, error)
            if end.error is not None:  # a hook may have replaced it, or shortened its traceback
                return show((type(end.error), end.error, end.error.__traceback__), **kwargs)
        return show(*args, **kwargs)

    shell._last_traceback = None
    shell._last_traceback_during_displayhook = False
    shell.showtraceback = watched
    try:
        yield
    finally:
        del shell.showtraceback


def _report(shell: Any, end: CellEnd, value: Any, always: bool) -> CellReport:
    kind = type(value).__name__
    if end.error is None:
        blob, unsent = None, ""
        if always or variables.is_small(value):
            try:
                blob = variables.to_bytes(value)
            except variables.NotPortableError as error:
                unsent = str(error) if always else ""
        return CellReport(True, kind, blob, unsent)
    rendered = list(shell._last_traceback or traceback.format_exception(end.error))
    return CellReport(
        False,
        kind,
        name=type(end.error).__name__,
        message=text_of(end.error),
        traceback=rendered,
        brief=_folded(rendered, shell.InteractiveTB.mode),
        time_ns=end.time_ns,
        consequence=end.consequence,
        waited_in=end.waited_in,
        broke_backward=end.broke_backward,
    )


def _folded(rendered: Sequence[str], mode: str = "Context") -> list[str]:
    """The parts of a traceback with the user's frames and the innermost one of each exception, the others counted: see
    [Note: a short traceback].

    Args:
        rendered: IPython's: headings, frames and messages, a part for each.
        mode: of the rendering.
    """
    if mode != "Context":
        return list(rendered)
    made: list[str] = []
    run: list[str] = []  # library frames in a row
    for number, part in enumerate(rendered):
        frame = _FRAME.match(_ANSI.sub("", part))
        following = rendered[number + 1] if number + 1 < len(rendered) else ""
        innermost = _FRAME.match(_ANSI.sub("", following)) is None
        if frame is None or innermost or frame[1] is None or is_users(os.path.expanduser(frame[1])):
            made += _left_out(run)
            run = []
            made.append(part)
        else:
            run.append(part)
    return made


def _left_out(run: Sequence[str]) -> list[str]:
    return list(run) if len(run) < _FEWEST else [f"… {len(run)} library frames\n"]


def text_of(error: BaseException) -> str:
    """An exception's message, whatever its class does."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  a user's __str__ may raise anything; the failure must still arrive
        return f"<str() of it raised {type(broken).__name__}>"


def _first_line(cell: CellText) -> int:
    """The number of the first line that the shell compiles: it omits empty lines above the code."""
    above = cell.text[: len(cell.text) - len(cell.text.lstrip())]
    return cell.first_line + above.count("\n")


def prepare(shell: Any) -> None:
    """Gives the shell our loop runner and no memory of outputs; cheap when already done."""
    if shell.loop_runner is not await_runner.run_to_end:
        shell.loop_runner = await_runner.run_to_end
        shell.history_manager.outputs = _Forgetful()
        shell.history_manager.exceptions = _Forgetful()
        shell._format_exception_for_storage = lambda *_, **__: {}  # as long as the traceback itself, for nothing


def _remember_sources(sources: Mapping[str, str]) -> None:
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
