"""Short tracebacks in notebooks: the user's own lines and the message, without frames of this package.

A `ValueError` or `TypeError` that our own statements raise is about the user's arguments, a `ClusterError` about the
cluster's state. Errors that Python or a library raises inside our code are bugs and are shown in full. A lesson that
was copied without the folders beside it reports that.
"""

from __future__ import annotations

import dis
import linecache
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import lesson_files
from ..cluster.cells.failures import marked, on_any_page
from ..errors import ClusterError, DdpLabError

__all__ = ["load", "unload"]

_KINDS = (ValueError, TypeError, ClusterError, ModuleNotFoundError)
_OURS = str(Path(__file__).parents[1]) + os.sep
_RAISE = dis.opmap["RAISE_VARARGS"]


def load(shell: Any) -> None:
    """Makes an IPython shell show such errors briefly, unless it has another handler."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(_KINDS, _show)


def unload(shell: Any) -> None:
    """Undoes that."""
    if shell.custom_exceptions == _KINDS:
        shell.set_custom_exc((), None)


def _show(shell: Any, kind: type, error: Any, frames: TracebackType, tb_offset: int | None = None) -> None:
    """Called by IPython with the exception that a cell raised."""
    if _is_lesson_alone(error, frames):
        words = f"{marked(kind.__name__)}: {error}. {_lesson_alone()}"
        error._render_traceback_ = lambda: [words]
    users = frames if hasattr(error, "_render_traceback_") else _users(frames)  # a magic's traceback is brief already
    if users is frames:
        shell.showtraceback((kind, error, frames), tb_offset=tb_offset, running_compiled_code=True)
        return
    cause, suppress = error.__cause__, error.__suppress_context__
    error.__cause__ = None  # it was raised here too
    lines = shell.InteractiveTB.structured_traceback(kind, error, users, tb_offset=tb_offset)
    error.__cause__, error.__suppress_context__ = cause, suppress
    error._render_traceback_ = lambda: [on_any_page(line) for line in lines]  # IPython shows that
    shell.showtraceback((kind, error, users), running_compiled_code=True)
    del error._render_traceback_


def _is_lesson_alone(error: Any, frames: TracebackType) -> bool:
    """Whether a cell imports the checks of a lesson and they are missing."""
    last = _chain(frames)[-1]
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    return isinstance(error, ModuleNotFoundError) and error.name == "checks" and "from checks." in line


def _lesson_alone() -> str:
    """The fix for a lesson that was copied without its folders."""
    try:
        lessons = f"the folders in {lesson_files.home() / 'tutorials'}"
    except DdpLabError:
        lessons = "the folders of tutorials in ddp_lab's repository"
    return (
        f"A lesson needs {lessons} (checks, images, recordings) beside its notebook: copy them there, or run "
        "`ddp-lab lab` in a terminal and open the lesson there."
    )


def _chain(frames: TracebackType) -> list[TracebackType]:
    chain = [frames]
    while chain[-1].tb_next is not None:
        chain.append(chain[-1].tb_next)
    return chain


def _users(frames: TracebackType) -> TracebackType:
    """The frames up to the last that is not ours, if the innermost is ours and raises; else all."""
    chain = _chain(frames)
    last = chain[-1]
    if not _is_ours(last) or last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE:
        return frames
    while chain and _is_ours(chain[-1]):
        chain.pop()
    kept: TracebackType | None = None
    for one in reversed(chain):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept or frames


def _is_ours(one: TracebackType) -> bool:
    return one.tb_frame.f_code.co_filename.startswith(_OURS)
