"""Python source as text: parse as a notebook does, replace parts, indent, names that code binds."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterable, Iterator

__all__ = ["awaits", "bound_names", "dedented", "indented", "is_empty", "parsed", "replaced", "segment"]

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_AWAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)

Edit = tuple[int, int, str]
"""Start and end of a part of a text, and what takes its place."""


def parsed(text: str) -> ast.Module:
    """The tree of a cell's code, which may use `await` at its top.

    Raises:
        SyntaxError: it is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape sequence, for example; the script's run shows it
        tree = compile(text, "<cell>", "exec", _FLAGS, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def segment(text: str, node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Where a node with its decorators begins and ends in the text."""
    first = min([node, *getattr(node, "decorator_list", [])], key=lambda one: one.lineno)
    begin = _offset(text, first.lineno, node.col_offset)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return begin, _offset(text, node.end_lineno, node.end_col_offset)


def _offset(text: str, line: int, column: int) -> int:
    """A place in the text; the parser counts columns in bytes."""
    lines = text.split("\n")
    return sum(len(one) + 1 for one in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


def replaced(text: str, edits: Iterable[Edit]) -> str:
    """The text with parts replaced; of nested parts, the outermost counts."""
    done = len(text)
    outermost: list[Edit] = []
    for edit in sorted(edits, key=lambda one: (one[0], -one[1])):
        if not outermost or edit[0] >= outermost[-1][1]:
            outermost.append(edit)
    for begin, end, new in reversed(outermost):
        assert end <= done
        text, done = text[:begin] + new + text[end:], begin
    return text


def indented(text: str, by: str = "    ") -> str:
    """The code one level deeper; lines that begin inside a string literal stay as they are."""
    inside = set(_lines_inside_strings(text))
    lines = text.splitlines(keepends=True)
    return "".join(
        by + line if line.strip() and number not in inside else line for number, line in enumerate(lines, start=1)
    )


def dedented(text: str, first: int, last: int, columns: int) -> str:
    """Lines of a text, moved to the left; those that begin inside a string literal stay as they are.

    Args:
        text: the whole text.
        first: number of the first line.
        last: number of the last one.
        columns: by how much.
    """
    inside = set(_lines_inside_strings(text))
    moved = []
    for number, line in enumerate(text.split("\n")[first - 1 : last], start=first):
        width = min(columns, len(line) - len(line.lstrip()))
        moved.append(line if number in inside else line[width:])
    return "\n".join(moved)


def _lines_inside_strings(text: str) -> Iterator[int]:
    """The numbers of the lines that begin inside a string literal."""
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            yield from range(token.start[0] + 1, token.end[0] + 1)
        elif kind.endswith("STRING_START"):  # of an f-string, from Python 3.12 on
            opened.append(token.start[0])
        elif kind.endswith("STRING_END"):
            yield from range(opened.pop() + 1, token.end[0] + 1)


def is_empty(text: str) -> bool:
    """Whether code has no statement, only comments."""
    return not parsed(text).body


def awaits(tree: ast.Module) -> bool:
    """Whether code awaits outside of functions."""
    return any(
        isinstance(node, _AWAITS) or (isinstance(node, ast.comprehension) and node.is_async)
        for node in _outside_functions(tree)
    )


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from _outside_functions(child)


def bound_names(tree: ast.AST, *, imports: bool = True) -> list[str]:
    """The global names that code binds, each once, in order.

    Args:
        tree: of the code.
        imports: whether the names of import statements count that stand at the top of the code.
    """
    names: dict[str, None] = {}
    top = set(map(id, getattr(tree, "body", [])))
    for node in _of_this_scope(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if imports or id(node) not in top:
                names.update(dict.fromkeys((one.asname or one.name).partition(".")[0] for one in node.names))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names[node.id] = None
        elif isinstance(node, _NAMED) and node.name:
            names[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names[node.rest] = None
        elif isinstance(node, ast.Global):
            names.update(dict.fromkeys(node.names))
    return list(names)


def _of_this_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose names are global: not those inside functions and classes, except their `global` statements."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from (one for one in ast.walk(child) if isinstance(one, ast.Global))
        elif isinstance(child, ast.comprehension):  # its variables are its own
            yield from (one for one in ast.walk(child) if isinstance(one, ast.NamedExpr))
        else:
            yield from _of_this_scope(child)
