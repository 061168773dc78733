"""Finds a cell's syntax errors before it is sent.

Ranks transform a cell as IPython does (magics, `!cmd`, `name?`) and allow `await` at its top; so does this.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from ..control.records import CellText

__all__ = ["check"]

# Cell magics on their own first line whose body is Python that runs in the rank's namespace.
_AROUND_PYTHON = re.compile(r"\s*%%(time|capture|prun)\b[^\n]*\n")


def check(shell: Any, cell: CellText, label: str) -> None:
    """Raises what compiling the cell on a rank would raise, at the notebook's own line.

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
