"""Errors of cells as notebooks show them: syntax errors before a cell is sent, and short tracebacks.

A traceback has the user's own lines and the message, without frames of this package.

A `ValueError` or `TypeError` that our own statements raise is about the user's arguments, a `ClusterError` about the
cluster's state. Errors that Python or a library raises inside our code are bugs and are shown in full. A lesson that
was copied without the folders beside it reports that.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import re
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from .. import lesson_files
from ..cluster.cells.failures import marked, on_any_page
from ..errors import ClusterError, DdpLabError
from ..protocol.messages import CellText

__all__ = ["check_syntax", "load", "unload"]

_KINDS = (ValueError, TypeError, ClusterError, ModuleNotFoundError)
_OURS = str(Path(__file__).parents[1]) + os.sep
_RAISE = dis.opmap["RAISE_VARARGS"]
# Cell magics on their own first line whose body is Python that runs in the rank's namespace.
_AROUND_PYTHON = re.compile(r"\s*%%(time|capture|prun)\b[^\n]*\n")


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


def check_syntax(shell: Any, cell: CellText, label: str) -> None:
    """Raises what compiling the cell on a rank would raise, at the notebook's own line.

    Ranks transform a cell as IPython does (magics, `!cmd`, `name?`) and allow `await` at its top; so does this.

    Args:
        shell: this process's shell, which knows the single lines that are magics without their `%`.
        cell: the cell.
        label: its name in the error.

    Raises:
        SyntaxError: the cell is not valid Python for IPython.
    """
    text, above = cell.text, cell.first_line - 1
    while (magic := _AROUND_PYTHON.match(text)) is not None:
        above += text.count("\n", 0, magic.end())
        text = text[magic.end() :]
    above += text.count("\n", 0, len(text) - len(text.lstrip()))  # IPython omits empty lines above the code
    code = text
    try:
        code = TransformerManager().transform_cell(text)  # type: ignore[no-untyped-call]
        _compile(code, label)
    except SyntaxError as error:
        if (
            len(text.strip().splitlines()) == 1
            and shell.prefilter_manager.prefilter_lines(code).strip() != code.strip()
        ):
            return  # `cd folder`
        line = error.lineno or 1
        error.text = error.text or "".join(code.splitlines(keepends=True)[line - 1 : line])
        error.lineno = line + above
        error.end_lineno = error.end_lineno and error.end_lineno + above
        error.filename = f"<cell {label}>"
        _show_briefly(shell, error)
        raise error.with_traceback(None) from None


def _show_briefly(shell: Any, error: SyntaxError) -> None:
    """Makes the shell show the error as for a cell that it compiled itself: without the frames of this package."""
    show = shell.showsyntaxerror

    def shown(filename: str | None = None, running_compiled_code: bool = False) -> None:
        shell.showsyntaxerror = show
        show(filename, running_compiled_code and sys.exc_info()[1] is not error)

    shell.showsyntaxerror = shown


def _compile(code: str, label: str) -> None:
    """As IPython does: one statement after the other."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks show them
        tree = compile(code, f"<cell {label}>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        for statement in tree.body:
            compile(ast.Module([statement], []), f"<cell {label}>", "exec", flags, dont_inherit=True)
