"""Places of code, for the debugger: the lines at which a rank can stop, and the files that a step leads past."""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import types
from importlib.util import find_spec

from IPython.core.inputtransformer2 import TransformerManager

__all__ = ["lines_of_code", "passed_files"]

# Their frames are below each cell, or answer for the rank: a step leads past them.
_PASSED = ("IPython", "ipykernel", "ipyparallel", "tornado", "traitlets", "zmq", "ddp_lab")


def passed_files() -> list[str]:
    """Files that a step leads past: what runs below each cell, between its statements, and the standard library."""
    folders = [os.path.dirname(found.origin) for one in _PASSED if (found := find_spec(one)) and found.origin]
    library = sysconfig.get_paths()["stdlib"]
    for inside in os.scandir(library):
        if inside.is_dir() and inside.name not in ("site-packages", "dist-packages"):
            folders.append(inside.path)
    return [os.path.join(library, "*.py"), *(os.path.join(folder, "**") for folder in folders)]


def lines_of_code(text: str) -> list[int]:
    """The numbers of the lines of a `%%distributed` cell at which a rank can stop; empty if it is not Python."""
    above = re.match(r"\s*%%[^\n]*\n", text)
    body = text[above.end() :] if above is not None else text
    shift = text.count("\n", 0, above.end()) if above is not None else 0
    shift += body.count("\n", 0, len(body) - len(body.lstrip()))
    try:
        code = TransformerManager().transform_cell(body)  # type: ignore[no-untyped-call]
        todo = [compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return []
    found: set[int] = set()
    while todo:
        one = todo.pop()
        found.update(line + shift for _, _, line in one.co_lines() if line)
        todo += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    return sorted(found)
