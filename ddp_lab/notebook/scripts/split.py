"""A script as the cells of a notebook, without what a cluster does: start ranks, make and destroy the process group."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import DdpLabError
from .cells import read_notebook
from .frame import OURS
from .source_text import Edit, dedented, replaced, segment

__all__ = ["ScriptCell", "SplitScript", "split"]

_MARKER = re.compile(r"^# ?%%(?:[ \t]|$)", re.MULTILINE)
_RANKS = re.compile(r"--nproc[-_]per[-_]node[= ](\d+)")
_OUR_BACKEND = re.compile(r'"--backend", default="(\w+)"')
_OUR_VARIABLE = re.compile(r"dest=\"env_(\w+)\", default=('[^']*'|\"[^\"]*\")")
_FIRST_LINES = re.compile(r"(?:#!.*\n|#.*coding[:=].*\n)*")
_OF_CLUSTER = {"init_process_group", "destroy_process_group"}
_STARTED_ELSEWHERE = ("nccl", "auto")  # `%cluster start` chooses NCCL where there are GPUs
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.While, ast.With)


@dataclass(frozen=True)
class ScriptCell:
    """A cell: code for the ranks, or text in Markdown."""

    text: str
    markdown: bool = False


@dataclass
class SplitScript:
    """A script's cells.

    Attributes:
        cells: in order.
        n: number of ranks that the script's text names; None if it names none.
        backend: for `%cluster start`; "" for its default.
        env: environment variables that an exported script sets.
        notes: in words, what a reader must change.
    """

    cells: list[ScriptCell] = field(default_factory=list)
    n: int | None = None
    backend: str = ""
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive lines of the script that become one cell."""

    kind: str
    first: int
    last: int
    columns: int = 0


def split(text: str, name: str) -> SplitScript:
    """Splits a script at its ``# %%`` lines, or else into imports, definitions, loops and what is between them.

    Args:
        text: the script.
        name: its name, for errors.

    Raises:
        DdpLabError: it is not valid Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise DdpLabError(f"{name}, line {error.lineno}: {error.msg}; fix the script, then import it again") from error
    made = SplitScript()
    found = _RANKS.search(text)
    made.n = int(found[1]) if found is not None and int(found[1]) > 0 else None
    made.backend = _backend(text, tree)
    made.env = {name: ast.literal_eval(value) for name, value in _OUR_VARIABLE.findall(text)}
    made.notes = list(_notes(tree))
    cells = _sections(text) if _MARKER.search(text) else _natural(text, tree)
    for cell in cells:
        body = cell.text if cell.markdown else _adapted(cell.text)
        if body.strip():
            made.cells.append(ScriptCell(body.strip("\n"), cell.markdown))
    return made


def _backend(text: str, tree: ast.Module) -> str:
    """What the script gives to init_process_group, if it is written there."""
    found = _OUR_BACKEND.search(text)
    if found is not None:
        return "" if found[1] in _STARTED_ELSEWHERE else found[1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "init_process_group":
            given = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "backend")]
            for one in given:
                if isinstance(one, ast.Constant) and one.value in ("gloo", "shm", "mpi"):
                    return str(one.value)
    return ""


def _called(node: ast.Call) -> str:
    """The last part of the name of a function that is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _notes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "spawn":
            yield f"line {node.lineno} starts processes (spawn): call the function itself, the ranks already run"
        elif isinstance(node, ast.Name) and node.id == "__file__":
            yield f"line {node.lineno} reads __file__, which a notebook does not have: write the path"


# -- where cells begin


def _sections(text: str) -> Iterator[ScriptCell]:
    """The parts between the lines with ``# %%``, without the sections that an export adds."""
    cells = read_notebook(text, ".py", format_name="percent", comment_magics=False).cells
    is_ours = [str(cell.metadata.get("title", "")).startswith(OURS) for cell in cells]
    first = is_ours.index(True) if any(is_ours) else 0  # above an export's sections is its header
    for cell, ours in list(zip(cells, is_ours, strict=True))[first:]:
        if not ours:
            yield ScriptCell(cell.source, markdown=cell.cell_type != "code")


def _natural(text: str, tree: ast.Module) -> Iterator[ScriptCell]:
    """Imports, each definition, each loop, and what is between them; the main program's body comes without its `if`."""
    statements = list(tree.body)
    start = _FIRST_LINES.match(text)
    above = text.count("\n", 0, start.end()) if start is not None else 0
    if statements and _is_text(statements[0]):
        yield ScriptCell(ast.get_docstring(tree) or "", markdown=True)
        above = statements.pop(0).end_lineno or above
    inlined = _inlined(tree)
    chunks = list(_chunks(text, statements, above, inlined))
    grouped = itertools.groupby(chunks, key=lambda one: one.kind if one.kind in ("import", "other") else id(one))
    for _, group in grouped:
        parts = [dedented(text, one.first, one.last, one.columns) for one in group]
        yield ScriptCell("\n".join(parts))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _chunks(
    text: str, statements: Sequence[ast.stmt], above: int, inlined: ast.stmt | None, columns: int = 0
) -> Iterator[_Chunk]:
    """The statements with the comments above them."""
    last = above
    for node in statements:
        end = node.end_lineno or node.lineno
        if end <= last:
            continue  # on the same line as the one before
        if node is not inlined:
            if _is_main(node):
                assert isinstance(node, ast.If)
                yield from _of_main(text, node, inlined)
            else:
                yield _Chunk(_kind(node), last + 1, end, columns)
        last = end


def _of_main(text: str, node: ast.If, inlined: ast.stmt | None) -> Iterator[_Chunk]:
    """The body of the main program; a call of `main()` that can be inlined is the body of that function."""
    if inlined is None:
        yield from _chunks(text, node.body, node.lineno, None, node.body[0].col_offset)
        return
    assert isinstance(inlined, _FUNCTIONS)
    before = [one for one in node.body if _main_call(one) is None]
    yield from _chunks(text, before, node.lineno, None, node.body[0].col_offset)
    body = inlined.body[1:] if _is_text(inlined.body[0]) else inlined.body
    if body:
        above = (inlined.body[0].end_lineno or 0) if body is not inlined.body else inlined.body[0].lineno - 1
        yield from _chunks(text, body, above, None, body[0].col_offset)


def _kind(node: ast.stmt) -> str:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "import"
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return "definition"
    return "loop" if isinstance(node, _LOOPS) else "other"


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is ``if __name__ == "__main__":``, on lines of its own."""
    if not isinstance(node, ast.If) or node.orelse or node.body[0].lineno == node.lineno:
        return False
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.comparators) != 1:
        return False
    sides = [test.left, test.comparators[0]]
    names = [one.id for one in sides if isinstance(one, ast.Name)]
    return names == ["__name__"] and any(isinstance(one, ast.Constant) and one.value == "__main__" for one in sides)


def _main_call(node: ast.stmt) -> str | None:
    """The function that a statement calls without arguments, also inside of `sys.exit`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and _called(call) in ("exit", "SystemExit") and len(call.args) == 1:
        call = call.args[0]
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args and not call.keywords:
        return call.func.id
    return None


def _inlined(tree: ast.Module) -> ast.FunctionDef | None:
    """The function that the main program calls last, if its body can be cells: no arguments, no return, one call."""
    mains = [node for node in tree.body if _is_main(node)]
    if len(mains) != 1 or not isinstance(mains[0], ast.If):
        return None
    name = _main_call(mains[0].body[-1])
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name != name or node.decorator_list:
            continue
        used = sum(isinstance(one, ast.Name) and one.id == name for one in ast.walk(tree))
        arguments = node.args
        takes = arguments.args or arguments.kwonlyargs or arguments.posonlyargs or arguments.vararg or arguments.kwarg
        own = list(_outside_inner(node))
        leaves = any(isinstance(one, (ast.Return, ast.Yield, ast.YieldFrom, ast.Global)) for one in own)
        one_line = node.body[0].lineno == node.lineno
        inner = any(isinstance(one, ast.Nonlocal) for one in ast.walk(node))
        if used == 1 and not (takes or leaves or inner or one_line):
            return node
    return None


def _outside_inner(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from _outside_inner(child)


def _reads_command_line(node: ast.Call) -> bool:
    """Whether a call parses the arguments of the program."""
    return _called(node) in ("parse_args", "parse_known_args") and not node.args and not node.keywords


# -- what the cluster does


def _adapted(text: str) -> str:
    """A cell without the calls that make and destroy the process group, and with options that are written there."""
    edits: list[Edit] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node.value) in _OF_CLUSTER:
            begin, end = segment(text, node)
            if node.col_offset == 0:
                edits.append((begin, end + text[end : end + 1].count("\n"), ""))
            else:
                edits.append((begin, end, f"pass  # the cluster has done this: {_called(node.value)}"))
        elif isinstance(node, ast.Call) and _reads_command_line(node):
            edits.append((segment(text, node.func)[1], segment(text, node)[1], "([])"))
    return replaced(text, edits)
