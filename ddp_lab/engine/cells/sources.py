"""Rank side: the sources of cells, for tracebacks, `inspect.getsource`, `?name` and debuggers.

[Note: sources of cells]
The code of a cell is named `<cell LABEL>`, and its lines stay in `linecache` under this name. Functions know the name
of their code. A class knows only its module, and `__main__` has no file: so `inspect.getfile` is taught to look at the
class's methods, or else for the newest cell that defines a class of that name.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import types
from collections.abc import Callable
from typing import Any

_CELL = "<cell "
_getfile = inspect.getfile
_getabsfile = inspect.getabsfile
_notebooks: dict[str, str] = {}  # name -> the whole text of the notebook's cell, with the lines above the code

on_named: list[Callable[[str], None]] = []
"""Called with the name of a cell's code before it is compiled, if the text of its notebook cell is known."""


def named() -> tuple[str, ...]:
    """The names of the cells whose notebook cells are known, in the order in which they were run."""
    return tuple(_notebooks)


def notebooks_text(name: str) -> str:
    """The whole text of the notebook's cell; "" if it is not known."""
    return _notebooks.get(name, "")


def install() -> None:
    """Makes `inspect` find the files of this rank's cells; see [Note: sources of cells]."""
    global _getfile
    if inspect.getfile is not _file_of:  # type: ignore[comparison-overlap, unused-ignore]
        _getfile = inspect.getfile  # torch.package may have replaced it
        inspect.getfile = _file_of  # type: ignore[assignment]
        inspect.getabsfile = _absolute_file_of  # type: ignore[assignment]


def name_cells(shell: Any, label: str, first_line: int, notebooks: str = "") -> None:
    """Makes the shell name the next cell's code after its label, and count its lines from `first_line`.

    Args:
        shell: this process's.
        label: the cell's.
        first_line: number of the code's first line.
        notebooks: the whole text of the notebook's cell, for debuggers; "" if it is none.
    """
    if not hasattr(shell.compile, "ddp_lab_label"):
        shell.compile.__class__ = _labelled(type(shell.compile))
    shell.compile.ddp_lab_label = label
    shell.compile.ddp_lab_skipped = first_line - 1
    shell.compile.ddp_lab_notebooks = notebooks


def _labelled(compiler: type) -> type:
    class LabelledCompiler(compiler):  # type: ignore[misc]
        """Names a cell's code after the client's cell, not after the rank's own execution count."""

        ddp_lab_label = ""
        ddp_lab_skipped = 0  # lines of the notebook's cell above the code
        ddp_lab_notebooks = ""

        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            if not self.ddp_lab_label:
                return str(super().get_code_name(raw_code, transformed_code, number))
            name = f"{_CELL}{self.ddp_lab_label}>"
            lines = linecache.cache.get(name)
            # The same label twice (a cell that runs a nested cell): both keep their own lines.
            return name if lines is None else f"{_CELL}{self.ddp_lab_label} #{number}>"

        def format_code_name(self, name: str) -> tuple[str, str] | None:
            if name.startswith(_CELL):
                return "Cell", name[len(_CELL) : -1]
            found: tuple[str, str] | None = super().format_code_name(name)
            return found

        def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
            skipped, self.ddp_lab_skipped = self.ddp_lab_skipped, 0  # a nested cell has lines of its own
            name = str(super().cache(transformed_code, number, raw_code))
            self._ddp_lab_shift = (name, skipped)
            whole, self.ddp_lab_notebooks = self.ddp_lab_notebooks, ""
            lines = ["\n"] * skipped + transformed_code.splitlines(keepends=True)
            linecache.cache[name] = (len(transformed_code), None, lines, name)
            if whole:
                _notebooks[name] = whole
                for call in on_named:
                    call(name)
            return name

        def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
            name, skipped = getattr(self, "_ddp_lab_shift", ("", 0))
            skipped = skipped if name == filename else 0
            try:
                tree: ast.AST = super().ast_parse(source, filename, symbol)
            except SyntaxError as error:
                error.lineno = (error.lineno or 1) + skipped
                error.end_lineno = error.end_lineno and error.end_lineno + skipped
                raise
            return ast.increment_lineno(tree, skipped)

    return LabelledCompiler


def _file_of(thing: Any) -> str:
    """`inspect.getfile`, also for classes that were defined in a cell."""
    if isinstance(thing, type) and thing.__module__ == "__main__":
        name = _cell_of(thing)
        if name is not None:
            return name
    return _getfile(thing)


def _absolute_file_of(thing: Any, _filename: str | None = None) -> str:
    """`inspect.getabsfile`; the name of a cell is not one of a file."""
    name = _filename
    if name is None:
        name = inspect.getsourcefile(thing) or inspect.getfile(thing)
    return name if name.startswith(_CELL) else _getabsfile(thing, name)


def _cell_of(cls: type) -> str | None:
    """The name of the cell in which a class was defined, None if it was not."""
    for member in vars(cls).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        if not isinstance(function, types.FunctionType) or not function.__code__.co_filename.startswith(_CELL):
            continue
        if function.__qualname__.startswith(f"{cls.__qualname__}."):
            return function.__code__.co_filename
    pattern = re.compile(rf"^\s*class\s+{re.escape(cls.__name__)}\b", re.MULTILINE)
    for name in reversed(list(linecache.cache)):
        if name.startswith(_CELL) and pattern.search("".join(linecache.getlines(name))):
            return name
    return None
